"""The Engine contract on MLX and mlx-lm.

Any language model that mlx-lm knows runs; what it can do beyond that, the self-check tells at load. Memory is unified:
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
from bough.engines.mlx.ahead import AheadCompute
from bough.engines.mlx.compute import Compute, LaneCompute, LibraryCompute, RecomputeCompute
from bough.engines.mlx.forward import Forward
from bough.engines.mlx.lanes.layers import install_attention
from bough.engines.mlx.lanes.pages import Pages
from bough.engines.mlx.layout import Layout
from bough.engines.mlx.library import VERSION, base, cache, rope_utils, utils
from bough.engines.mlx.loading.model import LoadedModel, load_model, main_type, make_random_model
from bough.engines.mlx.sampling import sample, score
from bough.engines.mlx.self_check.check import self_check, verdict_key
from bough.engines.mlx.self_check.probe import probe, without_groups
from bough.engines.self_check.verdicts import find_verdict
from bough.engines.shared.code import describe_code
from bough.engines.shared.compute import Way
from bough.engines.shared.context import choose_context, reuse_limit
from bough.engines.shared.engine import LaneEngine
from bough.engines.shared.errors import as_engine_errors
from bough.engines.shared.row_memory import LaneSizes
from bough.errors import EngineError, SettingsError
from bough.types import Draw, Sampled

_SLACK_CPU = 512
_SLACK_GPU = 2_048
_BY_LENGTH = {"dynamic"}  # rotary scalings; for "longrope" mlx-lm takes the long factors at any length


class MlxEngine(LaneEngine):
    """One loaded model. `load` makes it from a folder; tests make it from a loaded model."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: Settings,
        progress: ReportProgress | None = None,
        goes_ahead: bool | None = None,
    ) -> None:
        """`goes_ahead`: compute one step ahead. None means on a GPU only; tests set it on a CPU."""
        self._forward = Forward(loaded)
        self._warnings = loaded.warnings
        install_attention(loaded.model)
        layout = probe(self._forward)
        verdict = find_verdict(settings, verdict_key(self._forward), lambda: self_check(self._forward, layout), progress)
        text = loaded.text
        if verdict.way is not Way.LANES:
            layout = without_groups(layout.unknown, layout.vocab_size or text["vocab_size"])
        bound = text.get("max_position_embeddings") or 0
        is_cpu = mx.default_device() == mx.cpu
        slack = settings.chunk or (_SLACK_CPU if is_cpu else _SLACK_GPU)
        sizes = LaneSizes(choose_context(bound, settings), slack)
        pages = Pages(layout)
        limit = reuse_limit(text, _BY_LENGTH, bound)
        info, state_size = _info_of(self._forward, is_cpu), self._forward.state_size  # which the probe has shown
        super().__init__(info, layout, pages, verdict, sizes, limit, state_size)
        self._compute = self._make_compute(layout, pages, not is_cpu if goes_ahead is None else goes_ahead)
        device.wire()
        mx.clear_cache()

    @classmethod
    def uses_packed(cls, settings: Settings) -> bool:
        """Never: MLX reads the file that weights are packed in, or the floats of a model that was converted."""
        return False

    @classmethod
    def load(cls, folder: Path, settings: Settings, progress: ReportProgress | None = None) -> MlxEngine:
        """Load the model in `folder` and run its self-check. `progress` is called with a text at each stage."""
        _require_own_weights(settings)
        return cls(load_model(folder, settings, progress), settings, progress)

    @classmethod
    def load_shape(cls, config: dict[str, Any], settings: Settings) -> MlxEngine:
        """A model of this transformers configuration with random weights, for `bough bench --shape`."""
        _require_own_weights(settings)
        return cls(make_random_model(config, settings), settings)

    def describe(self) -> dict[str, str]:
        model = self._forward.model
        return {
            **self._describe_info(),
            **self._describe_verdict(),
            "memory": device.describe_memory(),
            **({"differs": "; ".join(self._warnings)} if self._warnings else {}),
            "parameters": f"{_num_parameters(model):,}",
            "mlx": importlib.metadata.version("mlx"),
            "mlx_lm": VERSION,
        }

    def default_budget_bytes(self) -> int:
        return device.default_budget_bytes()

    def sample(self, logits: Sequence[mx.array], draws: Sequence[Draw]) -> list[Sampled]:
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
        """Release the model's memory; the engine cannot be used afterwards."""
        self.__dict__.pop("_compute", None)
        self.__dict__.pop("_forward", None)
        mx.clear_cache()

    def _make_compute(self, layout: Layout, pages: Pages, goes_ahead: bool) -> Compute:
        if self._verdict.way is Way.LIBRARY:
            return LibraryCompute(self._forward)
        if self._verdict.way is Way.RECOMPUTE:
            return RecomputeCompute(self._forward)
        compute = LaneCompute(self._forward, layout, pages, self._sizes, self._verdict.can_batch)
        return AheadCompute(compute, self._sizes.context) if goes_ahead else compute


def _info_of(forward: Forward, is_cpu: bool) -> EngineInfo:
    dtype = str(main_type(forward.model)).removeprefix("mlx.core.")
    model = str(forward.config["model_type"])
    device, code = "cpu" if is_cpu else "gpu", _code_of(forward.model)
    return EngineInfo("mlx", model, device, dtype, _quantization_of(forward.config), code)


def _code_of(model: Any) -> EngineCode:
    """The code of a model: its own modules, also those that Bough's classes build on, and what models of mlx-lm share."""
    own = {kind for each in model.modules() for kind in type(each).__mro__}
    foreign = [each for each in own if each.__module__.partition(".")[0] not in ("mlx", "bough", "builtins")]
    versions = {"mlx": importlib.metadata.version("mlx"), "mlx-lm": VERSION}
    return describe_code(versions, [*foreign, base, cache, rope_utils])


def _quantization_of(config: dict[str, Any]) -> str:
    packing = config.get("quantization")
    return f"weights in {packing.get('bits')} bits by {packing.get('group_size')}" if isinstance(packing, dict) else ""


def _num_parameters(model: Any) -> int:
    return int(utils.get_total_parameters(model))


def _require_own_weights(settings: Settings) -> None:
    """Raise SettingsError if the settings ask for weights in another form than the model's files have them."""
    if settings.weights != "auto":
        raise SettingsError(f"weights is {settings.weights!r}, and MLX keeps them as the model's files have them: use auto")
