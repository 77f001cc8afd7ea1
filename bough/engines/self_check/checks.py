"""Each check runs a prompt another way and returns the largest difference between its logits and the reference.

After a restore the first token is compared too: only its query sees the first row of a window, and a recurrent state that
forgets quickly would hide a mistake later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from bough.cache.tree.state import PAGE_TOKENS, Group, GroupSource, Kind
from bough.engines.self_check.reference import Reference
from bough.engines.shared.compute import Compute, GroupCompute

_STEPS = 4


def one_shot(compute: Compute[Any, Any], reference: Reference) -> float:
    """The whole prompt in one run."""
    return max(_run(compute, _new_lane(compute, reference), reference, [len(reference.ids)]))


def chunked(compute: Compute[Any, Any], reference: Reference) -> float:
    """The prompt in runs of several tokens each."""
    length = len(reference.ids)
    first = length * 2 // 5
    return max(_run(compute, _new_lane(compute, reference), reference, [first, first + 2, length - 3, length]))


def stepped(compute: Compute[Any, Any], reference: Reference) -> float:
    """Single tokens after a run, on two lanes in turns: state that the model keeps elsewhere would be mixed up."""
    length = len(reference.ids)
    lane, other = _new_lane(compute, reference), _new_lane(compute, reference)
    found = _run(compute, lane, reference, [length - _STEPS])
    found += _run(compute, other, reference, [length - _STEPS - 1], is_branch=True)
    for _ in range(_STEPS):
        found += _run(compute, lane, reference, [lane.offset + 1])
        found += _run(compute, other, reference, [other.offset + 1], is_branch=True)
    return max(found)


def batched(compute: GroupCompute[Any, Any], reference: Reference) -> float:
    """Single tokens on three lanes at once, each at another offset."""
    length = len(reference.ids)
    lanes = []
    for start in (length - _STEPS, length - 2 * _STEPS, length // 3):
        lanes.append(_new_lane(compute, reference))
        compute.evaluate(lanes[-1], reference.ids[:start])
    found = [0.0]
    for _ in range(_STEPS):
        logits = compute.step(lanes, [reference.ids[lane.offset] for lane in lanes])
        found += [reference.difference(each, lane.offset) for each, lane in zip(logits, lanes, strict=True)]
    return max(found)


def restored(compute: GroupCompute[Any, Any], reference: Reference) -> float:
    """Keep the state at an offset, clear the lane, restore it, and continue."""
    at, length = reference.branch_at, len(reference.ids)
    with _keeping_branch(compute, reference) as (lane, kept):
        lane.clear()
        _restore(lane, reference, kept)
        return max(_run(compute, lane, reference, [at + 1, at + 3, length - 2, length]))


def rewound(compute: GroupCompute[Any, Any], reference: Reference) -> float:
    """Go back to an earlier offset with the lane's own rows where it has them, and continue from there."""
    at, length = reference.branch_at, len(reference.ids)
    with _keeping_branch(compute, reference) as (lane, kept):
        found = _run(compute, lane, reference, [at + 3, length - 1])
        lane.adopt(at, {group: _prefer_live(lane, group, source, at) for group, source in kept.items()})
        return max([*found, *_run(compute, lane, reference, [at + 3, length])])


def branched(compute: GroupCompute[Any, Any], reference: Reference) -> float:
    """Restore twice from the same pages: first for another continuation, then for the first one again."""
    at, length = reference.branch_at, len(reference.ids)
    with _keeping_branch(compute, reference) as (lane, kept):
        lane.adopt(0, {group: GroupSource() for group in kept})
        _restore(lane, reference, kept)
        found = _run(compute, lane, reference, [at + 1, length], is_branch=True)
        _restore(lane, reference, kept)
        return max([*found, *_run(compute, lane, reference, [at + 2, length])])


@contextmanager
def _keeping_branch(
    compute: GroupCompute[Any, Any], reference: Reference
) -> Iterator[tuple[Any, dict[Group, GroupSource]]]:
    """A lane at the offset of the branch, and the pages and states that restore it there, which are released at the end."""
    lane = _new_lane(compute, reference)
    compute.evaluate(lane, reference.ids[: reference.branch_at])
    kept = keep(lane, compute.layout.groups)
    yield lane, kept
    for source in kept.values():
        for item in (*source.pages, source.state):
            if item is not None:
                compute.pages.release(item)


def keep(lane: Any, groups: Sequence[Group]) -> dict[Group, GroupSource]:
    """Pages and states that restore this lane at its offset."""
    return {group: _keep_group(lane, group) for group in groups}


def _keep_group(lane: Any, group: Group) -> GroupSource:
    if group.kind is Kind.RECURRENT:
        return GroupSource(state=lane.capture(group))
    borders = [group.first_needed(lane.offset)]
    while borders[-1] < lane.offset:
        borders.append(min(lane.offset, (borders[-1] // PAGE_TOKENS + 1) * PAGE_TOKENS))
    return GroupSource(pages=tuple(lane.publish(group, *each) for each in pairwise(borders)))


def _prefer_live(lane: Any, group: Group, source: GroupSource, offset: int) -> GroupSource:
    is_held = group.kind is not Kind.RECURRENT and lane.first_row(group) <= group.first_needed(offset)
    return GroupSource(live=offset) if is_held else source


def _new_lane(compute: Compute[Any, Any], reference: Reference) -> Any:
    lane = compute.make_lane()
    lane.reserve(len(reference.ids))
    return lane


def _restore(lane: Any, reference: Reference, kept: dict[Group, GroupSource]) -> None:
    lane.reserve(len(reference.ids))
    lane.adopt(reference.branch_at, kept)


def _run(
    compute: Compute[Any, Any], lane: Any, reference: Reference, ends: Sequence[int], is_branch: bool = False
) -> list[float]:
    """Evaluate up to each of `ends` and return the differences there."""
    ids = reference.branch if is_branch else reference.ids
    return [reference.difference(compute.evaluate(lane, ids[lane.offset : end]), end, is_branch) for end in ends]
