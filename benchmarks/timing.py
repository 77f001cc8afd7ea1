"""Timing requests: answers of a fixed length, the restore of a lane by itself, and medians in milliseconds.

All of it runs on the calling thread: the runtime's worker must not run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from bough.bench.alone import SingleRequests
from bough.cache.session import Session
from bough.runtime import Runtime
from bough.types import Completion


@dataclass(frozen=True)
class Begun:
    """A session whose lane is restored, and the seconds that this took."""

    session: Session
    seconds: float


def answer(runtime: Runtime, prompt: list[int], max_tokens: int) -> Completion:
    """Generate exactly `max_tokens` tokens."""
    return SingleRequests(runtime).generate(prompt, max_tokens=max_tokens, ignore_eos=True)


def clear_lanes(runtime: Runtime) -> None:
    """Empty every idle lane, so that the next request restores its state from the tree."""
    for slot in runtime.prefix_cache.lanes.slots:
        slot.clear()


@contextmanager
def timed_begin(runtime: Runtime, prompt: list[int], max_new_tokens: int) -> Iterator[Begun]:
    """Restore the prompt's state into a cleared lane, without computing anything, until the device is done."""
    clear_lanes(runtime)
    runtime.engine.synchronize()
    started_s = time.perf_counter()
    session = runtime.prefix_cache.begin(prompt, max_new_tokens=max_new_tokens)
    session.finish_loading()
    runtime.engine.synchronize()
    seconds = time.perf_counter() - started_s
    with session:
        yield Begun(session, seconds)


def first_token_ms(answers: Sequence[Completion]) -> float:
    """The median time to the first token."""
    return median_ms([each.timings.first_token_s for each in answers])


def median_ms(seconds: Sequence[float]) -> float:
    return round(1000 * statistics.median(seconds), 3)
