"""The part of the engine contract that is the same for both engines, over their lanes, pages and verdict.

Some rotary scalings depend on the total length: beyond their threshold the same token has other keys. So there is a most
that a sequence may have (the context), and a most that it may have to be reused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Sequence
from typing import Any

from bough.cache.tree.state import Buffer, Group, Lane, Page, State, Tier
from bough.config import Settings
from bough.engines.contract import Capabilities, EngineInfo, Logits, ScoredRun
from bough.engines.shared.compute import Compute, RunMode, RunResult, Shapes, Verdict
from bough.engines.shared.errors import as_engine_errors
from bough.engines.shared.pages import PageAllocator
from bough.engines.shared.row_memory import LaneSizes
from bough.errors import SettingsError

DEFAULT_CONTEXT = 131_072  # of models whose configuration has no bound
_LONGEST_RUN = 8_192
_SLACK_CPU = 512
_SLACK_ACCELERATOR = 2_048
_STATES = {RunMode.LANES: "bough's lanes", RunMode.LIBRARY: "the model's own cache", RunMode.RECOMPUTE: "none: recomputed"}


class LaneEngine(ABC):
    """A loaded model on lanes. An engine makes the parts; the verdict says what they can do."""

    _compute: Compute[Any, Any]

    def __init__(
        self,
        info: EngineInfo,
        layout: Shapes,
        pages: PageAllocator,
        verdict: Verdict,
        sizes: LaneSizes,
        reuse_limit: int | None,
        state_size: int,
    ) -> None:
        self.info = info
        self.capabilities = Capabilities(
            verdict.can_chunk, verdict.can_reuse, reuse_limit, verdict.reason, dict(verdict.differences)
        )
        self.vocab_size = layout.vocab_size
        self.state_size = state_size
        self.context_tokens = sizes.context
        self.groups = layout.groups
        self.max_chunk_tokens = sizes.slack if any(group.window for group in layout.groups) else _LONGEST_RUN
        self._layout = layout
        self._pages = pages
        self._verdict = verdict
        self._sizes = sizes
        self._reuse_limit = reuse_limit

    @property
    def held_bytes(self) -> int:
        """Bytes of pages and states that were made and not yet released: tests find leaks by it."""
        return self._pages.held_bytes

    @property
    def num_clipped(self) -> int:
        return 0

    def limit_device(self, budget_bytes: int) -> None:
        """Nothing to do: memory is taken as it is needed, and the cache keeps within the budget."""
        return

    def make_lane(self) -> Lane:
        lane: Lane = self._compute.make_lane()
        return lane

    @as_engine_errors("the forward pass")
    def evaluate(self, lane: Lane, ids: Sequence[int]) -> Logits:
        assert len(ids) > 0, "a run has at least one token"
        return self._compute.run(lane, ids, RunResult.LAST_LOGITS)

    @as_engine_errors("the forward pass")
    def evaluate_scored(self, lane: Lane, ids: Sequence[int], following: Sequence[int], num_top: int) -> ScoredRun:
        assert 0 <= len(ids) - len(following) <= 1, "a token follows each of a run, but perhaps the last"
        return self._score(self._compute.run(lane, ids, RunResult.ALL_LOGITS), following, num_top)

    @as_engine_errors("the forward pass")
    def evaluate_state(self, lane: Lane, ids: Sequence[int]) -> list[float]:
        assert len(ids) > 0 and self.state_size, "a run has at least one token, and the model a head"
        state: list[float] = self._compute.run(lane, ids, RunResult.LAST_STATE).tolist()
        return state

    @abstractmethod
    def _score(self, rows: Any, following: Sequence[int], num_top: int) -> ScoredRun:
        """Score the token that follows each row of logits; the result keeps the last row alone."""

    @as_engine_errors("the forward pass")
    def step(self, lanes: Sequence[Lane], ids: Sequence[int]) -> Sequence[Logits]:
        if self._reuse_limit is None or all(lane.offset < self._reuse_limit for lane in lanes):
            return self._compute.step(lanes, ids)
        return self._step_apart(lanes, ids, self._reuse_limit)

    def _step_apart(self, lanes: Sequence[Lane], ids: Sequence[int], limit: int) -> list[Logits]:
        """Each lane beyond the limit alone: a model looks at the longest of a batch, and computes all for that length."""
        logits: dict[int, Logits] = {}
        short = [place for place, lane in enumerate(lanes) if lane.offset < limit]
        alone = ([place] for place, lane in enumerate(lanes) if lane.offset >= limit)
        for places in filter(None, [short, *alone]):
            rows = self._compute.step([lanes[place] for place in places], [ids[place] for place in places])
            logits.update(zip(places, rows, strict=True))
        return [logits[place] for place in range(len(lanes))]

    def device_bytes(self, item: Page | State) -> int:
        return self._pages.device_bytes(item)

    def cut(self, page: Page, at: int) -> tuple[Page, Page]:
        return self._pages.cut(page, at)

    def can_join(self, left: Page, right: Page) -> bool:
        return self._pages.can_join(left, right)

    def join(self, left: Page, right: Page) -> Page:
        return self._pages.join(left, right)

    def release(self, item: Page | State) -> None:
        self._pages.release(item)

    def pack(self, item: Page | State) -> Buffer | None:
        return self._pages.pack(item)

    def packed_bytes(self, item: Page | State) -> int:
        return item.content_bytes

    def unpack_page(self, group: Group, start: int, end: int, data: Buffer, tier: Tier = Tier.DEVICE) -> Page:
        return self._pages.unpack_page(group, start, end, data, tier)

    def unpack_state(self, group: Group, offset: int, data: Buffer, tier: Tier = Tier.DEVICE) -> State:
        return self._pages.unpack_state(group, offset, data, tier)

    def _describe_verdict(self) -> dict[str, str]:
        return {"state": _STATES[self._verdict.way], "batching": "together" if self._verdict.can_batch else "one by one"}


def choose_sizes(bound: int, settings: Settings, *, is_on_cpu: bool) -> LaneSizes:
    """How large lanes may grow. `bound` is the model's own limit; 0 if its configuration has none."""
    check_context(bound, settings)
    slack = settings.chunk or (_SLACK_CPU if is_on_cpu else _SLACK_ACCELERATOR)
    return LaneSizes(settings.context or bound or DEFAULT_CONTEXT, slack)


def check_context(bound: int, settings: Settings) -> None:
    """Raise SettingsError if the settings want a longer context than the model's own, `bound`; 0 if that is not known."""
    if bound and settings.context > bound:
        raise SettingsError(f"context is {settings.context}, and the model holds {bound} tokens")


def reuse_limit(text: dict[str, Any], by_length: Container[str], bound: int) -> int | None:
    """The length up to which rows stay valid, or None if they always do, by the configuration of a language model.

    `by_length` are the scalings that depend on the total length in this engine; `bound` is the model's own limit.
    """
    name = "original_max_position_embeddings"
    scalings = [each for each in _rotaries(text) if each.get("rope_type", each.get("type", "default")) in by_length]
    return min((int(each.get(name) or text.get(name) or bound) for each in scalings), default=None)


def _rotaries(text: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rotary parameters of a configuration: one set, or one for each type of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        found = text.get(name)
        if isinstance(found, dict):
            nested = [each for each in found.values() if isinstance(each, dict)]
            yield from nested or [found]
