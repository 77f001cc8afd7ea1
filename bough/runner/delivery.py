"""Answers on their way from the engine's thread to the threads and tasks that asked.

The engine's thread puts what happens to a request into a queue (for a thread) or into a mailbox of an event loop (for a
task). It never runs code of the user: callbacks are called by who waits for the answer. A request is cancelled as soon as
its reader is closed, is cancelled, raises, or is garbage: then its lane becomes idle, and what was computed is kept.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from bough.errors import BoughError, RequestError, ShuttingDown
from bough.generate.generation import Generation
from bough.models.answers.tool_calls import find_calls
from bough.scheduling.job import Job
from bough.scheduling.worker import Worker
from bough.system.inbox import Inbox, Mailbox
from bough.types import Chunk, Completion, Tool, Usage

Item = TypeVar("Item")

_IS_CLOSED = "the runner is closed"
_ASK_EVERY_S = 0.05  # how often `is_cancelled` is asked while nothing comes
_WAKE_S = 1.0  # how often a thread wakes that waits for an answer


@dataclass(frozen=True)
class _Progress:
    done_tokens: int
    total_tokens: int


News = _Progress | Chunk | Completion | BoughError
Put = Callable[[News], bool]
"""Takes news; returns False if there is no reader for it any more."""


def _has_no_reader(news: News) -> bool:
    return False


@contextmanager
def telling_number(number: int, total: int) -> Iterator[None]:
    """Add to an error which of several prompts or texts it is about, as a note, which tracebacks show."""
    try:
        yield
    except BoughError as error:
        if total > 1:
            error.add_note(f"That is number {number} of {total}, counted from 0.")
        raise


@dataclass
class Cancellation:
    """Whether a request is to end: because that was requested, or because its reader, if it has one of its own, is garbage.

    So no finalizer has to run. In one, what a signal handler raises would be lost.
    """

    reader: weakref.ref[Reader] | None = None
    is_requested: bool = False

    def request(self) -> None:
        self.is_requested = True

    def check(self) -> bool:
        return self.is_requested or (self.reader is not None and self.reader() is None)


@dataclass(frozen=True)
class Callbacks:
    """The functions of the user that go with a request."""

    is_cancelled: Callable[[], bool] | None = None
    on_progress: Callable[[int, int], None] | None = None

    @property
    def wait_s(self) -> float | None:
        """How long to wait for news before `is_cancelled` is asked again; None if there is nothing to ask."""
        return None if self.is_cancelled is None else _ASK_EVERY_S


NO_CALLBACKS = Callbacks()


class _Listener:
    """Passes on what happens to one request; the engine's thread calls it. `put` says whether there is still a reader.

    It does not know the reader, so that an abandoned reader is garbage while its request runs.
    """

    def __init__(self, cancellation: Cancellation, *, wants_chunks: bool) -> None:
        self.put: Put = _has_no_reader
        self._cancellation = cancellation
        self._wants_chunks = wants_chunks

    def on_start(self, usage: Usage, waited_s: float) -> None:
        pass

    def on_loaded(self, usage: Usage) -> None:
        pass

    def on_progress(self, done_tokens: int, total_tokens: int) -> None:
        self._pass_on(_Progress(done_tokens, total_tokens))

    def on_chunk(self, chunk: Chunk) -> None:
        if self._wants_chunks:
            self._pass_on(chunk)

    def on_end(self, completion: Completion) -> None:
        self._pass_on(completion)

    def on_error(self, error: BoughError) -> None:
        self._pass_on(error)

    def _pass_on(self, news: News) -> None:
        if not self.put(news):
            self._cancellation.request()


class Reader:
    """One request as the thread or task that waits for it sees it. Its end, in whatever way, cancels the request.

    It keeps its `owner` alive: a runner that nobody refers to ends the requests that run. Readers that share a cancellation
    end one by one, and who made it cancels them. The calls of its `tools` are found in the answer, behind its thinking.
    """

    def __init__(
        self,
        owner: object,
        callbacks: Callbacks = NO_CALLBACKS,
        *,
        wants_chunks: bool = False,
        cancellation: Cancellation | None = None,
    ) -> None:
        self.cancellation = cancellation or Cancellation(weakref.ref(self))
        self.callbacks = callbacks
        self.tools: Sequence[Tool] = ()
        self.starts_thinking = False
        self._owner = owner
        self._listener = _Listener(self.cancellation, wants_chunks=wants_chunks)

    @property
    def on_progress(self) -> Callable[[int, int], None] | None:
        """What the engine's thread tells of progress, if the user wants to know."""
        return self._listener.on_progress if self.callbacks.on_progress else None

    def submit(self, worker: Worker, generation: Generation, put: Put) -> None:
        """Queue the request; its news go to `put`, by the engine's thread. Raises RequestError if the runner is closed."""
        self._listener.put = put
        try:
            worker.submit(Job(generation, self._listener))
        except ShuttingDown as error:
            raise RequestError(_IS_CLOSED) from error

    def read(self, news: News | None) -> Chunk | Completion | None:
        """Call the user's functions, and give out a piece of the answer. Raises the error of the request."""
        if self.callbacks.is_cancelled is not None and self.callbacks.is_cancelled():
            self.cancellation.request()
        if isinstance(news, ShuttingDown):
            raise RequestError(_IS_CLOSED) from news
        if isinstance(news, BoughError):
            raise news
        if isinstance(news, _Progress):
            assert self.callbacks.on_progress is not None
            self.callbacks.on_progress(news.done_tokens, news.total_tokens)
            return None
        if isinstance(news, Completion) and self.tools:
            return replace(news, tool_calls=find_calls(news.text, self.tools, starts_thinking=self.starts_thinking))
        return news


