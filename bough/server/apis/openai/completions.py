"""OpenAI's plain completions: continue prompts given as texts or token ids, without a chat template.

Several prompts are answered as if each had come alone; the choices of prompt p are those with the index p * n and after.
With `echo` each choice begins with its prompt and, if logprobs are asked for, with the log-probabilities of its tokens, of
which the first has none. With `suffix` the answer goes between prompt and suffix, if the model was trained for that.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from bough.errors import RequestError
from bough.prompting.ask import Ask
from bough.prompting.echo import EchoedPrompt
from bough.server.apis.answering import SaltOf, ServiceOf, progress_comment
from bough.server.apis.openai import wire
from bough.server.http.bounds import MAX_ANSWERS, MAX_PROMPTS
from bough.server.http.errors import to_http_error
from bough.server.http.json_routes import read_ask, route_class
from bough.server.http.streaming import EVENT_STREAM, ClosingStream, Pieces, cancel_on_disconnect, sse
from bough.server.serving.answer import Answer, Answered, Delta, Finished, PromptProgress, ScoredToken
from bough.server.serving.service import Service
from bough.system.tasks import gather

router = APIRouter(route_class=route_class(wire.format_error), tags=["OpenAI"])

KIND = "text_completion"
DEFAULT_MAX_TOKENS = 16
PROMPTS_AT_ONCE = 4  # of one request, so that it does not fill the queue for the others


class CompletionRequest(wire.Sampling):
    """The body of a completion. Other fields are accepted and ignored."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: wire.NumAlternatives | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


