"""The part of the engine contract that both engines implement the same way, over their lanes, pages and verdict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from bough.cache.tree.state import Buffer, Group, Lane, Page, State, Tier
from bough.engines.contract import Capabilities, EngineInfo, Logits, ScoredRun
from bough.engines.shared.compute import Compute, Shapes, Verdict, Way
from bough.engines.shared.errors import as_engine_errors
from bough.engines.shared.pages import PageAllocator, packed_bytes
from bough.engines.shared.row_memory import LaneSizes

_LONGEST_RUN = 8_192
_STATES = {Way.LANES: "bough's lanes", Way.LIBRARY: "the model's own cache", Way.RECOMPUTE: "none: recomputed"}


class LaneEngine(ABC):
    """A loaded model on lanes. An engine makes the parts; the verdict says what they can do."""

    _compute: Compute[Any]

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
        self._info = info
        self._layout = layout
        self._pages = pages
        self._verdict = verdict
        self._sizes = sizes
        self._reuse_limit = reuse_limit
        self._state_size = state_size

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def capabilities(self) -> Capabilities:
        verdict = self._verdict
        return Capabilities(
            verdict.can_chunk, verdict.can_reuse, self._reuse_limit, verdict.reason, dict(verdict.differences)
        )

    @property
    def vocab_size(self) -> int:
        return self._layout.vocab_size

    @property
    def state_size(self) -> int:
        return self._state_size

    @property
    def context_tokens(self) -> int:
        return self._sizes.context

    @property
    def groups(self) -> Sequence[Group]:
        return self._layout.groups

    @property
    def held_bytes(self) -> int:
        """Bytes of pages and states that were made and not yet released: tests find leaks by it."""
        return self._pages.held_bytes

    @property
    def max_chunk_tokens(self) -> int:
        return self._sizes.slack if any(group.window for group in self.groups) else _LONGEST_RUN

    def limit_device(self, budget_bytes: int) -> None:
        """Nothing to do: memory is taken as it is needed, and the cache keeps within the budget."""
        return

    def make_lane(self) -> Lane:
        return self._compute.make_lane()

    def evaluate(self, lane: Lane, ids: Sequence[int]) -> Logits:
        assert len(ids) > 0, "a run has at least one token"
        with as_engine_errors("the forward pass"):
            return self._compute.evaluate(lane, ids)

    def evaluate_scored(self, lane: Lane, ids: Sequence[int], following: Sequence[int], num_top: int) -> ScoredRun:
        assert 0 <= len(ids) - len(following) <= 1, "a token follows each of a run, but perhaps the last"
        with as_engine_errors("the forward pass"):
            return self._score(self._compute.evaluate_all(lane, ids), following, num_top)

    def evaluate_state(self, lane: Lane, ids: Sequence[int]) -> list[float]:
        assert len(ids) > 0 and self.state_size, "a run has at least one token, and the model a head"
        with as_engine_errors("the forward pass"):
            state: list[float] = self._compute.evaluate_state(lane, ids).tolist()
            return state

    @abstractmethod
    def _score(self, rows: Any, following: Sequence[int], num_top: int) -> ScoredRun:
        """Score the token that follows each row of logits, and keep the last row alone."""

    def step(self, lanes: Sequence[Lane], ids: Sequence[int]) -> Sequence[Logits]:
        with as_engine_errors("the forward pass"):
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
        return packed_bytes(item)

    def unpack_page(self, group: Group, start: int, end: int, data: Buffer, tier: Tier = Tier.DEVICE) -> Page:
        return self._pages.unpack_page(group, start, end, data, tier)

    def unpack_state(self, group: Group, offset: int, data: Buffer, tier: Tier = Tier.DEVICE) -> State:
        return self._pages.unpack_state(group, offset, data, tier)

    def _describe_info(self) -> dict[str, str]:
        """What the engine is, for people."""
        info = self._info
        return {"engine": info.name, "model": info.model, "device": info.device, "dtype": info.weights}

    def _describe_verdict(self) -> dict[str, str]:
        """How the model is run, for people."""
        return {
            "state": _STATES[self._verdict.way],
            "batching": "together" if self._verdict.can_batch else "one by one",
        }
