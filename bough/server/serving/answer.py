"""An answer on its way from the engine's thread to a client, and the events that all APIs write in their own formats.

The engine's thread calls a listener for each choice, which puts the news into the answer's mailbox. On the event loop the
answer splits them into text, thinking and tool calls, and yields them as events.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from bough.errors import BoughError
from bough.generate.request import Request
from bough.models.answers.thinking import ThinkingParser
from bough.models.answers.tool_calls import ToolCallParser
from bough.models.prompts import NOTHING_LEFT_OUT, LeftOut
from bough.models.tokenizer import Tokenizer
from bough.prompting.ask import Ask
from bough.prompting.echo import EchoedPrompt, make_echo
from bough.prompting.prompt import AnswerFormat
from bough.scheduling.job import Listener, PromptAdvanced, PromptLoaded, RequestBegan, RequestNews
from bough.server.serving.loaded import LoadedModel
from bough.server.serving.loaded.progress import RequestProgress, RequestRecord
from bough.server.serving.model.contract import PreparedRequest
from bough.system.inbox import Inbox, Mailbox
from bough.tokens import NO_TOKENS, Tokens
from bough.types import Alternative, Chunk, Completion, SamplingParams, TokenLogprob, ToolCall, Usage

ChoiceNews = tuple[int, RequestNews]
FinishReason = Literal["stop", "length", "loop", "tool_calls"]


@dataclass(frozen=True)
class ScoredToken:
    """The bytes of a token, the log of its probability, and the likeliest tokens at its place."""

    data: bytes
    logprob: float
    top: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True)
class Started:
    """The first choice has its lane: nothing can be refused any more. `usage` is its own, without completion tokens yet.

    Tokens that are still being read from disk count as cached; the completions have the final figures. `params` include the
    model's own defaults. `digest` is that of the model's weights; `is_stored` says whether the answer's state is kept for
    reuse. `echo` is the prompt, if it was asked for; `left_out` is what it lacks.
    """

    usage: Usage
    load_s: float = 0.0
    prompt: Tokens = NO_TOKENS
    params: SamplingParams = field(default_factory=SamplingParams)
    digest: str = ""
    is_stored: bool = True
    echo: EchoedPrompt | None = None
    left_out: LeftOut = NOTHING_LEFT_OUT


@dataclass(frozen=True)
class PromptProgress:
    """The number of evaluated tokens of the prompt."""

    done_tokens: int
    total_tokens: int


@dataclass(slots=True)  # not frozen: one is made for every token
class Delta:
    """A piece of one choice: whole characters, and whole tool calls. The prompt's log-probabilities come with the first
    choice, before its text."""

    choice: int = 0
    text: str = ""
    thinking: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[ScoredToken, ...] = ()
    num_tokens: int = 0  # generated for it; the text of some may come with a later piece
    prompt_logprobs: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True)
class Finished:
    """One whole choice. The first has `prompt_logprobs` if asked: those of the prompt's tokens from the second on."""

    choice: int
    text: str
    thinking: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    completion: Completion
    logprobs: tuple[ScoredToken, ...] = ()
    thinking_tokens: int = 0
    prompt_logprobs: tuple[ScoredToken, ...] = ()


Event = PromptProgress | Delta | Finished


@dataclass(frozen=True)
class Answered:
    started: Started
    choices: tuple[Finished, ...]


def make_listener(choice: int, mailbox: Mailbox[ChoiceNews], inbox: Inbox[ChoiceNews]) -> Listener:
    """The listener of one choice. Progress of the prompt is that of all choices, so only the first one passes it on."""

    def hear(news: RequestNews) -> None:
        if choice == 0 or not isinstance(news, PromptAdvanced):
            inbox.put(mailbox, (choice, news))

    return hear


