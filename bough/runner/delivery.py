"""Answers on their way from the engine's thread to the threads and tasks that asked.

The engine's thread puts what happens to a request into a queue (for a thread) or into a mailbox of an event loop (for a
task). It never runs code of the user: the thread or task that waits for the answer calls the callbacks. A request is
cancelled as soon as its reader is closed, is cancelled, raises, or is garbage; what was computed is kept.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from bough.errors import BoughError, RequestError, ShuttingDown
from bough.models.answers.tool_calls import find_calls
from bough.scheduling.job import Job, PromptAdvanced, PromptLoaded, RequestBegan, RequestNews
from bough.scheduling.worker import Worker
from bough.system.inbox import Inbox, Mailbox
from bough.types import Chunk, Completion, Tool

Item = TypeVar("Item")

WINDOW = 256
"""The most requests of a batch in the queue at a time. Among these the scheduler finds common prefixes."""

_IS_CLOSED = "the runner is closed"
_ASK_EVERY_S = 0.05  # how often `is_cancelled` is called while nothing comes
_WAKE_S = 1.0  # how often a thread wakes that waits for an answer


News = PromptAdvanced | Chunk | Completion | BoughError
Put = Callable[[News], bool]
"""Takes news; returns False if there is no reader for it any more."""


@contextmanager
def noting_number(number: int, total: int) -> Iterator[None]:
    """Add a note to an error that says which of several prompts or texts it is about; tracebacks show it."""
    try:
        yield
    except BoughError as error:
        if total > 1:
            error.add_note(f"That is number {number} of {total}, counted from 0.")
        raise


@dataclass
class Cancellation:
    """Whether a request is to end: on request, or as its reader is garbage. A finalizer would swallow Ctrl-C."""

    reader: weakref.ref[AnswerReader] | None = None
    is_requested: bool = False

    def request(self) -> None:
        self.is_requested = True

    def check(self) -> bool:
        return self.is_requested or (self.reader is not None and self.reader() is None)


@dataclass(frozen=True)
class Callbacks:
    is_cancelled: Callable[[], bool] | None = None
    on_progress: Callable[[int, int], None] | None = None

    @property
    def wait_s(self) -> float | None:
        """The wait for news before `is_cancelled` is called again; None without `is_cancelled`."""
        return None if self.is_cancelled is None else _ASK_EVERY_S


NO_CALLBACKS = Callbacks()


class _Listener:
    """Passes on the news of one request. It does not know the reader, which may become garbage meanwhile."""

    def __init__(self, put: Put, cancellation: Cancellation, *, wants_chunks: bool, wants_progress: bool) -> None:
        self._put = put
        self._cancellation = cancellation
        self._wants_chunks = wants_chunks
        self._wants_progress = wants_progress

    def __call__(self, news: RequestNews) -> None:
        if isinstance(news, RequestBegan | PromptLoaded) or (isinstance(news, Chunk) and not self._wants_chunks):
            return
        if isinstance(news, PromptAdvanced) and not self._wants_progress:
            return
        if not self._put(news):
            self._cancellation.request()


class AnswerReader:
    """One request as the thread or task that waits for it sees it. When the reader ends, the request is cancelled.

    It keeps its `owner` alive, because a runner that is garbage ends its requests. Readers that share a cancellation end
    one by one, and the maker of it cancels them. The engine's thread calls `put` with the news.
    """

    def __init__(
        self,
        owner: object,
        put: Put,
        callbacks: Callbacks = NO_CALLBACKS,
        *,
        wants_chunks: bool = False,
        cancellation: Cancellation | None = None,
    ) -> None:
        self.cancellation = cancellation or Cancellation(weakref.ref(self))
        self.callbacks = callbacks
        self._owner = owner
        wants_progress = callbacks.on_progress is not None
        self.listener = _Listener(put, self.cancellation, wants_chunks=wants_chunks, wants_progress=wants_progress)

    def read(self, news: News | None) -> Chunk | Completion | None:
        """Call the user's functions, and return a piece of the answer. Raises the error of the request."""
        if self.callbacks.is_cancelled is not None and self.callbacks.is_cancelled():
            self.cancellation.request()
        if isinstance(news, ShuttingDown):
            raise RequestError(_IS_CLOSED) from news
        if isinstance(news, BoughError):
            raise news
        if isinstance(news, PromptAdvanced):
            assert self.callbacks.on_progress is not None
            self.callbacks.on_progress(news.done_tokens, news.total_tokens)
            return None
        return news


@dataclass(frozen=True)
class PreparedJob:
    """A job, and what is found in its answer: the calls of these tools, behind its thinking."""

    job: Job
    tools: Sequence[Tool] = ()
    starts_thinking: bool = False

    def submit(self, worker: Worker) -> None:
        """Queue the job. Raises RequestError if the runner is closed."""
        try:
            worker.submit(self.job)
        except ShuttingDown as error:
            raise RequestError(_IS_CLOSED) from error

    def complete(self, completion: Completion) -> Completion:
        if not self.tools:
            return completion
        return replace(completion, tool_calls=find_calls(completion.text, self.tools, starts_thinking=self.starts_thinking))


