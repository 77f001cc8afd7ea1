"""Work in a thread that ends with it.

OpenMP gives every thread that computes a team of its own, for as long as that thread lives. Once the teams together have
more threads than there are cores, all of them sleep where they would have waited awake, and a short prompt takes a quarter
longer to read. So a model is loaded, and unloaded, by a thread that is gone afterwards: its engine's thread stays alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


async def in_own_thread(work: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
    """The result of some work. It goes on to its end even if whoever waits for it is cancelled."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    future.set_running_or_notify_cancel()  # from now on it cannot be cancelled
    threading.Thread(target=run, name="bough-work").start()
    return await asyncio.wrap_future(future)