class Answer:
    """One answer with all its choices. Iterate it for its events, and always close it: until then it holds its model."""

    def __init__(
        self,
        ask: Ask,
        loaded: LoadedModel,
        request: Request,
        answer_format: AnswerFormat,
        choices: Sequence[PreparedRequest],
        mailbox: Mailbox[ChoiceNews],
        progress: RequestProgress,
        end: Callable[[RequestRecord, bool], None],
        *,
        load_s: float = 0.0,
        left_out: LeftOut = NOTHING_LEFT_OUT,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`request` is that of the first choice. The listeners of `choices` fill `mailbox`.

        `end` gets the record, and whether the answer is whole.
        """
        self._generator = generator = loaded.generator
        tokenizer = generator.facts.prompts.tokenizer
        self.ask = ask
        self.started = Started(
            Usage(),
            load_s,
            request.tokens,
            request.params,
            digest=loaded.info.digest,
            is_stored=generator.stores_answers,
            echo=make_echo(ask, request.tokens, tokenizer) if ask.echoes else None,
            left_out=left_out,
        )
        self._name = loaded.name
        self._choices = choices
        self._mailbox = mailbox
        self._unread: list[ChoiceNews] = []  # that came together with the start of the answer
        self._end = end
        self._clock = clock
        self._progress = progress
        self._parsers = [AnswerParser(answer_format, tokenizer, choice, ask) for choice in range(ask.num_choices)]
        self._completions: dict[int, Completion] = {}  # by choice
        self._error: str | None = None
        self._is_closed = False

    async def start(self) -> None:
        """Run all choices, and wait until the first has a lane. Raises Unavailable, or the error if it fails before."""
        self._progress.prompt, self._progress.request = self.started.prompt, self._choices[0]
        for request in self._choices:
            self._generator.submit(request)
        while True:
            batch = await self._mailbox.take()
            for number, (_, news) in enumerate(batch):
                if isinstance(news, BoughError):
                    self._error = str(news)
                    raise news
                if isinstance(news, PromptAdvanced):
                    self._progress.done_tokens = news.done_tokens
                elif isinstance(news, RequestBegan):
                    self._set_usage(news.usage)
                    self._progress.has_lane, self._progress.waited_s = True, news.waited_s
                    self._unread = batch[number + 1 :]
                    return

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for events in self.batches():
            for event in events:
                yield event

    async def batches(self) -> AsyncIterator[list[Event]]:
        """The events, those that have come together as one list. Raises the error if the request fails."""
        while len(self._completions) < len(self._parsers):
            batch, self._unread = self._unread or await self._mailbox.take(), []
            events: list[Event] = []
            for choice, news in batch:
                if isinstance(news, Chunk):
                    events.append(self._read_chunk(choice, news))
                elif isinstance(news, BoughError):
                    if events:  # they came before it
                        yield events
                    self._error = str(news)
                    raise news
                else:
                    events += self._read(choice, news)
            if events:
                yield events

    def _read_chunk(self, choice: int, chunk: Chunk) -> Delta:
        progress = self._progress
        if not progress.first_s and not chunk.prompt_logprobs:
            progress.first_s = self._clock() - progress.opened_s
        progress.num_generated += len(chunk.token_ids)
        return self._parsers[choice].add(chunk)

    def _read(self, choice: int, news: RequestBegan | PromptLoaded | PromptAdvanced | Completion) -> Iterator[Event]:
        if isinstance(news, PromptAdvanced):
            self._progress.done_tokens = news.done_tokens
            yield PromptProgress(news.done_tokens, news.total_tokens)
        elif isinstance(news, PromptLoaded) and choice == 0:
            self._set_usage(news.usage)
        elif isinstance(news, Completion):
            self._completions[choice] = news
            last, finished = self._parsers[choice].finish(news)
            if last.text or last.thinking or last.tool_calls:
                yield last
            yield finished

    def _set_usage(self, usage: Usage) -> None:
        self.started = replace(self.started, usage=usage)
        self._progress.usage = usage

    def close(self) -> None:
        """End the answer, count it and release its model. Computed state is kept. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            for request in self._choices:
                request.cancel()
            self._end(self._record(), len(self._completions) == len(self._parsers))

    def _record(self) -> RequestRecord:
        """The record of the answer; if it was cancelled, of the part that was computed."""
        usage, completions, progress = self._usage(), self._completions.values(), self._progress
        if 0 in self._completions:
            progress.answer_ids = self._completions[0].token_ids
        loadings = [each.timings.loading for each in completions]
        return RequestRecord(
            model=self._name,
            usage=usage if usage.prompt_tokens else None,
            completion_tokens=progress.num_generated,
            queue_s=progress.waited_s,
            first_token_s=max(0.0, progress.first_s - progress.waited_s),
            decode_s=max((each.timings.decode_s for each in completions), default=0.0),
            total_s=self._clock() - progress.opened_s,
            host_bytes=sum(each.host_bytes for each in loadings),
            disk_bytes=sum(each.disk_bytes for each in loadings),
            store_bytes=sum(each.store_bytes for each in loadings),
            recomputed_tokens=sum(each.recomputed_tokens for each in loadings),
            left_out=self.started.left_out,
            error=self._error,
        )

    def _usage(self) -> Usage:
        """That of the first choice. If it was cancelled while it loaded, it has reused and computed nothing."""
        if 0 in self._completions:
            return self._completions[0].usage
        usage, done_tokens = self.started.usage, self._progress.done_tokens
        if done_tokens < usage.cached_tokens:  # the tokens to reuse are not loaded yet
            return replace(usage, cached_tokens=0)
        return replace(usage, computed_tokens=done_tokens - usage.cached_tokens)


class AnswerParser:
    """Splits one choice into text, thinking and tool calls. Half of a tag is held back until a later piece."""

    def __init__(self, answer_format: AnswerFormat, tokenizer: Tokenizer, choice: int, ask: Ask) -> None:
        self._tokenizer = tokenizer
        self._choice = choice
        self._is_single = ask.tool_choice.is_single
        self._counts_thinking = ask.counts_thinking
        self._thoughts = ThinkingParser(answer_format.starts_thinking) if answer_format.splits_thinking else None
        tools, is_forced = answer_format.tools, answer_format.is_forced
        self._calls = ToolCallParser(tools.keys(), is_forced=is_forced, schemas=tools) if tools else None
        self._is_plain = self._thoughts is None and self._calls is None  # all of it is text
        self._text: list[str] = []
        self._thinking: list[str] = []
        self._found: list[ToolCall] = []
        self._logprobs: list[ScoredToken] = []
        self._prompt_logprobs: list[ScoredToken] = []

    def add(self, chunk: Chunk) -> Delta:
        if self._is_plain and not chunk.logprobs and not chunk.prompt_logprobs:
            self._text.append(chunk.text)
            return Delta(self._choice, chunk.text, num_tokens=len(chunk.token_ids))
        thinking, text = "", chunk.text
        if self._thoughts is not None:
            thought = self._thoughts.add(chunk.text)
            thinking, text = thought.thinking, thought.text
        return self._parse(thinking, text, chunk, is_end=False)

    def finish(self, completion: Completion) -> tuple[Delta, Finished]:
        """The rest that was held back, and then the whole choice."""
        thought = self._thoughts.flush() if self._thoughts is not None else None
        thinking, text = (thought.thinking, thought.text) if thought is not None else ("", "")
        last = self._parse(thinking, text, Chunk(""), is_end=True)
        reason: FinishReason = "stop" if completion.finish_reason == "cancelled" else completion.finish_reason
        whole_thinking = "".join(self._thinking)
        return last, Finished(
            self._choice,
            "".join(self._text),
            whole_thinking,
            tuple(self._found),
            "tool_calls" if self._found else reason,
            completion,
            tuple(self._logprobs),
            len(self._tokenizer.encode(whole_thinking)) if whole_thinking and self._counts_thinking else 0,
            tuple(self._prompt_logprobs),
        )

    def _parse(self, thinking: str, text: str, chunk: Chunk, *, is_end: bool) -> Delta:
        calls: list[ToolCall] = []
        if self._calls is not None:
            found = self._calls.add(text)
            text, calls = found.text, list(found.calls)
            if is_end:
                rest = self._calls.flush()
                text, calls = text + rest.text, [*calls, *rest.calls]
        if self._is_single:
            calls = calls[: max(0, 1 - len(self._found))]
        logprobs = tuple(self._score(each, each.top) for each in chunk.logprobs)
        prompt_logprobs = tuple(self._score(each, each.top) for each in chunk.prompt_logprobs)
        self._text.append(text)
        self._thinking.append(thinking)
        self._found += calls
        self._logprobs += logprobs
        self._prompt_logprobs += prompt_logprobs
        return Delta(self._choice, text, thinking, tuple(calls), logprobs, len(chunk.token_ids), prompt_logprobs)

    def _score(self, token: TokenLogprob | Alternative, top: tuple[Alternative, ...] = ()) -> ScoredToken:
        data = self._tokenizer.token_bytes(token.token_id)
        return ScoredToken(data, token.logprob, tuple(self._score(each) for each in top))