def put_into(arrived: queue.SimpleQueue[News]) -> Put:
    """A function that puts news into a queue, which always has a reader."""

    def put(news: News) -> bool:
        arrived.put(news)
        return True

    return put


def deliver(
    worker: Worker, prepared: PreparedJob, reader: AnswerReader, arrived: queue.SimpleQueue[News]
) -> Generator[Chunk | Completion, None, None]:
    """Submit a request when the first piece is asked for; yields its pieces as they arrive, then the completion."""
    try:
        prepared.submit(worker)
        piece: Chunk | Completion | None = None
        while not isinstance(piece, Completion):
            piece = reader.read(take(worker, arrived, reader.callbacks.wait_s))
            if piece is not None:
                yield prepared.complete(piece) if isinstance(piece, Completion) else piece
    finally:
        reader.cancellation.request()


def take(worker: Worker, arrived: queue.SimpleQueue[Item], timeout_s: float | None) -> Item | None:
    """The next item; None if none comes in time, or in `_WAKE_S`, for Ctrl-C. Raises RequestError in a forked process."""
    worker.require_own_process()
    try:
        return arrived.get(timeout=_WAKE_S if timeout_s is None else timeout_s)
    except queue.Empty:
        return None


Prepare = Callable[[AnswerReader], PreparedJob]
OnDone = Callable[[int, Completion], object]


class Loops:
    """The inboxes of the event loops that await answers."""

    def __init__(self) -> None:
        self._inboxes: dict[asyncio.AbstractEventLoop, Inbox[News]] = {}
        self._lock = threading.Lock()

    def _inbox(self) -> Inbox[News]:
        """The inbox of the running loop. Drops those of closed loops."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._inboxes = {each: inbox for each, inbox in self._inboxes.items() if not each.is_closed()}
            return self._inboxes.setdefault(loop, Inbox(loop))

    async def deliver(
        self, owner: object, worker: Worker, prepare: Prepare, callbacks: Callbacks, *, wants_chunks: bool
    ) -> AsyncGenerator[Chunk | Completion, None]:
        """As the function `deliver`, for a task. The prompt is prepared in a thread."""
        mailbox: Mailbox[News] = Mailbox()
        loop, inbox = asyncio.get_running_loop(), self._inbox()
        reader = AnswerReader(owner, lambda news: inbox.put(mailbox, news), callbacks, wants_chunks=wants_chunks)
        try:
            prepared = await asyncio.to_thread(prepare, reader)
            prepared.submit(worker)
            while True:
                worker.require_own_process()
                if asyncio.get_running_loop() is not loop:  # no news come there
                    raise RequestError("the stream was begun in another event loop, and must be read in that one")
                for news in await _take_soon(mailbox, reader.callbacks.wait_s):
                    piece = reader.read(news)
                    if isinstance(piece, Completion):
                        yield prepared.complete(piece)
                        return
                    if piece is not None:
                        yield piece
        finally:
            reader.cancellation.request()


async def _take_soon(mailbox: Mailbox[News], timeout_s: float | None) -> Sequence[News | None]:
    try:
        async with asyncio.timeout(timeout_s):
            return await mailbox.take()
    except TimeoutError:
        return [None]


def run_batch(
    owner: object,
    worker: Worker,
    requests: Sequence[Prepare],
    callbacks: Callbacks = NO_CALLBACKS,
    on_done: OnDone | None = None,
) -> list[Completion]:
    """The completions of all requests, in their order. If one fails, all end. Only the first reports progress."""
    arrived: queue.SimpleQueue[tuple[int, News]] = queue.SimpleQueue()
    cancellation = Cancellation()
    running: dict[int, tuple[AnswerReader, PreparedJob]] = {}
    completions: dict[int, Completion] = {}
    following = iter(range(len(requests)))

    def put(number: int, news: News) -> bool:
        arrived.put((number, news))
        return True

    def submit_next() -> None:
        number = next(following, None)
        if number is None:
            return
        own = callbacks if number == 0 else replace(callbacks, on_progress=None)
        reader = AnswerReader(owner, partial(put, number), own, cancellation=cancellation)
        with noting_number(number, len(requests)):
            running[number] = reader, requests[number](reader)
            running[number][1].submit(worker)

    try:
        for _ in range(WINDOW):
            submit_next()
        while running:
            number, news = take(worker, arrived, callbacks.wait_s) or (next(iter(running)), None)
            reader, prepared = running[number]
            piece = reader.read(news)
            if isinstance(piece, Completion):
                completions[number] = prepared.complete(piece)
                if on_done is not None:
                    on_done(number, completions[number])
                del running[number]
                submit_next()
    finally:
        cancellation.request()
    return [completions[number] for number in range(len(requests))]
