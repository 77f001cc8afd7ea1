"""What a caller does with an engine, in the contract's words alone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from bough.cache.tree.state import PAGE_TOKENS, Group, GroupSource, Kind, Lane, Page, State
from bough.engines.contract import Engine

TOLERANCE = 1e-4
HALF_TOLERANCE = 0.05
"""The norm of the difference, relative to that of the logits: bfloat16 moves those of tiny models by up to 0.012."""


def make_ids(engine: Engine, length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, engine.vocab_size) for _ in range(length)]


def new_lane(engine: Engine, room: int) -> Lane:
    lane = engine.make_lane()
    lane.reserve(room)
    return lane


def answer(engine: Engine, ids: Sequence[int]) -> Any:
    """The logits after `ids`, in one run on a lane of its own."""
    return engine.evaluate(new_lane(engine, len(ids)), ids)


def run(engine: Engine, lane: Lane, ids: Sequence[int], sizes: Iterable[int]) -> Any:
    """Evaluate `ids` from the lane's offset on, in runs of these sizes; returns the logits after the last."""
    logits = None
    for size in sizes:
        logits = engine.evaluate(lane, ids[lane.offset : lane.offset + size])
    return logits


def is_close(left: Any, right: Any) -> bool:
    if any(str(getattr(logits, "dtype", "")) in ("torch.bfloat16", "torch.float16") for logits in (left, right)):
        return float((left.float() - right.float()).norm()) <= HALF_TOLERANCE * float(right.float().norm())
    return max(abs(a - b) for a, b in zip(as_floats(left), as_floats(right), strict=True)) <= TOLERANCE


def as_floats(logits: Any) -> Sequence[float]:
    """All of them at once: an array hands them out one by one slowly."""
    floats: Sequence[float] = logits.tolist() if hasattr(logits, "tolist") else logits
    return floats


def publish(lane: Lane, group: Group, start: int, end: int) -> tuple[Page, ...]:
    """Rows [start, end), cut at page borders."""
    borders = sorted({start, end, *range(start - start % PAGE_TOKENS + PAGE_TOKENS, end, PAGE_TOKENS)})
    return tuple(lane.publish(group, *each) for each in pairwise(borders))


def keep(engine: Engine, lane: Lane) -> dict[Group, GroupSource]:
    """All that restores the lane where it stands."""
    return {
        group: GroupSource(state=lane.capture(group))
        if group.kind is Kind.RECURRENT
        else GroupSource(pages=publish(lane, group, group.first_needed(lane.offset), lane.offset))
        for group in engine.groups
    }


def items(kept: dict[Group, GroupSource]) -> list[Page | State]:
    return [item for source in kept.values() for item in (*source.pages, *([source.state] if source.state else []))]


def give_back(engine: Engine, kept: dict[Group, GroupSource]) -> None:
    for item in items(kept):
        engine.release(item)


def rewind(engine: Engine, lane: Lane, offset: int, kept: dict[Group, GroupSource]) -> None:
    """Stand at `offset`, by the lane's own rows where it still has them, else by what was kept."""
    sources = {}
    for group in engine.groups:
        is_live = group.kind is not Kind.RECURRENT and lane.first_row(group) <= group.first_needed(offset)
        sources[group] = GroupSource(live=offset) if is_live else kept[group]
    lane.adopt(offset, sources)
