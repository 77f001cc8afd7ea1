"""Tiny architectures on a pool in bfloat16 against float32, next to stock transformers: one here, all of them on CUDA."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.contract.parity import WAYS
from tests.contract.pooled_parity import MAY_NOT_POOL, MODES, MOST, MOST_WITH_EXPERTS, ON_POOL, pooled_rows

NEEDS_CUDA = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available() or find_spec("triton") is None, reason="needs CUDA and triton"),
]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in ON_POOL if name != "qwen3")]
)
def test_a_pool_in_plain_torch_is_as_near_to_float32_as_stock_transformers(name: str, tmp_path: Path) -> None:
    check_rows(name, tmp_path, "eager", "cpu")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [pytest.param(name, marks=NEEDS_CUDA) for name in ON_POOL])
@pytest.mark.timeout(300)
def test_a_pool_on_cuda_is_as_near_to_float32_as_stock_transformers(
    name: str, mode: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_rows(name, tmp_path_factory.getbasetemp() / "cuda", mode, "cuda")  # what is compiled serves other tests, too


def check_rows(name: str, folder: Path, mode: str, device: str) -> None:
    rows = list(pooled_rows(name, folder, mode=mode, device=device))

    assert {row.way for row in rows} == set(WAYS)
    most = MOST_WITH_EXPERTS if name in MAY_NOT_POOL else MOST
    assert {row.way: row.ratio for row in rows if not row.ratio <= most} == {}
    step = rows[-1].step
    if name not in MAY_NOT_POOL:
        assert step.startswith("transformers' modules over a pool"), step
        assert mode != "eager" or "graph" not in step, step
        assert mode == "eager" or "graph (" in step, step
        assert mode != "graph" or "compiled + graph" not in step, step
