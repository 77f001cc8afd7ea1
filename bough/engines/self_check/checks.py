"""Each check runs a prompt another way and returns the largest difference between its logits and the reference.

After a restore the first token is compared too: only its query sees the first row of a window, and a recurrent state that
forgets quickly would hide a mistake later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bough.cache.tree.state import PAGE_TOKENS, Group, Kind, Page, Source, State
from bough.engines.self_check.reference import Reference
from bough.engines.shared.compute import Compute, GroupCompute

_STEPS = 4


def one_shot(compute: Compute[Any], reference: Reference) -> float:
    """The whole prompt in one run."""
    return max(_run(compute, _new_lane(compute, reference), reference, [len(reference.ids)]))


def chunked(compute: Compute[Any], reference: Reference) -> float:
    """The prompt in runs of several tokens each."""
    length = len(reference.ids)
    first = length * 2 // 5
    return max(_run(compute, _new_lane(compute, reference), reference, [first, first + 2, length - 3, length]))


def stepped(compute: Compute[Any], reference: Reference) -> float:
    """Single tokens after a run, on two lanes in turns: state that the model keeps elsewhere would be mixed up."""
    length = len(reference.ids)
    lane, other = _new_lane(compute, reference), _new_lane(compute, reference)
    found = _run(compute, lane, reference, [length - _STEPS])
    found += _run(compute, other, reference, [length - _STEPS - 1], is_branch=True)
    for _ in range(_STEPS):
        found += _run(compute, lane, reference, [lane.offset + 1])
        found += _run(compute, other, reference, [other.offset + 1], is_branch=True)
    return max(found)


def batched(compute: GroupCompute[Any], reference: Reference) -> float:
    """Single tokens on three lanes at once, each at another offset."""
    length = len(reference.ids)
    starts = [length - _STEPS, length - 2 * _STEPS, length // 3]
    lanes = [_new_lane(compute, reference) for _ in starts]
    found = [0.0]
    for lane, start in zip(lanes, starts, strict=True):
        compute.evaluate(lane, reference.ids[:start])
    for _ in range(_STEPS):
        logits = compute.step(lanes, [reference.ids[lane.offset] for lane in lanes])
        found += [reference.difference(each, lane.offset) for each, lane in zip(logits, lanes, strict=True)]
    return max(found)


def restored(compute: GroupCompute[Any], reference: Reference) -> float:
    """Keep the state at an offset, clear the lane, restore it, and continue."""
    lane = _new_lane(compute, reference)
    compute.evaluate(lane, reference.ids[: reference.branch_at])
    kept = keep(lane, compute.layout.groups)
    lane.clear()
    _restore(lane, reference, kept)
    found = _run(
        compute,
        lane,
        reference,
        [reference.branch_at + 1, reference.branch_at + 3, len(reference.ids) - 2, len(reference.ids)],
    )
    release(compute, kept)
    return max(found)


def rewound(compute: GroupCompute[Any], reference: Reference) -> float:
    """Go back to an earlier offset with the lane's own rows where it has them, and continue from there."""
    lane = _new_lane(compute, reference)
    compute.evaluate(lane, reference.ids[: reference.branch_at])
    kept = keep(lane, compute.layout.groups)
    found = _run(compute, lane, reference, [reference.branch_at + 3, len(reference.ids) - 1])
    sources = {group: _live_or(lane, group, source, reference.branch_at) for group, source in kept.items()}
    lane.adopt(reference.branch_at, sources)
    found += _run(compute, lane, reference, [reference.branch_at + 3, len(reference.ids)])
    release(compute, kept)
    return max(found)


def branched(compute: GroupCompute[Any], reference: Reference) -> float:
    """Restore twice from the same pages: first for another continuation, then for the first one again."""
    lane = _new_lane(compute, reference)
    compute.evaluate(lane, reference.ids[: reference.branch_at])
    kept = keep(lane, compute.layout.groups)
    lane.adopt(0, {group: Source() for group in kept})
    _restore(lane, reference, kept)
    found = _run(compute, lane, reference, [reference.branch_at + 1, len(reference.branch)], is_branch=True)
    _restore(lane, reference, kept)
    found += _run(compute, lane, reference, [reference.branch_at + 2, len(reference.ids)])
    release(compute, kept)
    return max(found)


def keep(lane: Any, groups: Sequence[Group]) -> dict[Group, Source]:
    """Pages and states that restore this lane at its offset."""
    return {group: _keep_group(lane, group) for group in groups}


def release(compute: GroupCompute[Any], kept: dict[Group, Source]) -> None:
    """Release what `keep` made."""
    for source in kept.values():
        items: list[Page | State] = [*source.pages, *([source.state] if source.state else [])]
        for item in items:
            compute.pages.release(item)


def _keep_group(lane: Any, group: Group) -> Source:
    if group.kind is Kind.RECURRENT:
        return Source(state=lane.capture(group))
    borders = [group.first_needed(lane.offset)]
    while borders[-1] < lane.offset:
        borders.append(min(lane.offset, (borders[-1] // PAGE_TOKENS + 1) * PAGE_TOKENS))
    return Source(pages=tuple(lane.publish(group, *each) for each in pairwise(borders)))


def _live_or(lane: Any, group: Group, source: Source, offset: int) -> Source:
    is_held = group.kind is not Kind.RECURRENT and lane.first_row(group) <= group.first_needed(offset)
    return Source(live=offset) if is_held else source


def _new_lane(compute: Compute[Any], reference: Reference) -> Any:
    lane = compute.make_lane()
    lane.reserve(len(reference.ids))
    return lane


def _restore(lane: Any, reference: Reference, kept: dict[Group, Source]) -> None:
    lane.reserve(len(reference.ids))
    lane.adopt(reference.branch_at, kept)


def _run(
    compute: Compute[Any], lane: Any, reference: Reference, ends: Sequence[int], is_branch: bool = False
) -> list[float]:
    """Evaluate up to each of `ends`; returns the differences there."""
    ids = reference.branch if is_branch else reference.ids
    return [reference.difference(compute.evaluate(lane, ids[lane.offset : end]), end, is_branch) for end in ends]