@router.post("/v1/completions")
async def complete(body: CompletionRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """Continue one prompt, or several."""
    asks = await read_ask(request, to_asks, body, salt)
    if not body.stream:
        answers = await cancel_on_disconnect(request, _complete_all(asks, service))
        return JSONResponse(write_whole(answers, body))
    first = await cancel_on_disconnect(request, _open_first(asks, service), Answer.close)
    return ClosingStream(write_events(first, asks[1:], body, service), EVENT_STREAM, first.close)


def to_asks(body: CompletionRequest, salt: str) -> list[Ask]:
    """One ask for each prompt. Raises RequestError for fields that are not supported, or not together."""
    if body.max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens is 0, and must be at least 1 unless echo is true")
    if body.echo and body.suffix:
        raise RequestError("echo is not supported together with suffix: send one of them")
    if body.best_of is not None and body.best_of > (body.n or 1):
        asked = f"best_of is {body.best_of} and n is {body.n or 1}"
        raise RequestError(f"{asked}: choosing among answers is not supported, so best_of may be at most n")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = body.params(max_tokens, logprobs=body.logprobs)
    prompts = wire.read_texts(body.prompt, "prompt", MAX_PROMPTS)
    if body.suffix and not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("suffix needs a prompt that is a text, and this one has token ids")
    num_answers = len(prompts) * (body.n or 1)
    if num_answers > MAX_ANSWERS:
        asked = f"n is {body.n} for {len(prompts):,} prompts, so that the request has {num_answers:,} answers"
        raise RequestError(f"{asked}, and may have {MAX_ANSWERS:,}")
    return [
        Ask(
            model=body.model,
            text=prompt if isinstance(prompt, str) else None,
            ids=None if isinstance(prompt, str) else prompt,
            params=params,
            unset=body.unset(),
            num_choices=body.n or 1,
            echoes=bool(body.echo),
            scores_prompt=bool(body.echo) and body.logprobs is not None,
            suffix=body.suffix or None,
            salt=salt,
        )
        for prompt in prompts
    ]


async def _open_first(asks: Sequence[Ask], service: Service) -> Answer:
    """The answer to the first prompt. Raises for any prompt that does not fit, while an error status can still be sent."""
    for ask in asks[1:]:
        await service.tokens.require_fit(ask)
    return await service.open(asks[0])


async def _complete_all(asks: Sequence[Ask], service: Service) -> list[Answered]:
    """All answers. The first failure ends all of them."""
    return await gather([partial(service.complete, ask) for ask in asks], PROMPTS_AT_ONCE)


def write_whole(answers: Sequence[Answered], body: CompletionRequest) -> dict[str, Any]:
    choices = [
        _write_choice(number * (body.n or 1) + finished.choice, finished, each, body)
        for number, each in enumerate(answers)
        for finished in each.choices
    ]
    head = wire.ResponseHead("cmpl-", body.model, answers[0].started.digest)
    return head.write(KIND, choices, usage=wire.count(*(each.choices for each in answers)).write())


def _write_choice(index: int, finished: Finished, answered: Answered, body: CompletionRequest) -> dict[str, Any]:
    echo = answered.started.echo or EchoedPrompt("")
    logprobs = None
    if body.logprobs is not None:
        own = LogprobList(len(echo.text)).write(finished.logprobs)
        before = _write_logprobs(echo.tokens, answered.choices[0].prompt_logprobs, echo.offsets)
        logprobs = {name: before[name] + own[name] for name in own}
    text = echo.text + finished.thinking + finished.text
    return {"index": index, "text": text, "logprobs": logprobs, **wire.write_finish(finished)}


def _write_logprobs(tokens: Sequence[bytes], scores: Sequence[ScoredToken], offsets: Sequence[int]) -> dict[str, list[Any]]:
    """Tokens and their log-probabilities side by side. The first token of a prompt has none."""
    unscored = [None] * (len(tokens) - len(scores))
    return {
        "tokens": [_name(each) for each in tokens],
        "token_logprobs": [*unscored, *(max(each.logprob, wire.LEAST_LOGPROB) for each in scores)],
        "top_logprobs": [*unscored, *map(_write_alternatives, scores)],
        "text_offset": list(offsets),
    }


def _write_alternatives(token: ScoredToken) -> dict[str, float]:
    """The likeliest tokens, and always the chosen one."""
    return {_name(each.data): max(each.logprob, wire.LEAST_LOGPROB) for each in (*token.top, token)}


def _name(data: bytes) -> str:
    """The text of a token. A token that is part of a character is written as bytes, so that tokens stay distinct."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class LogprobList:
    """Writes the log-probabilities of one choice, whose text begins `start` characters into that of the answer."""

    def __init__(self, start: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = start  # of the characters that are complete

    def write(self, logprobs: Sequence[ScoredToken]) -> dict[str, list[Any]]:
        offsets = []
        for each in logprobs:  # a token within a character begins where the character does
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(each.data))
        return _write_logprobs([each.data for each in logprobs], logprobs, offsets)


async def write_events(first: Answer, others: Sequence[Ask], body: CompletionRequest, service: Service) -> Pieces:
    """The answers as server-sent events, one prompt after the other. Closes each answer."""
    head = wire.ResponseHead("cmpl-", body.model, first.started.digest)
    usage: dict[str, Any] = {"usage": None} if body.has_usage_chunk else {}
    answers: list[list[Finished]] = []
    try:
        for number in range(1 + len(others)):
            answer = first if number == 0 else await service.open(others[number - 1])
            writer = _PieceWriter(answer, number * (body.n or 1))
            answers.append([])
            try:
                async for event in answer:
                    if isinstance(event, PromptProgress):
                        if comment := progress_comment(event):
                            yield comment
                        continue
                    if isinstance(event, Finished):
                        answers[-1].append(event)
                    for piece in writer.add(event):
                        yield sse(head.write(KIND, [piece], **usage))
            finally:
                answer.close()
    except Exception as error:  # the status is sent already: the error becomes an event
        yield sse(wire.format_error(to_http_error(error)))
        return
    if body.has_usage_chunk:
        yield sse(head.write(KIND, [], usage=wire.count(*answers).write()))
    yield wire.DONE


class _PieceWriter:
    """Writes the pieces of one answer. A prompt that is repeated comes first; choices wait until all of it is scored."""

    def __init__(self, answer: Answer, first_index: int) -> None:
        self._first_index = first_index
        self._num_choices = answer.ask.num_choices
        self._echo = answer.started.echo
        self._num_scored = max(0, len(self._echo.tokens) - 1) if self._echo else 0
        self._scores: list[ScoredToken] = []
        self._waiting: list[Delta | Finished] = []
        start = len(self._echo.text) if self._echo else 0
        self._logprobs = [LogprobList(start) for _ in range(self._num_choices)]

    def add(self, event: Delta | Finished) -> Iterator[dict[str, Any]]:
        self._waiting.append(event)
        self._scores += event.prompt_logprobs if isinstance(event, Delta) else ()
        if len(self._scores) < self._num_scored:
            return
        echo, self._echo = self._echo, None  # once
        if echo is not None:
            logprobs = _write_logprobs(echo.tokens, self._scores, echo.offsets) if echo.tokens else None
            for choice in range(self._num_choices):
                yield _write_piece(self._first_index + choice, echo.text, logprobs)
        for each in self._waiting:
            index = self._first_index + each.choice
            if isinstance(each, Finished):
                yield _write_piece(index, "") | wire.write_finish(each)
            elif (text := each.thinking + each.text) or each.logprobs:
                logprobs = self._logprobs[each.choice].write(each.logprobs) if each.logprobs else None
                yield _write_piece(index, text, logprobs)
        self._waiting.clear()


def _write_piece(index: int, text: str, logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
