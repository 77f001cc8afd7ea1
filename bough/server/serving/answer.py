"""An answer on its way from the engine's thread to a client: pieces told apart as text, thinking and calls of tools."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from bough.errors import BoughError
from bough.server.serving.ask import Ask, Event, Progress, Started
from bough.server.serving.loaded import LoadedModel
from bough.server.serving.parsing.sorter import Sorter
from bough.server.serving.prompting.prompt import Prepared
from bough.server.serving.record import RequestRecord
from bough.types import Chunk, Completion, Usage


@dataclass(frozen=True)
class _Begun:
    usage: Usage
    waited_s: float


_Heard = _Begun | Progress | Chunk | Completion | BoughError


class Mailbox:
    """Where the engine's thread leaves what it has, choice by choice, and the event loop finds it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, _Heard]] = asyncio.Queue()

    def put(self, choice: int, heard: _Heard) -> None:
        """Leave something, from any thread; nobody is there any more if the loop has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (choice, heard))

    async def get(self) -> tuple[int, _Heard]:
        return await self._queue.get()


class Ear:
    """Listens to one choice for its mailbox."""

    def __init__(self, mailbox: Mailbox, choice: int) -> None:
        self._mailbox = mailbox
        self._choice = choice

    def on_start(self, usage: Usage, waited_s: float) -> None:
        self._mailbox.put(self._choice, _Begun(usage, waited_s))

    def on_progress(self, done_tokens: int, total_tokens: int) -> None:
        self._mailbox.put(self._choice, Progress(done_tokens, total_tokens))

    def on_chunk(self, chunk: Chunk) -> None:
        self._mailbox.put(self._choice, chunk)

    def on_end(self, completion: Completion) -> None:
        self._mailbox.put(self._choice, completion)

    def on_error(self, error: BoughError) -> None:
        self._mailbox.put(self._choice, error)


class Answer:
    """One answer with all its choices: iterate it for its events, and close it whatever happens."""

    def __init__(
        self,
        ask: Ask,
        loaded: LoadedModel,
        load_s: float,
        on_close: Callable[[RequestRecord], None],
        clock: Callable[[], float],
    ) -> None:
        self.ask = ask
        self.loaded = loaded
        self.started = Started(Usage(), load_s)
        self.prompt_ids: Sequence[int] = ()
        self.mailbox = Mailbox()
        self.cancelled = threading.Event()
        self._on_close = on_close
        self._clock = clock
        self._opened_s = clock()
        self._sorters: list[Sorter] = []
        self._waited_s = 0.0
        self._first_s = 0.0
        self._done_tokens = 0  # of the prompt, as far as was told
        self._num_generated = 0
        self._completions: list[Completion] = []
        self._error: str | None = None
        self._is_closed = False

    def expect(self, prepared: Prepared) -> None:
        """Say what the model is given, and how its answer is to be read."""
        self.prompt_ids = prepared.encoded.ids
        single = self.ask.tool_choice.is_single
        self._sorters = [Sorter(prepared, choice, single) for choice in range(self.ask.num_choices)]

    async def start(self) -> None:
        """Wait until the first choice has a lane. Raises what became of the request instead."""
        while True:
            _, heard = await self.mailbox.get()
            if isinstance(heard, BoughError):
                self._error = str(heard)
                raise heard
            if isinstance(heard, _Begun):
                self.started = Started(heard.usage, self.started.load_s)
                self._waited_s = heard.waited_s
                return

    async def __aiter__(self) -> AsyncIterator[Event]:
        missing = len(self._sorters)
        while missing:
            choice, heard = await self.mailbox.get()
            if isinstance(heard, BoughError):
                self._error = str(heard)
                raise heard
            if isinstance(heard, Progress):
                self._done_tokens = heard.done_tokens
                yield heard
            elif isinstance(heard, Chunk):
                self._first_s = self._first_s or self._clock() - self._opened_s
                self._num_generated += len(heard.token_ids)
                yield self._sorters[choice].take(heard)
            elif isinstance(heard, Completion):
                missing -= 1
                self._completions.append(heard)
                last, finished = self._sorters[choice].finish(heard)
                if last.text or last.thinking or last.tool_calls:
                    yield last
                yield finished

    def close(self) -> None:
        """End the answer if it goes on; the work that was done is kept. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.cancelled.set()
            self._on_close(self._record())

    def _record(self) -> RequestRecord:
        """What is known of the answer; of one that was broken off, as far as it was heard."""
        usage = self.started.usage
        usage = replace(usage, computed_tokens=max(0, self._done_tokens - usage.cached_tokens))
        usage = self._completions[0].usage if self._completions else usage
        return RequestRecord(
            model=self.loaded.name,
            usage=usage if usage.prompt_tokens else None,
            completion_tokens=self._num_generated,
            queue_s=self._waited_s,
            first_token_s=max(0.0, self._first_s - self._waited_s),
            decode_s=max((each.timings.decode_s for each in self._completions), default=0.0),
            total_s=self._clock() - self._opened_s,
            host_bytes=sum(each.timings.loading.host_bytes for each in self._completions),
            disk_bytes=sum(each.timings.loading.disk_bytes for each in self._completions),
            error=self._error,
        )
