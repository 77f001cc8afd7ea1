"""Work in new threads, and the priority of background threads."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


async def run_in_thread(work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """Run `work` in a new thread that ends with it, and return its result. Cancelling the caller does not stop the work.

    A thread pool would be wrong for loading a model. OpenMP gives every thread that computes its own team of threads, for
    as long as that thread lives. Once the teams together have more threads than there are cores, all of them sleep instead
    of spinning, and a short prompt takes a quarter longer. So a model is loaded and unloaded by threads that end with it.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
    threading.Thread(target=run, name="bough-work").start()
    return await asyncio.wrap_future(future)


async def write_in_thread(file: Path, write: Callable[[Callable[[], bool]], object]) -> None:
    """Write a file in a thread of low priority. `write` gets a call that returns whether the caller still waits.

    If it does not, no file is left.
    """
    is_unwanted = threading.Event()

    def run() -> None:
        lower_priority()
        try:
            write(lambda: not is_unwanted.is_set())
        finally:
            if is_unwanted.is_set():
                file.unlink(missing_ok=True)

    try:
        await run_in_thread(run)
    except BaseException:
        is_unwanted.set()
        raise


def lower_priority() -> None:
    """Give the calling thread a lower priority than all others. Does nothing on systems without such a priority."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
