"""Each check runs a prompt another way and returns the largest difference between its logits and the reference.

What was restored is looked at right after its first token too: only that one sees the first row of a window, and a state
that forgets soon hides a mistake later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bough.cache.tree.state import PAGE_TOKENS, Group, Kind, Page, Source, State
from bough.engines.self_check.trial import Trial
from bough.engines.shared.compute import Compute, GroupCompute

_STEPS = 4


def one_shot(compute: Compute[Any], trial: Trial) -> float:
    """The whole prompt in one run."""
    return max(_run(compute, _new_lane(compute, trial), trial, [len(trial.ids)]))


def chunked(compute: Compute[Any], trial: Trial) -> float:
    """The prompt in runs of several tokens each."""
    length = len(trial.ids)
    first = length * 2 // 5
    return max(_run(compute, _new_lane(compute, trial), trial, [first, first + 2, length - 3, length]))


def stepped(compute: Compute[Any], trial: Trial) -> float:
    """Single tokens after a run, on two lanes in turns: state that the model keeps elsewhere would be mixed up."""
    length = len(trial.ids)
    lane, other = _new_lane(compute, trial), _new_lane(compute, trial)
    found = _run(compute, lane, trial, [length - _STEPS])
    found += _run(compute, other, trial, [length - _STEPS - 1], is_branch=True)
    for _ in range(_STEPS):
        found += _run(compute, lane, trial, [lane.offset + 1])
        found += _run(compute, other, trial, [other.offset + 1], is_branch=True)
    return max(found)


def batched(compute: GroupCompute[Any], trial: Trial) -> float:
    """Single tokens on three lanes at once, each at another offset."""
    length = len(trial.ids)
    starts = [length - _STEPS, length - 2 * _STEPS, length // 3]
    lanes = [_new_lane(compute, trial) for _ in starts]
    found = [0.0]
    for lane, start in zip(lanes, starts, strict=True):
        compute.evaluate(lane, trial.ids[:start])
    for _ in range(_STEPS):
        logits = compute.step(lanes, [trial.ids[lane.offset] for lane in lanes])
        found += [trial.difference(each, lane.offset) for each, lane in zip(logits, lanes, strict=True)]
    return max(found)


def restored(compute: GroupCompute[Any], trial: Trial) -> float:
    """Kept at an offset, cleared, restored from what was kept, and gone on from."""
    lane = _new_lane(compute, trial)
    compute.evaluate(lane, trial.ids[: trial.branch_at])
    kept = keep(lane, compute.layout.groups)
    lane.clear()
    _restore(lane, trial, kept)
    found = _run(compute, lane, trial, [trial.branch_at + 1, trial.branch_at + 3, len(trial.ids) - 2, len(trial.ids)])
    release(compute, kept)
    return max(found)


def rewound(compute: GroupCompute[Any], trial: Trial) -> float:
    """Back to an earlier offset by the lane's own rows where it has them, and gone on from there."""
    lane = _new_lane(compute, trial)
    compute.evaluate(lane, trial.ids[: trial.branch_at])
    kept = keep(lane, compute.layout.groups)
    found = _run(compute, lane, trial, [trial.branch_at + 3, len(trial.ids) - 1])
    sources = {group: _live_or(lane, group, source, trial.branch_at) for group, source in kept.items()}
    lane.adopt(trial.branch_at, sources)
    found += _run(compute, lane, trial, [trial.branch_at + 3, len(trial.ids)])
    release(compute, kept)
    return max(found)


def branched(compute: GroupCompute[Any], trial: Trial) -> float:
    """Restored twice from the same pages: first for another continuation, then for the first one again."""
    lane = _new_lane(compute, trial)
    compute.evaluate(lane, trial.ids[: trial.branch_at])
    kept = keep(lane, compute.layout.groups)
    lane.adopt(0, {group: Source() for group in kept})
    _restore(lane, trial, kept)
    found = _run(compute, lane, trial, [trial.branch_at + 1, len(trial.branch)], is_branch=True)
    _restore(lane, trial, kept)
    found += _run(compute, lane, trial, [trial.branch_at + 2, len(trial.ids)])
    release(compute, kept)
    return max(found)


def keep(lane: Any, groups: Sequence[Group]) -> dict[Group, Source]:
    """All that restores this lane at its offset, in pages and states."""
    return {group: _keep_group(lane, group) for group in groups}


def release(compute: GroupCompute[Any], kept: dict[Group, Source]) -> None:
    """Give back what `keep` made."""
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


def _new_lane(compute: Compute[Any], trial: Trial) -> Any:
    lane = compute.make_lane()
    lane.reserve(len(trial.ids))
    return lane


def _restore(lane: Any, trial: Trial, kept: dict[Group, Source]) -> None:
    lane.reserve(len(trial.ids))
    lane.adopt(trial.branch_at, kept)


def _run(compute: Compute[Any], lane: Any, trial: Trial, ends: Sequence[int], is_branch: bool = False) -> list[float]:
    """Evaluate up to each of `ends`; returns the differences there."""
    ids = trial.branch if is_branch else trial.ids
    return [trial.difference(compute.evaluate(lane, ids[lane.offset : end]), end, is_branch) for end in ends]
