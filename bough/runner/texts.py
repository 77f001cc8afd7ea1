"""Many texts through an encoder or an embedder, for a thread or a task: some are queued, and the next when one is done.

However a call ends, the texts that it has queued are cancelled if they are not done.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from bough.errors import BoughError, RequestError, ShuttingDown
from bough.runner.delivery import Cancellation, telling_number
from bough.runtime.embedding import WINDOW
from bough.system.inbox import Inbox, Mailbox

Result = TypeVar("Result")

Tell = Callable[[Result | BoughError], None]
Start = Callable[[Tell[Result], Callable[[], bool]], None]
"""Tokenizes and queues one text, with what is told its result and what says whether it is cancelled."""

_Numbered = tuple[int, Result | BoughError]


def run_texts(starts: Sequence[Start[Result]]) -> list[Result]:
    """The results of all texts, in their order. If one fails, the others are cancelled, and its error is raised."""
    arrived: queue.SimpleQueue[_Numbered[Result]] = queue.SimpleQueue()
    texts = _Texts(starts, arrived.put)
    try:
        texts.advance([])
        while not texts.are_done:
            texts.advance([arrived.get()])
        return texts.results()
    finally:
        texts.cancellation.request()


async def run_texts_async(starts: Sequence[Start[Result]]) -> list[Result]:
    """As `run_texts`, for a task. Texts are tokenized in a thread, so that the event loop goes on meanwhile."""
    inbox: Inbox[_Numbered[Result]] = Inbox(asyncio.get_running_loop())
    mailbox: Mailbox[_Numbered[Result]] = Mailbox()

    def put(numbered: _Numbered[Result]) -> None:
        if not inbox.put(mailbox, numbered):  # the event loop has ended
            texts.cancellation.request()

    texts = _Texts(starts, put)
    try:
        await asyncio.to_thread(texts.advance, [])
        while not texts.are_done:
            await asyncio.to_thread(texts.advance, await mailbox.take())
        return texts.results()
    finally:
        texts.cancellation.request()


class _Texts(Generic[Result]):
    """The texts of one call: which are next, which are under way, and the results of the others."""

    def __init__(self, starts: Sequence[Start[Result]], put: Callable[[_Numbered[Result]], None]) -> None:
        """`put` is called with each result, by the engine's thread."""
        self.cancellation = Cancellation()
        self._starts = starts
        self._put = put
        self._num_started = 0
        self._results: dict[int, Result] = {}

    @property
    def are_done(self) -> bool:
        return len(self._results) == len(self._starts)

    def results(self) -> list[Result]:
        """All results, in the order of the texts."""
        return [self._results[number] for number in range(len(self._starts))]

    def advance(self, arrived: Iterable[_Numbered[Result]]) -> None:
        """Take results, and queue as many texts as then may be queued. Raises the error of a text, or of a result."""
        try:
            for number, result in arrived:
                if isinstance(result, BoughError):
                    with telling_number(number, len(self._starts)):
                        raise result
                self._results[number] = result
            self._start_more()
        except ShuttingDown as error:
            raise RequestError("the runner is closed") from error

    def _start_more(self) -> None:
        until = min(len(self._starts), len(self._results) + WINDOW)
        while self._num_started < until and not self.cancellation.is_requested:
            self._start(self._num_started)
            self._num_started += 1

    def _start(self, number: int) -> None:
        with telling_number(number, len(self._starts)):
            self._starts[number](lambda result: self._put((number, result)), self.cancellation.check)