def deliver(worker: Worker, generation: Generation, reader: Reader) -> Generator[Chunk | Completion, None, None]:
    """Submit a request when the first piece is asked for; yields its pieces, then the completion."""
    arrived: queue.SimpleQueue[News] = queue.SimpleQueue()

    def put(news: News) -> bool:
        arrived.put(news)
        return True

    try:
        reader.submit(worker, generation, put)
        piece: Chunk | Completion | None = None
        while not isinstance(piece, Completion):
            piece = reader.read(take(worker, arrived, reader.callbacks.wait_s))
            if piece is not None:
                yield piece
    finally:
        reader.cancellation.request()


def take(worker: Worker, arrived: queue.SimpleQueue[Item], timeout_s: float | None) -> Item | None:
    """The next item; None if there is none within the time. Raises RequestError in a forked process, where none comes.

    No wait is longer than `_WAKE_S`: Ctrl-C just before a wait does not interrupt it, and is raised after it.
    """
    worker.require_own_process()
    try:
        return arrived.get(timeout=_WAKE_S if timeout_s is None else timeout_s)
    except queue.Empty:
        return None


class Loops:
    """The inboxes of the event loops in which answers are awaited, one for each."""

    def __init__(self) -> None:
        self._inboxes: dict[asyncio.AbstractEventLoop, Inbox[News]] = {}
        self._lock = threading.Lock()

    def _inbox(self) -> Inbox[News]:
        """The inbox of the running loop. Those of loops that have ended are dropped."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._inboxes = {each: inbox for each, inbox in self._inboxes.items() if not each.is_closed()}
            return self._inboxes.setdefault(loop, Inbox(loop))

    async def deliver(
        self, worker: Worker, prepare: Callable[[Reader], Generation], reader: Reader
    ) -> AsyncGenerator[Chunk | Completion, None]:
        """As the function `deliver`, for a task. The prompt is prepared in a thread, so that the loop goes on meanwhile."""
        mailbox: Mailbox[News] = Mailbox()
        loop, inbox = asyncio.get_running_loop(), self._inbox()
        try:
            generation = await asyncio.to_thread(prepare, reader)
            reader.submit(worker, generation, lambda news: inbox.put(mailbox, news))
            while True:
                worker.require_own_process()
                _require_running(loop)
                for news in await _take_soon(mailbox, reader.callbacks.wait_s):
                    piece = reader.read(news)
                    if piece is not None:
                        yield piece
                    if isinstance(piece, Completion):
                        return
        finally:
            reader.cancellation.request()


def _require_running(loop: asyncio.AbstractEventLoop) -> None:
    """Raise RequestError if a stream is read in another event loop than that in which it was begun: nothing comes there."""
    if asyncio.get_running_loop() is not loop:
        raise RequestError("the stream was begun in another event loop, and must be read in that one")


async def _take_soon(mailbox: Mailbox[News], timeout_s: float | None) -> Sequence[News | None]:
    try:
        async with asyncio.timeout(timeout_s):
            return await mailbox.take()
    except TimeoutError:
        return [None]
