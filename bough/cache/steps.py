"""Steps: work on the tree that other work may interrupt.

The tree belongs to the thread that runs the engine. Work on all of it is a generator: at each `yield` the tree is whole,
and requests may go on and change it. Who asks for such work says how it is run, and waits for the disk between two works on
a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""Work that may be interrupted at each `yield`; it returns a result."""


class RunSteps(Protocol):
    """Runs steps where they may touch the tree, and returns their result when they are done."""

    def __call__(self, start: Callable[[], Steps[Result]]) -> Result: ...


def run_at_once(start: Callable[[], Steps[Result]]) -> Result:
    """Run steps on this thread without interruption: only where no other thread uses the tree."""
    steps = start()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
