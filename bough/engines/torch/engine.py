"""The Engine contract on PyTorch and transformers.

Any causal language model that transformers knows runs; the self-check at load finds what it can do beyond that.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import cache_utils, masking_utils, modeling_rope_utils

from bough.cache.tree.state import Lane, Page, State
from bough.config import Settings
from bough.engines.contract import EngineCode, EngineInfo, ReportProgress, ScoredRun
from bough.engines.self_check.check import find_verdict
from bough.engines.shared.code import describe_code
from bough.engines.shared.compute import Compute, PlainCompute, RunMode
from bough.engines.shared.engine import LaneEngine, choose_sizes, reuse_limit
from bough.engines.shared.errors import as_engine_errors
from bough.engines.torch import attention
from bough.engines.torch.compute import TorchLaneCompute
from bough.engines.torch.cpu.packing import packed_weights
from bough.engines.torch.cpu.route import IN_TORCH, WeightsChoice, count_parameters, describe_weights
from bough.engines.torch.cpu.step import WholeStep
from bough.engines.torch.cpu.structure import UnknownStructure
from bough.engines.torch.device import default_budget_bytes, dtype_of
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.lanes.pages import TorchPages
from bough.engines.torch.layout import TorchLayout
from bough.engines.torch.model_loader import load_model, make_random_model, prepare
from bough.engines.torch.pooled.compiling import prepare_experts
from bough.engines.torch.pooled.memory import can_pool
from bough.engines.torch.pooled.pool import Pool
from bough.engines.torch.pooled.products.linears import join_products
from bough.engines.torch.pooled.sampling.sampler import DeviceSampler
from bough.engines.torch.pooled.wiring import Wiring, register_pool_attention
from bough.engines.torch.sampling import sample, score
from bough.engines.torch.self_check.check import self_check, verdict_key
from bough.engines.torch.self_check.probe import find_layout, without_groups
from bough.errors import ModelError
from bough.types import Draw, SampledToken

_BY_LENGTH = {"dynamic", "longrope"}  # rotary scalings


class TorchEngine(LaneEngine):
    """One loaded model. `load` makes it from a folder; tests make it from a model object."""

    _layout: TorchLayout

    def __init__(
        self,
        model: Any,
        settings: Settings,
        progress: ReportProgress | None = None,
        weights: WeightsChoice = IN_TORCH,
        pools: bool | None = None,
        *,
        graphs: Literal["auto", "wait", "off"] = "auto",
    ) -> None:
        """`pools`: whether to try a pool of slots; None means on CUDA in half precision.

        `graphs`: whether to capture steps on CUDA as graphs: in the background, before the first request, or not at all.
        """
        attention.register()
        register_pool_attention()
        self._weights = weights
        self._forward = TorchForward(prepare(model))
        pools = can_pool(self._forward.device, dtype_of(model)) if pools is None else pools
        if pools and graphs != "off" and dtype_of(model) == torch.bfloat16:
            prepare_experts(model)  # before the check, which then tries what will run
        key = verdict_key(model, weights, pools=pools, kv=settings.kv)
        layout = find_layout(settings, key, self._forward)
        verdict = find_verdict(
            settings, key, lambda: self_check(self._forward, layout, weights, pools=pools, kv=settings.kv), progress
        )
        model.set_attn_implementation(verdict.attention)
        text = model.config.get_text_config(decoder=True)
        if verdict.way is not RunMode.LANES:
            layout = without_groups(layout.unknown, layout.vocab_size or text.vocab_size)
        layout = layout.keep_as(verdict.kv)
        self._pages: TorchPages = TorchPages(layout, self._forward.device)
        self._pool: Pool | None = None
        has_kernels = self._forward.device.type == "cuda" and find_spec("triton") is not None
        self._sampler = DeviceSampler() if has_kernels else None
        self._graphs, self._cache_folder, self._num_lanes = graphs, settings.cache_folder, settings.lanes or 32
        bound = getattr(text, "max_position_embeddings", None) or 0
        sizes = choose_sizes(bound, settings, is_on_cpu=self._forward.device.type == "cpu")
        limit = reuse_limit(text.to_dict(), _BY_LENGTH, bound)
        info, state_size = _info_of(self._forward, weights, layout.kv if verdict.kv else ""), self._forward.state_size
        super().__init__(info, layout, self._pages, verdict, sizes, limit, state_size)
        self._compute = self._make_compute(layout)

    @classmethod
    def load(cls, folder: Path, settings: Settings, progress: ReportProgress | None = None) -> TorchEngine:
        loaded = load_model(folder, settings, progress)
        return cls(loaded.model, settings, progress, loaded.weights)

    @classmethod
    def load_shape(cls, config: dict[str, Any], settings: Settings) -> TorchEngine:
        made = make_random_model(config, settings)
        return cls(made.model, settings, weights=made.weights)

    def limit_device(self, budget_bytes: int) -> None:
        """Take the memory of the pool, if there is one, in one piece. Else the cache keeps within the budget by itself."""
        if not self._verdict.is_pooled or self._pool is not None:
            return
        goes_ahead = self._reuse_limit is None  # else lanes of some lengths must not be computed together
        warms_up = self._graphs != "off" and self._forward.device.type == "cuda" and goes_ahead
        if warms_up:
            join_products(self._forward.model)  # before the pool takes its memory
        wiring = Wiring(self._forward, self._layout)
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
            **self.info.describe(),
            "weights": describe_weights(model, self._weights),
            "step": self._describe_step(),
            **self._describe_rows(),
            "attention": self._verdict.attention,
            **self._describe_verdict(),
            **({"host": self._pages.transfers.describe()} if self._pages.transfers else {}),
            "parameters": f"{count_parameters(model):,}",
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    @property
    def num_clipped(self) -> int:
        return self._compute.clipped.count if isinstance(self._compute, TorchLaneCompute) else 0

    def default_budget_bytes(self) -> int:
        if self._pool is not None:  # whose memory is taken
            return self._pool.budget_bytes
        return default_budget_bytes(self._forward.device)

    def sample(self, logits: Sequence[Tensor], draws: Sequence[Draw]) -> list[SampledToken]:
        if self._pool is not None:
            with as_engine_errors("sampling, or the step after it,"):
                return self._pool.compute.sample(logits, draws)
        if self._sampler is not None and logits:
            with as_engine_errors("sampling"):
                return self._sampler.launch(torch.stack(list(logits)), draws).read()
        return sample(logits, draws)

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
        is_cuda = self._forward.device.type == "cuda"
        if self._pool is not None:
            self.synchronize()
            self._pool.close()
        if self._pages.transfers is not None:
            self.synchronize()
            self._pages.transfers.close()
        self._pool = self._sampler = None
        del self._compute, self._forward
        if is_cuda:
            torch.cuda.empty_cache()

    def _make_compute(self, layout: TorchLayout) -> Compute[Any, Tensor]:
        if self._verdict.way is not RunMode.LANES:
            return PlainCompute(self._forward, keeps_cache=self._verdict.way is RunMode.LIBRARY)
        step = self._make_whole_step(layout) if self._verdict.whole_step else None
        return TorchLaneCompute(self._forward, layout, self._pages, self._sizes, self._verdict.can_batch, step)

    def _make_whole_step(self, layout: TorchLayout) -> WholeStep:
        """The step that a small copy of the model was checked with. Raises ModelError if the weights do not fit it."""
        try:
            return self._weights.make_step(self._forward.model, layout)
        except UnknownStructure as error:
            raise ModelError(f"the weights are damaged, or of another model than their configuration: {error}") from error

    def _describe_rows(self) -> dict[str, str]:
        """The type of rows, and what one token takes of them."""
        if not self._layout.rows:
            return {}
        return {"kv": f"{self._layout.kv} ({sum(each.bytes_per_token for each in self._layout.rows):,} bytes a token)"}

    def _describe_step(self) -> str:
        """The way of computing a step, and why it is not a faster one."""
        verdict, weights = self._verdict, self._weights
        if verdict.is_pooled:
            why_not = "; no graphs, because its rotary scaling depends on the length" if self._reuse_limit else ""
            return f"transformers' modules over a pool: {self._pool.describe() if self._pool else 'not begun'}{why_not}"
        if weights.packing is None:
            why_not = f"; no pool, because {verdict.why_not_pooled}" if verdict.why_not_pooled else ""
            return f"transformers' modules in torch{why_not}"
        if verdict.whole_step:
            return f"whole, in one call ({weights.title} kernels)"
        by = f"products by {weights.title} kernels" if packed_weights(self._forward.model) else "products in torch"
        return f"transformers' modules, {by}; not in one call, because {verdict.why_no_whole_step}"


def _info_of(forward: TorchForward, weights: WeightsChoice, kv: str) -> EngineInfo:
    dtype = str(dtype_of(forward.model)).removeprefix("torch.")
    code = _code_of(forward.model)
    return EngineInfo("torch", type(forward.model).__name__, str(forward.device), dtype, weights.numerics, code, kv)


def _code_of(model: Any) -> EngineCode:
    """The code of a model: its own modules and configurations, and those that models of transformers share."""
    text = model.config.get_text_config(decoder=True)
    own = {type(each) for each in (model.config, text, *model.modules())}
    foreign = [each for each in own if each.__module__.partition(".")[0] not in ("torch", "bough")]
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    return describe_code(versions, [*foreign, cache_utils, masking_utils, modeling_rope_utils])
