"""Timing requests: answers of a fixed length, the restore of a lane by itself, and medians in milliseconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bough.cache.session import Session
from bough.runner import Runner
from bough.types import Completion


@dataclass(frozen=True)
class Begun:
    """A session whose lane is restored, and the seconds that this took."""

    session: Session
    seconds: float


def warm_up(runner: Runner) -> None:
    """Answer a short prompt: the first forward pass of a process is slow."""
    runner.generate(list(range(3, 35)), max_tokens=2)


def answer(runner: Runner, prompt: list[int], max_tokens: int) -> Completion:
    """Generate exactly `max_tokens` tokens."""
    return runner.generate(prompt, max_tokens=max_tokens, ignore_eos=True)


def clear_lanes(runner: Runner) -> None:
    """Empty every idle lane, so that the next request restores its state from the tree."""
    for slot in runner.prefix_cache.lanes.slots:
        slot.clear()


@contextmanager
def timed_begin(runner: Runner, prompt: list[int], max_new_tokens: int) -> Iterator[Begun]:
    """Restore the prompt's state into a cleared lane, without computing anything, until the device is done."""
    clear_lanes(runner)
    runner.engine.synchronize()
    started_s = time.perf_counter()
    session = runner.prefix_cache.begin(prompt, max_new_tokens=max_new_tokens)
    session.finish_loading()
    runner.engine.synchronize()
    seconds = time.perf_counter() - started_s
    with session:
        yield Begun(session, seconds)


def first_token_ms(answers: Sequence[Completion]) -> float:
    """The median time to the first token."""
    return median_ms([each.timings.first_token_s for each in answers])


def median_ms(seconds: Sequence[float]) -> float:
    return round(1000 * statistics.median(seconds), 3)
