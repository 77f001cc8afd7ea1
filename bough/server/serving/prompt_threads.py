"""The threads in which one model's prompts are prepared: rendered, encoded, and their grammars compiled.

Each model has its own, so that the prompts of one never take those of another: chat templates come with models, and may
take long. Only one thread at a time runs Python, so there are few of them. Large prompts go one after the other, in a
thread that gives way to all others.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bough.system.threads import lower_priority

Result = TypeVar("Result")

LARGE_CHARS = 2**18
_NUM_THREADS = 4


class PromptThreads:
    """Runs work on prompts. The threads end when nobody refers to this any more."""

    def __init__(self) -> None:
        self._small = ThreadPoolExecutor(_NUM_THREADS, "bough-prompts")
        self._large = ThreadPoolExecutor(1, "bough-large-prompts", initializer=lower_priority)

    async def run(self, work: Callable[[Callable[[], bool]], Result], num_chars: int = 0) -> Result:
        """The result of work on a prompt of so many characters. It is given a way to ask whether anybody still waits."""
        gone = threading.Event()
        executor = self._large if num_chars > LARGE_CHARS else self._small
        try:
            return await asyncio.get_running_loop().run_in_executor(executor, work, gone.is_set)
        finally:
            gone.set()
