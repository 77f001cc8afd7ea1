"""The Engine contract on PyTorch and transformers.

Any causal language model that transformers knows runs; what it can do beyond that, the self-check tells at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import cache_utils, masking_utils, modeling_rope_utils

from bough.cache.tree.state import Lane, Page, State
from bough.config import Settings
from bough.engines.contract import EngineCode, EngineInfo, ReportProgress, ScoredRun
from bough.engines.self_check.verdicts import find_verdict
from bough.engines.shared.code import describe_code
from bough.engines.shared.compute import Way
from bough.engines.shared.context import choose_context, reuse_limit
from bough.engines.shared.engine import LaneEngine
from bough.engines.shared.errors import as_engine_errors
from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch import attention
from bough.engines.torch.compute import Compute, LaneCompute, LibraryCompute, RecomputeCompute
from bough.engines.torch.cpu.packing import packed_weights
from bough.engines.torch.cpu.route import IN_TORCH, WeightsChoice, count_parameters, describe_weights
from bough.engines.torch.device import default_budget_bytes, dtype_of
from bough.engines.torch.forward import Forward
from bough.engines.torch.lanes.pages import Pages
from bough.engines.torch.layout import Layout
from bough.engines.torch.loading import choose_weights_here, load_model, make_random_model, prepare
from bough.engines.torch.pooled.attention import operator
from bough.engines.torch.pooled.lanes.memory import can_pool
from bough.engines.torch.pooled.passes.compiling import prepare_experts
from bough.engines.torch.pooled.passes.wiring import Wiring
from bough.engines.torch.pooled.pool import Pool, prepare_model
from bough.engines.torch.sampling import sample, score
from bough.engines.torch.self_check.check import self_check, verdict_key
from bough.engines.torch.self_check.layouts import find_layout
from bough.engines.torch.self_check.probe import without_groups
from bough.types import Draw, Sampled

_SLACK_CPU = 512
_SLACK_ACCELERATOR = 2_048
_BY_LENGTH = {"dynamic", "longrope"}  # rotary scalings


class TorchEngine(LaneEngine):
    """One loaded model. `load` makes it from a folder; tests make it from a model object."""

    _layout: Layout

    def __init__(
        self,
        model: Any,
        settings: Settings,
        progress: ReportProgress | None = None,
        weights: WeightsChoice = IN_TORCH,
        pools: bool | None = None,
    ) -> None:
        """`pools` says whether to try a pool of slots; usually that is done on CUDA in half precision."""
        attention.register()
        operator.register()
        self._weights = weights
        self._forward = Forward(prepare(model))
        pools = can_pool(self._forward.device, dtype_of(model)) if pools is None else pools
        if pools and settings.graphs != "off" and dtype_of(model) == torch.bfloat16:
            prepare_experts(model)  # before the check, which then tries what will run
        key = verdict_key(model, settings.attention, weights, pools=pools)
        layout = find_layout(settings, key, self._forward)
        verdict = find_verdict(
            settings,
            key,
            lambda: self_check(self._forward, layout, settings.attention, weights, pools=pools),
            progress,
        )
        model.set_attn_implementation(verdict.attention)
        text = model.config.get_text_config(decoder=True)
        if verdict.way is not Way.LANES:
            layout = without_groups(layout.unknown, layout.vocab_size or text.vocab_size)
        self._pages: Pages = Pages(layout, self._forward.device)
        self._pool: Pool | None = None
        self._graphs, self._cache_folder, self._num_lanes = settings.graphs, settings.cache_folder, settings.lanes or 32
        bound = getattr(text, "max_position_embeddings", None) or 0
        slack = settings.chunk or (_SLACK_CPU if self._forward.device.type == "cpu" else _SLACK_ACCELERATOR)
        sizes = LaneSizes(choose_context(bound, settings), slack)
        limit = reuse_limit(text.to_dict(), _BY_LENGTH, bound)
        info, state_size = _info_of(self._forward, weights), self._forward.state_size
        super().__init__(info, layout, self._pages, verdict, sizes, limit, state_size)
        self._compute = self._make_compute(layout)

    @classmethod
    def uses_packed(cls, settings: Settings) -> bool:
        """Whether `load` reads the packed weights of a converted model: only on a CPU, if nothing else is asked for."""
        packing = choose_weights_here(settings).packing
        return packing is not None and not packing.quantized

    @classmethod
    def load(cls, folder: Path, settings: Settings, progress: ReportProgress | None = None) -> TorchEngine:
        """Load the model in `folder` and run its self-check. `progress` is called with a text at each stage."""
        loaded = load_model(folder, settings, progress)
        return cls(loaded.model, settings, progress, loaded.weights)

    @classmethod
    def load_shape(cls, config: dict[str, Any], settings: Settings) -> TorchEngine:
        """A model of this transformers configuration with random weights, for `bough bench --shape`."""
        made = make_random_model(config, settings)
        return cls(made.model, settings, weights=made.weights)

    def limit_device(self, budget_bytes: int) -> None:
        """Take the memory of the pool, if there is one, in one piece. Else the cache keeps within the budget by itself."""
        if self._verdict.is_pooled and self._pool is None:
            warms_up = self._graphs != "off" and self._forward.device.type == "cuda" and self._reuse_limit is None
            if warms_up:
                prepare_model(self._forward.model)
            wiring = Wiring(self._forward, self._layout)
            goes_ahead = self._reuse_limit is None  # else lanes of some lengths must not be computed together
            self._pool = Pool(self._forward, self._layout, wiring, self._sizes, budget_bytes, goes_ahead=goes_ahead)
            self._pool.pages.transfers = self._pages.transfers  # whose host memory may be limited already
            self._pages, self._compute = self._pool.pages, self._pool.compute
            if warms_up:
                self._pool.warm_up(self._cache_folder, self._num_lanes)
            if self._graphs == "wait":
                self._pool.wait_until_ready()

    def make_lane(self) -> Lane:
        self.limit_device(self.default_budget_bytes())
        return super().make_lane()

    def describe(self) -> dict[str, str]:
        model = self._forward.model
        return {
            **self._describe_info(),
            "weights": describe_weights(model, self._weights),
            "step": self._describe_step(),
            "attention": self._verdict.attention,
            **self._describe_verdict(),
            **({"host": self._pages.transfers.describe()} if self._pages.transfers else {}),
            "parameters": f"{count_parameters(model):,}",
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    def default_budget_bytes(self) -> int:
        if self._pool is not None:  # whose memory is taken
            return self._pool.budget_bytes
        return default_budget_bytes(self._forward.device)

    def sample(self, logits: Sequence[Tensor], draws: Sequence[Draw]) -> list[Sampled]:
        if self._pool is not None:
            with as_engine_errors("sampling, or the step after it,"):
                return self._pool.compute.sample(logits, draws)
        return sample(list(logits), draws)

    def _score(self, rows: Tensor, following: Sequence[int], num_top: int) -> ScoredRun:
        return ScoredRun(rows[-1].clone(), score(rows[: len(following)], following, num_top))

    @property
    def has_host(self) -> bool:
        return self._pages.transfers is not None

    def host_bytes(self) -> int:
        return self._pages.transfers.pool.total_bytes if self._pages.transfers else 0

    def limit_host(self, budget_bytes: int) -> None:
        """Take no more host memory than this from now on; nothing happens where there is no host tier."""
        if self._pages.transfers is not None:
            self._pages.transfers.pool.limit(budget_bytes)

    def to_host(self, item: Page | State) -> None:
        self._pages.to_host(item)

    def to_device(self, item: Page | State) -> None:
        self._pages.to_device(item)

    def host_seconds_per_byte(self) -> float | None:
        return self._pages.transfers.speed.seconds_per_byte() if self._pages.transfers else None

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until all that makes steps faster is ready; False if it is not yet. Answers come meanwhile, too."""
        return self._pool is None or self._pool.wait_until_ready(timeout_s)

    def synchronize(self) -> None:
        if self._forward.device.type == "cuda":
            torch.cuda.synchronize(self._forward.device)
        elif self._forward.device.type == "mps":
            torch.mps.synchronize()

    def close(self) -> None:
        """Release the model's memory; the engine cannot be used afterwards."""
        is_cuda = self._forward.device.type == "cuda"
        if self._pool is not None:
            self.synchronize()
            self._pool.close()
        if self._pages.transfers is not None:
            self.synchronize()
            self._pages.transfers.close()
        self._pool = None
        del self._compute, self._forward
        if is_cuda:
            torch.cuda.empty_cache()

    def _make_compute(self, layout: Layout) -> Compute:
        if self._verdict.way is Way.LIBRARY:
            return LibraryCompute(self._forward)
        if self._verdict.way is Way.RECOMPUTE:
            return RecomputeCompute(self._forward)
        route = self._weights.route
        step = route.make_step(self._forward.model, layout) if route is not None and self._verdict.whole_step else None
        return LaneCompute(self._forward, layout, self._pages, self._sizes, self._verdict.can_batch, step)

    def _describe_step(self) -> str:
        """What computes, for people, and why not something faster."""
        verdict, route = self._verdict, self._weights.route
        if verdict.is_pooled:
            why_not = "; no graphs, because its rotary scaling depends on the length" if self._reuse_limit else ""
            return f"transformers' modules over a pool: {self._pool.describe() if self._pool else 'not begun'}{why_not}"
        if route is None:
            why_not = f"; no pool, because {verdict.why_not_pooled}" if verdict.why_not_pooled else ""
            return f"transformers' modules in torch{why_not}"
        if verdict.whole_step:
            return f"whole, in one call ({route.title} kernels)"
        by = f"products by {route.title} kernels" if packed_weights(self._forward.model) else "products in torch"
        return f"transformers' modules, {by}; not in one call, because {verdict.why_no_whole_step}"


def _info_of(forward: Forward, weights: WeightsChoice) -> EngineInfo:
    dtype = str(dtype_of(forward.model)).removeprefix("torch.")
    code = _code_of(forward.model)
    return EngineInfo("torch", type(forward.model).__name__, str(forward.device), dtype, weights.quantization, code)


def _code_of(model: Any) -> EngineCode:
    """The code of a model: its own modules and configurations, and what models of transformers share."""
    text = model.config.get_text_config(decoder=True)
    own = {type(each) for each in (model.config, text, *model.modules())}
    foreign = [each for each in own if each.__module__.partition(".")[0] not in ("torch", "bough")]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return describe_code(versions, [*foreign, cache_utils, masking_utils, modeling_rope_utils])
