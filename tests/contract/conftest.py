"""The engines that the contract suite runs over. A new engine adds one entry to `FACTORIES`, and to `WITH_HOST`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch

from bough.cache.tree.state import Page
from bough.config import Settings
from bough.engines.choice import find_installed
from bough.engines.contract import Engine
from bough.engines.torch import TorchEngine
from tests.contract.lagging import make_lagging_transfers
from tests.contract.pooled_parity import MAY_NOT_POOL, ON_POOL
from tests.fakes import MODELS, FakeEngine
from tests.packed_models import has_kernels, load_packed, save_model
from tests.tiny_models import make_model


@dataclass(frozen=True)
class EngineUnderTest:
    """An engine under test, and the two things that the contract itself does not tell.

    `held` is zero when every page and state was given back; `storage_bytes` is the memory that a page keeps alive.
    `rounding` is how far log-probabilities may be apart that are computed in two ways.
    """

    engine: Engine
    held: Callable[[], int]
    storage_bytes: Callable[[Page], int]
    rounding: float = 1e-4


def _fake(name: str, *, has_host: bool = False) -> Callable[[Path], EngineUnderTest]:
    def make(folder: Path) -> EngineUnderTest:
        engine = FakeEngine(MODELS[name], has_host=has_host)
        return EngineUnderTest(engine, lambda: len(engine.live), lambda page: page.nbytes)

    return make


def _torch(name: str, device: str = "cpu") -> Callable[[Path], EngineUnderTest]:
    def make(folder: Path) -> EngineUnderTest:
        torch.set_num_threads(1)
        engine = TorchEngine(make_model(name).to(device), Settings(cache_folder=folder))
        return EngineUnderTest(engine, lambda: engine.held_bytes, lambda page: page.rows.untyped_storage().nbytes())

    return make


def _pooled(
    name: str, device: str = "cpu", dtype: torch.dtype = torch.float32, graphs: Literal["wait", "off"] = "off"
) -> Callable[[Path], EngineUnderTest]:
    """The torch engine on a pool: on a CPU in plain torch, to the same plans as the kernels."""

    def make(folder: Path) -> EngineUnderTest:
        torch.set_num_threads(1)
        settings = Settings(cache_folder=folder)
        engine = TorchEngine(make_model(name).to(device, dtype), settings, pools=True, graphs=graphs)
        engine.limit_device(_POOL_BYTES)
        assert "over a pool" in engine.describe()["step"], engine.describe()["step"]
        rounding = 1e-4 if dtype == torch.float32 else 0.1
        return EngineUnderTest(engine, lambda: engine.held_bytes, lambda page: page.nbytes, rounding)

    return make


def _packed(name: str, weights: str, kv: str) -> Callable[[Path], EngineUnderTest]:
    """The torch engine with packed weights, where there are kernels: exact from bfloat16, or quantized."""

    def make(folder: Path) -> EngineUnderTest:
        torch.set_num_threads(1)
        engine = load_packed(save_model(make_model(name), folder / "model"), weights, kv=kv)
        assert engine.describe()["kv"].startswith(kv)
        return EngineUnderTest(engine, lambda: engine.held_bytes, lambda page: page.rows.untyped_storage().nbytes())

    return make


def _lagging(make: Callable[[Path], EngineUnderTest]) -> Callable[[Path], EngineUnderTest]:
    def make_lagging(folder: Path) -> EngineUnderTest:
        with patch("bough.engines.torch.lanes.pages.make_transfers", make_lagging_transfers):
            return make(folder)

    return make_lagging


def _mlx(name: str) -> Callable[[Path], EngineUnderTest]:
    def make(folder: Path) -> EngineUnderTest:
        from bough.engines.mlx import MlxEngine  # only where MLX is
        from tests.tiny_mlx_models import make_loaded

        engine = MlxEngine(make_loaded(name), Settings(cache_folder=folder))
        # An array does not tell the size of the buffer that it keeps alive: a page over a slice would pass.
        return EngineUnderTest(engine, lambda: engine.held_bytes, lambda page: int(page.rows.nbytes))

    return make


_KINDS = {
    "full": "llama",
    "window": "mistral",
    "full+window": "gemma3_text",
    "full+recurrent": "qwen3_next",
    "recurrent": "mamba2",
    "both-in-one-layer": "falcon_h1",
}

_POOL_BYTES = 64 << 20
_HAS_KERNELS = torch.cuda.is_available() and find_spec("triton") is not None
_ON_POOL = {kind: name for kind, name in _KINDS.items() if kind != "recurrent"}
_POOLED_ON_CUDA = [name for name in ON_POOL if _HAS_KERNELS and name not in MAY_NOT_POOL]
_BY_GRAPHS = [name for name in ("llama", "gemma3_text", "qwen3_next") if _HAS_KERNELS]
_PACKED = {"full": ("q4_0", "int8"), "window": ("q8_0", "float16"), "full+window": ("packed", "bfloat16")}

FACTORIES: dict[str, Callable[[Path], EngineUnderTest]] = {
    **{f"fake-{name}": _fake(name) for name in MODELS},
    **{f"torch-{kind}": _torch(name) for kind, name in _KINDS.items()},
    **{f"pooled-{kind}": _pooled(name) for kind, name in _ON_POOL.items()},
    **{f"packed-{kind}": _packed(_KINDS[kind], *types) for kind, types in _PACKED.items()},
    **{f"cuda-{kind}": _torch(name, "cuda") for kind, name in _KINDS.items() if torch.cuda.is_available()},
    **{f"cuda-pooled-{name}": _pooled(name, "cuda", torch.bfloat16) for name in _POOLED_ON_CUDA},
    **{f"cuda-graphs-{name}": _pooled(name, "cuda", torch.bfloat16, "wait") for name in _BY_GRAPHS},
    **{f"mlx-{kind}": _mlx(name) for kind, name in _KINDS.items()},
}

WITH_HOST: dict[str, Callable[[Path], EngineUnderTest]] = {
    **{f"fake-{name}": _fake(name, has_host=True) for name in MODELS},
    **{f"lagging-{kind}": _lagging(_torch(name)) for kind, name in _KINDS.items()},
    **{f"lagging-pooled-{kind}": _lagging(_pooled(name)) for kind, name in _ON_POOL.items()},
    **{name: factory for name, factory in FACTORIES.items() if name.startswith("cuda") and "graphs" not in name},
}


_NEEDS_MLX = pytest.mark.skipif("mlx" not in find_installed(), reason="MLX is not installed")
_NEEDS_KERNELS = pytest.mark.skipif(not has_kernels(), reason="there are no CPU kernels")
_MARKS = {"cuda": [pytest.mark.cuda], "mlx": [pytest.mark.mlx, _NEEDS_MLX], "packed": [_NEEDS_KERNELS]}


def as_params(names: Iterable[str]) -> list[Any]:
    """Engines as parameters of a fixture."""
    return [pytest.param(name, marks=_MARKS.get(name.partition("-")[0], [])) for name in names]


@pytest.fixture(scope="module", params=as_params(FACTORIES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineUnderTest]:
    is_cuda = request.param.startswith("cuda")  # what was compiled and checked there serves other tests, too
    folder = tmp_path_factory.getbasetemp() / "cuda" if is_cuda else tmp_path_factory.mktemp("verdicts")
    made = FACTORIES[request.param](folder)
    yield made
    made.engine.close()


@pytest.fixture
def tested(made: EngineUnderTest) -> Iterator[EngineUnderTest]:
    """The engine; a test that leaves a page or state behind fails."""
    yield made
    assert made.held() == 0, "pages or states were not given back"
