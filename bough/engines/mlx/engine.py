"""The Engine contract on MLX and mlx-lm.

Any language model that mlx-lm knows runs; the self-check at load finds what it can do beyond that. Memory is unified:
device and host are one tier. One thread at a time calls an engine, and it need not always be the same one.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from bough.cache.tree.state import Page, State
from bough.config import Settings
from bough.engines.contract import EngineCode, EngineInfo, ReportProgress, ScoredRun
from bough.engines.mlx import device
from bough.engines.mlx.compute import AheadCompute, MlxLaneCompute
from bough.engines.mlx.forward import MlxForward
from bough.engines.mlx.layers import install_attention
from bough.engines.mlx.layout import MlxLayout, MlxPages
from bough.engines.mlx.library import VERSION, base, cache, rope_utils, utils
from bough.engines.mlx.loading.model import MlxModel, load_model, main_type, make_random_model
from bough.engines.mlx.sampling import sample, score
from bough.engines.mlx.self_check.check import self_check, verdict_key
from bough.engines.mlx.self_check.probe import probe, without_groups
from bough.engines.self_check.check import find_verdict
from bough.engines.shared.code import describe_code
from bough.engines.shared.compute import Compute, PlainCompute, RunMode
from bough.engines.shared.engine import LaneEngine, choose_sizes, reuse_limit
from bough.engines.shared.errors import as_engine_errors
from bough.errors import EngineError, SettingsError
from bough.types import Draw, SampledToken

_BY_LENGTH = {"dynamic"}  # rotary scalings; for "longrope" mlx-lm uses the long factors at any length


class MlxEngine(LaneEngine):
    """One loaded model. `load` makes it from a folder; tests make it from a loaded model."""

    def __init__(
        self, loaded: MlxModel, settings: Settings, progress: ReportProgress | None = None, goes_ahead: bool | None = None
    ) -> None:
        """`goes_ahead`: compute one step ahead. None means on a GPU only; tests set it on a CPU."""
        self._forward = MlxForward(loaded)
        self._warnings = loaded.warnings
        install_attention(loaded.model)
        layout = probe(self._forward)
        verdict = find_verdict(settings, verdict_key(self._forward), lambda: self_check(self._forward, layout), progress)
        text = loaded.text
        if verdict.way is not RunMode.LANES:
            layout = without_groups(layout.unknown, layout.vocab_size or text["vocab_size"])
        bound = text.get("max_position_embeddings") or 0
        is_cpu = mx.default_device() == mx.cpu
        sizes = choose_sizes(bound, settings, is_on_cpu=is_cpu)
        pages = MlxPages(layout)
        limit = reuse_limit(text, _BY_LENGTH, bound)
        info, state_size = _info_of(self._forward, is_cpu), self._forward.state_size  # which the probe has shown
        super().__init__(info, layout, pages, verdict, sizes, limit, state_size)
        self._compute = self._make_compute(layout, pages, not is_cpu if goes_ahead is None else goes_ahead)
        device.wire()
        mx.clear_cache()

    @classmethod
    def load(cls, folder: Path, settings: Settings, progress: ReportProgress | None = None) -> MlxEngine:
        _require_own_weights(settings)
        return cls(load_model(folder, settings, progress), settings, progress)

    @classmethod
    def load_shape(cls, config: dict[str, Any], settings: Settings) -> MlxEngine:
        _require_own_weights(settings)
        return cls(make_random_model(config, settings), settings)

    def describe(self) -> dict[str, str]:
        return {
            **self.info.describe(),
            **self._describe_verdict(),
            "memory": device.describe_memory(),
            **({"differs": "; ".join(self._warnings)} if self._warnings else {}),
            "parameters": f"{utils.get_total_parameters(self._forward.model):,}",
            "mlx": importlib.metadata.version("mlx"),
            "mlx_lm": VERSION,
        }

    def default_budget_bytes(self) -> int:
        return device.default_budget_bytes()

    def sample(self, logits: Sequence[mx.array], draws: Sequence[Draw]) -> list[SampledToken]:
        with as_engine_errors("choosing tokens"):
            return self._compute.sample(logits, draws) if isinstance(self._compute, AheadCompute) else sample(logits, draws)

    def _score(self, rows: mx.array, following: Sequence[int], num_top: int) -> ScoredRun:
        last = mx.contiguous(rows[-1])  # memory of its own
        mx.eval(last)
        return ScoredRun(last, score(rows[: len(following)], following, num_top))

    @property
    def has_host(self) -> bool:
        return False

    def host_bytes(self) -> int:
        return 0

    def limit_host(self, budget_bytes: int) -> None:
        """Nothing to limit: host and device are one tier."""

    def to_host(self, item: Page | State) -> None:
        raise EngineError("host and device are one tier: there is nowhere to move content to")

    def to_device(self, item: Page | State) -> None:
        raise EngineError("host and device are one tier: there is nowhere to move content from")

    def host_seconds_per_byte(self) -> float | None:
        return None

    def synchronize(self) -> None:
        mx.synchronize()

    def close(self) -> None:
        self.__dict__.pop("_compute", None)
        self.__dict__.pop("_forward", None)
        mx.clear_cache()

    def _make_compute(self, layout: MlxLayout, pages: MlxPages, goes_ahead: bool) -> Compute[Any, mx.array]:
        if self._verdict.way is not RunMode.LANES:
            return PlainCompute(self._forward, keeps_cache=self._verdict.way is RunMode.LIBRARY)
        kind = AheadCompute if goes_ahead else MlxLaneCompute
        return kind(self._forward, layout, pages, self._sizes, self._verdict.can_batch)


def _info_of(forward: MlxForward, is_cpu: bool) -> EngineInfo:
    dtype = str(main_type(forward.model)).removeprefix("mlx.core.")
    packing = forward.config.get("quantization")
    quantization = (
        f"weights in {packing.get('bits')} bits by {packing.get('group_size')}" if isinstance(packing, dict) else ""
    )
    model, code = str(forward.config["model_type"]), _code_of(forward.model)
    return EngineInfo("mlx", model, "cpu" if is_cpu else "gpu", dtype, quantization, code)


def _code_of(model: Any) -> EngineCode:
    """The code of a model: its own modules, also those that Bough's classes build on, and what models of mlx-lm share."""
    own = {kind for each in model.modules() for kind in type(each).__mro__}
    foreign = [each for each in own if each.__module__.partition(".")[0] not in ("mlx", "bough", "builtins")]
    versions = {"mlx": importlib.metadata.version("mlx"), "mlx-lm": VERSION}
    return describe_code(versions, [*foreign, base, cache, rope_utils])


def _require_own_weights(settings: Settings) -> None:
    if settings.weights != "auto":
        raise SettingsError(f"weights is {settings.weights!r}, and MLX keeps them as the model's files have them: use auto")
    if settings.kv != "auto":
        raise SettingsError(f"kv is {settings.kv!r}, and MLX keeps rows in the type that the model computes with: use auto")
