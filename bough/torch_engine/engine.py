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

from bough.cache.state import Buffer, Group, Lane, Page, Place, State
from bough.config import Settings
from bough.engine import Capabilities
from bough.errors import SettingsError
from bough.torch_engine import attention
from bough.torch_engine.compute import Compute, LaneCompute, LibraryCompute, RecomputeCompute
from bough.torch_engine.failures import as_engine_errors
from bough.torch_engine.forward import Forward
from bough.torch_engine.layout import Layout
from bough.torch_engine.loading import Progress, load_model, prepare
from bough.torch_engine.memory import default_budget_bytes
from bough.torch_engine.pages import Pages
from bough.torch_engine.probe import probe
from bough.torch_engine.rotary import reuse_limit
from bough.torch_engine.sampling import sample
from bough.torch_engine.self_check import Verdict, self_check
from bough.torch_engine.verdicts import Verdicts, key_of
from bough.types import Draw, Sampled

_DEFAULT_CONTEXT = 131_072  # of models that set themselves no bound
_SLACK_CPU = 512
_SLACK_ACCELERATOR = 2_048
_LONGEST_RUN = 8_192


class TorchEngine:
    """One loaded model. `load` makes it from a folder; tests make it from a model object."""

    def __init__(self, model: Any, settings: Settings, progress: Progress | None = None) -> None:
        attention.register()
        self._forward = Forward(prepare(model))
        self._settings = settings
        layout = probe(self._forward)
        self._verdict = self._check(layout, progress)
        model.set_attn_implementation(self._verdict.attention)
        self._layout = layout if self._verdict.way == "lanes" else _without_groups(layout, model)
        self._pages = Pages(self._layout, self._forward.device)
        self._context = _context_of(model, settings)
        self._capabilities = _capabilities_of(model, self._verdict)
        self._compute = self._make_compute()

    @classmethod
    def load(cls, folder: Path, settings: Settings, progress: Progress | None = None) -> TorchEngine:
        """The model in `folder`, checked. `progress` is told in words what is going on."""
        return cls(load_model(folder, settings, progress), settings, progress)

    @property
    def vocab_size(self) -> int:
        return self._layout.vocab_size

    @property
    def context_tokens(self) -> int:
        return self._context

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def groups(self) -> Sequence[Group]:
        return self._layout.groups

    @property
    def held_bytes(self) -> int:
        """Bytes of pages and states that were made and not yet released."""
        return self._pages.held_bytes

    def describe(self) -> dict[str, str]:
        model = self._forward.model
        parameters = {id(each): each.numel() for each in model.parameters()}
        return {
            "engine": "torch",
            "model": type(model).__name__,
            "device": str(self._forward.device),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "attention": self._verdict.attention,
            "state": {"lanes": "bough's lanes", "library": "the model's own cache"}.get(
                self._verdict.way, "none: recomputed"
            ),
            "batching": "together" if self._verdict.can_batch else "one by one",
            **({"host": self._pages.transfers.describe()} if self._pages.transfers else {}),
            "parameters": f"{sum(parameters.values()):,}",
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }

    @property
    def max_chunk_tokens(self) -> int:
        return self._slack if any(group.window for group in self.groups) else _LONGEST_RUN

    def default_budget_bytes(self) -> int:
        return default_budget_bytes(self._forward.device)

    def make_lane(self) -> Lane:
        return self._compute.make_lane()

    def evaluate(self, lane: Lane, ids: Sequence[int]) -> Tensor:
        assert len(ids) > 0, "a run has at least one token"
        with as_engine_errors("the forward pass"):
            return self._compute.evaluate(lane, ids)

    def step(self, lanes: Sequence[Lane], ids: Sequence[int]) -> list[Tensor]:
        with as_engine_errors("the forward pass"):
            return self._compute.step(lanes, ids)

    def sample(self, logits: Sequence[Tensor], draws: Sequence[Draw]) -> list[Sampled]:
        return sample(list(logits), draws)

    def cut(self, page: Page, at: int) -> tuple[Page, Page]:
        return self._pages.cut(page, at)

    def join(self, left: Page, right: Page) -> Page:
        return self._pages.join(left, right)

    def release(self, item: Page | State) -> None:
        self._pages.release(item)

    @property
    def has_host(self) -> bool:
        return self._pages.transfers is not None

    def host_bytes(self) -> int:
        return self._pages.transfers.pool.total_bytes if self._pages.transfers else 0

    def limit_host(self, budget_bytes: int) -> None:
        """Take no more host memory than this from now on; nothing happens where there is no host place."""
        if self._pages.transfers is not None:
            self._pages.transfers.pool.limit(budget_bytes)

    def pack(self, item: Page | State) -> Buffer | None:
        return self._pages.pack(item)

    def packed_bytes(self, item: Page | State) -> int:
        return (item.end - item.start) * item.group.bytes_per_token if isinstance(item, Page) else item.group.state_bytes

    def unpack_page(self, group: Group, start: int, end: int, data: Buffer, place: Place = Place.DEVICE) -> Page:
        return self._pages.unpack_page(group, start, end, data, place)

    def unpack_state(self, group: Group, offset: int, data: Buffer, place: Place = Place.DEVICE) -> State:
        return self._pages.unpack_state(group, offset, data, place)

    def to_host(self, item: Page | State) -> None:
        self._pages.to_host(item)

    def to_device(self, item: Page | State) -> None:
        self._pages.to_device(item)

    def host_seconds_per_byte(self) -> float | None:
        return self._pages.transfers.speed.seconds_per_byte() if self._pages.transfers else None

    def synchronize(self) -> None:
        if self._forward.device.type == "cuda":
            torch.cuda.synchronize(self._forward.device)
        elif self._forward.device.type == "mps":
            torch.mps.synchronize()

    def close(self) -> None:
        """Give the model's memory back; the engine cannot be used afterwards."""
        is_cuda = self._forward.device.type == "cuda"
        if self._pages.transfers is not None:
            self.synchronize()
            self._pages.transfers.close()
        del self._compute, self._forward
        if is_cuda:
            torch.cuda.empty_cache()

    def _check(self, layout: Layout, progress: Progress | None) -> Verdict:
        verdicts = Verdicts(self._settings.cache_folder / "self_checks")
        key = key_of(self._forward.model, self._settings.attention)
        verdict = verdicts.load(key)
        if verdict is None:
            if progress:
                progress("checking what this model can do")
            verdict = self_check(self._forward, layout, self._settings.attention)
            verdicts.save(key, verdict)
        return verdict

    def _make_compute(self) -> Compute:
        if self._verdict.way == "library":
            return LibraryCompute(self._forward)
        if self._verdict.way == "recompute":
            return RecomputeCompute(self._forward)
        return LaneCompute(self._forward, self._layout, self._pages, self._context, self._slack, self._verdict.can_batch)

    @property
    def _slack(self) -> int:
        """Rows that a window buffer has room for beyond its window: the longest run of a chunked prompt."""
        is_cpu = self._forward.device.type == "cpu"
        return self._settings.chunk or (_SLACK_CPU if is_cpu else _SLACK_ACCELERATOR)


def _context_of(model: Any, settings: Settings) -> int:
    bound = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 0
    if bound and settings.context > bound:
        raise SettingsError(f"context is {settings.context}, and the model holds {bound} tokens")
    return settings.context or bound or _DEFAULT_CONTEXT


def _capabilities_of(model: Any, verdict: Verdict) -> Capabilities:
    limit = reuse_limit(model.config)
    return Capabilities(verdict.can_chunk, verdict.can_reuse, limit, verdict.reason, dict(verdict.differences))


def _without_groups(layout: Layout, model: Any) -> Layout:
    vocab_size = layout.vocab_size or model.config.get_text_config(decoder=True).vocab_size
    return Layout((), {}, {}, 0, vocab_size, unknown=layout.unknown)
