"""An answer on its way from the engine's thread to a client.

The engine's thread calls a listener for each choice; the answer reads their messages on the event loop, parses them,
and gives them out as events.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from bough.errors import BoughError
from bough.server.serving.answer_parser import AnswerParser
from bough.server.serving.ask import Ask, Delta, Event, Progress, Started
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.loaded_model import LoadedModel
from bough.server.serving.metrics import Metrics
from bough.server.serving.model.contract import PreparedRequest
from bough.server.serving.progress import LiveRequests
from bough.server.serving.prompting.prompt import PreparedPrompt
from bough.server.serving.record import RequestRecord, current_request_id, note_record
from bough.system.inbox import Inbox, Mailbox
from bough.types import Chunk, Completion, Usage


@dataclass(frozen=True)
class _Begin:
    usage: Usage
    waited_s: float


@dataclass(frozen=True)
class _Loaded:
    usage: Usage


_Message = _Begin | _Loaded | Progress | Chunk | Completion | BoughError
ChoiceMessage = tuple[int, _Message]


class AnswerListener:
    """The listener of one choice. The engine's thread calls it; the inbox puts each message into the answer's mailbox."""

    def __init__(self, choice: int, mailbox: Mailbox[ChoiceMessage], inbox: Inbox[ChoiceMessage]) -> None:
        self._choice = choice
        self._mailbox = mailbox
        self._inbox = inbox

    def on_start(self, usage: Usage, waited_s: float) -> None:
        self._put(_Begin(usage, waited_s))

    def on_loaded(self, usage: Usage) -> None:
        self._put(_Loaded(usage))

    def on_progress(self, done_tokens: int, total_tokens: int) -> None:
        if self._choice == 0:  # it tells for all choices
            self._put(Progress(done_tokens, total_tokens))

    def on_chunk(self, chunk: Chunk) -> None:
        self._inbox.put(self._mailbox, (self._choice, chunk))

    def on_end(self, completion: Completion) -> None:
        self._put(completion)

    def on_error(self, error: BoughError) -> None:
        self._put(error)

    def _put(self, message: _Message) -> None:
        self._inbox.put(self._mailbox, (self._choice, message))


class Answer:
    """One answer with all its choices. Iterate it for its events, and always close it.

    It holds its model until it is closed.
    """

    def __init__(
        self,
        ask: Ask,
        loaded: LoadedModel,
        load_s: float,
        models: LoadedModels,
        metrics: Metrics,
        inbox: Inbox[ChoiceMessage],
        requests: LiveRequests,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.ask = ask
        self.started = Started(Usage(), load_s, digest=loaded.info.digest, is_stored=loaded.generator.stores_answers)
        self._running: Sequence[PreparedRequest] = ()  # by choice
        self._mailbox: Mailbox[ChoiceMessage] = Mailbox()
        self._unread: list[ChoiceMessage] = []  # what came together with the message that began the answer
        self.listeners = [AnswerListener(choice, self._mailbox, inbox) for choice in range(ask.num_choices)]
        self._loaded = loaded
        self._models = models
        self._metrics = metrics
        self._clock = clock
        self._requests = requests
        self.progress = requests.begin(current_request_id(), loaded.name, ask.salt, clock())
        self._parsers: list[AnswerParser] = []
        self._completions: dict[int, Completion] = {}  # by choice
        self._error: str | None = None
        self._is_closed = False

    def set_prompt(self, prepared: PreparedPrompt) -> None:
        """Set the prompt that the model is given, which says how its answer is parsed. Any thread may call this."""
        self.started = replace(self.started, prompt_ids=prepared.encoded.ids, params=prepared.params, echo=prepared.echo)
        self.progress.prompt_ids = prepared.encoded.ids
        ask, tokenizer = self.ask, self._loaded.generator.prompts.tokenizer
        self._parsers = [AnswerParser(prepared, tokenizer, choice, ask) for choice in range(ask.num_choices)]

    def set_requests(self, requests: Sequence[PreparedRequest]) -> None:
        """Run the requests of all choices, until they end or the answer is closed. Raises Unavailable."""
        self._running = requests
        self.progress.request = requests[0]
        for request in requests:
            request.submit()

    async def start(self) -> None:
        """Wait until the first choice has a lane. Raises the error if the request fails before."""
        while True:
            messages = await self._mailbox.take()
            for number, (_, message) in enumerate(messages):
                if isinstance(message, BoughError):
                    self._error = str(message)
                    raise message
                if isinstance(message, Progress):
                    self.progress.done_tokens = message.done_tokens
                elif isinstance(message, _Begin):
                    self._set_usage(message.usage)
                    self.progress.has_lane, self.progress.waited_s = True, message.waited_s
                    self._unread = messages[number + 1 :]
                    return

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for events in self.batches():
            for event in events:
                yield event

    async def batches(self) -> AsyncIterator[list[Event]]:
        """The events as they come, those that have come together as one list. Raises the error if the request fails."""
        while len(self._completions) < len(self._parsers):
            messages, self._unread = self._unread or await self._mailbox.take(), []
            events: list[Event] = []
            for choice, message in messages:
                if isinstance(message, Chunk):
                    events.append(self._read_chunk(choice, message))
                elif isinstance(message, BoughError):
                    if events:  # they came before it
                        yield events
                    self._error = str(message)
                    raise message
                else:
                    events += self._read(choice, message)
            if events:
                yield events

    def _read_chunk(self, choice: int, chunk: Chunk) -> Delta:
        progress = self.progress
        if not progress.first_s and not chunk.prompt_logprobs:
            progress.first_s = self._clock() - progress.opened_s
        progress.num_generated += len(chunk.token_ids)
        return self._parsers[choice].add(chunk)

    def _read(self, choice: int, message: _Begin | _Loaded | Progress | Completion) -> Iterator[Event]:
        """The events of a message that is neither a chunk nor an error."""
        if isinstance(message, Progress):
            self.progress.done_tokens = message.done_tokens
            yield message
        elif isinstance(message, _Loaded) and choice == 0:
            self._set_usage(message.usage)
        elif isinstance(message, Completion):
            self._completions[choice] = message
            last, finished = self._parsers[choice].finish(message)
            if last.text or last.thinking or last.tool_calls:
                yield last
            yield finished

    def _set_usage(self, usage: Usage) -> None:
        self.started = replace(self.started, usage=usage)
        self.progress.usage = usage

    def close(self) -> None:
        """End the answer, count it and release its model. Computed state is kept. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            for request in self._running:
                request.cancel()
            record = self._record()
            self._models.release(self._loaded)
            self._metrics.request_done(record)
            self._requests.end(self.progress, record, is_complete=len(self._completions) == len(self.listeners))
            note_record(record)

    def _record(self) -> RequestRecord:
        """The record of the answer; if it was cancelled, of the part that was computed."""
        usage, completions, progress = self._usage(), self._completions.values(), self.progress
        if 0 in self._completions:
            progress.answer_ids = self._completions[0].token_ids
        return RequestRecord(
            model=self._loaded.name,
            usage=usage if usage.prompt_tokens else None,
            completion_tokens=progress.num_generated,
            queue_s=progress.waited_s,
            first_token_s=max(0.0, progress.first_s - progress.waited_s),
            decode_s=max((each.timings.decode_s for each in completions), default=0.0),
            total_s=self._clock() - progress.opened_s,
            host_bytes=sum(each.timings.loading.host_bytes for each in completions),
            disk_bytes=sum(each.timings.loading.disk_bytes for each in completions),
            store_bytes=sum(each.timings.loading.store_bytes for each in completions),
            recomputed_tokens=sum(each.timings.loading.recomputed_tokens for each in completions),
            error=self._error,
        )

    def _usage(self) -> Usage:
        """That of the first choice. If it was cancelled while it loaded, it has reused and computed nothing."""
        if 0 in self._completions:
            return self._completions[0].usage
        usage, done_tokens = self.started.usage, self.progress.done_tokens
        if done_tokens < usage.cached_tokens:  # what is to be reused is not there yet
            return replace(usage, cached_tokens=0)
        return replace(usage, computed_tokens=done_tokens - usage.cached_tokens)
