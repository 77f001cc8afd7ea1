"""Ollama's API for answers: /api/chat and /api/generate.

Always true of an answer:
- it streams one JSON object per line, unless the client asked not to;
- only the last object has counts and durations, in whole numbers and nanoseconds;
- a request is refused before the first line.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from bough.errors import RequestError
from bough.server.apis.ollama.wire import AnswerRequest, ChatRequest, GenerateRequest, nanoseconds, write_time
from bough.server.http.errors import format_plain_error, to_http_error
from bough.server.http.streaming import NDJSON, AnswerStream, EventFrame, cancel_on_disconnect, json_line
from bough.server.http.wire import SaltOf, ServiceOf, route_class
from bough.server.serving.answer import Answer
from bough.server.serving.ask import Ask, Delta, Event, Finished, ScoredToken, Started
from bough.server.serving.service import Service
from bough.types import Message, ToolCall

router = APIRouter(route_class=route_class(format_plain_error), tags=["Ollama"])


@router.post("/api/chat")
async def chat(body: ChatRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """The next message of a conversation."""
    writer = LineWriter(body.model, write_chat)
    if not body.messages:
        return await _load(body, service, writer)
    for number, message in enumerate(body.messages):
        body.refuse_images(message.images, f"messages[{number}]")
    messages = [message.to_message() for message in body.messages]
    tools = body.tools or ()
    ask = replace(body.to_ask(salt), messages=messages, tools=tools, needs_tool_template=bool(tools))
    return await _answer(body, ask, writer, request, service)


@router.post("/api/generate")
async def generate(body: GenerateRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """What follows a prompt."""
    body.check()
    writer = LineWriter(body.model, write_response)
    if not body.prompt and not body.suffix:
        return await _load(body, service, writer)
    ask = body.to_ask(salt)
    await _check_thinking(ask, service)
    if body.suffix:
        ask = replace(ask, text=body.prompt or "", suffix=body.suffix, truncates=False)
        return await _answer(body, ask, writer, request, service)
    if body.raw:
        return await _answer(body, replace(ask, text=body.prompt), writer, request, service)
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages: list[Message] = [*system, {"role": "user", "content": body.prompt}]
    ask = replace(ask, messages=messages, context=body.context or (), may_lack_template=True)
    return await _answer(body, ask, replace(writer, gives_context=True), request, service)


async def _check_thinking(ask: Ask, service: Service) -> None:
    """Raise RequestError if thinking is asked of a model that does not support it, with any kind of prompt."""
    if ask.think:
        entry = await asyncio.to_thread(service.catalog.find, ask.model)
        if "thinking" not in entry.capabilities:
            raise RequestError(f'"{ask.model}" does not support thinking')


async def _load(body: AnswerRequest, service: Service, writer: LineWriter) -> Response:
    """Answer a request without a prompt: it loads the model, or unloads it if keep_alive is 0."""
    if body.unloads:
        await service.unload(body.model)
    else:
        await service.load(body.model, body.keep_alive)
    reason = "unload" if body.unloads else "load"
    return JSONResponse({**writer.write(), "done": True, "done_reason": reason})


async def _answer(body: AnswerRequest, ask: Ask, writer: LineWriter, request: Request, service: Service) -> Response:
    if body.streams:
        answer = await cancel_on_disconnect(request, service.open(ask))
        return AnswerStream(answer, write_lines(answer, writer), NDJSON)
    answered = await cancel_on_disconnect(request, service.complete(ask))
    (finished,) = answered.choices
    said = writer.write(finished.text, finished.thinking, finished.tool_calls, finished.logprobs)
    return JSONResponse({**said, **writer.end(finished, answered.started)})


async def write_lines(answer: Answer, writer: LineWriter) -> AsyncIterator[str]:
    """The lines of a stream. An error on the way is the last line."""
    frame = EventFrame(lambda time, text: json_line({**writer.write(text, at=time), "done": False}), num_texts=2)
    try:
        async for events in answer.batches():
            if piece := "".join([_write_event(event, writer, frame, answer.started) for event in events]):
                yield piece
    except Exception as error:
        yield json_line(format_plain_error(to_http_error(error)))


def _write_event(event: Event, writer: LineWriter, frame: EventFrame, started: Started) -> str:
    """The line of an event; "" if it has none. The frame is that of lines that are nothing but text."""
    if isinstance(event, Finished):
        return json_line({**writer.write(), **writer.end(event, started)})
    if not isinstance(event, Delta):
        return ""
    if event.thinking or event.tool_calls or event.logprobs:
        said = writer.write(event.text, event.thinking, event.tool_calls, event.logprobs)
        return json_line({**said, "done": False})
    return frame.fill(write_time(datetime.now(UTC)), event.text) if event.text else ""


@dataclass(frozen=True)
class LineWriter:
    """Writes the lines of one answer. It is made when the request comes, and measures from then on."""

    model: str
    wrap: Callable[[dict[str, Any]], dict[str, Any]]  # puts the message into an object as the endpoint does
    gives_context: bool = False  # the ids of prompt and answer, for the client to send back
    began_s: float = field(default_factory=time.perf_counter)

    def write(
        self,
        text: str = "",
        thinking: str = "",
        tool_calls: Sequence[ToolCall] = (),
        logprobs: Sequence[ScoredToken] = (),
        at: str = "",
    ) -> dict[str, Any]:
        """An object with a piece of the answer, or with all of it, that was written at this time; "" means now."""
        said: dict[str, Any] = {"content": text}
        if thinking:
            said["thinking"] = thinking
        if tool_calls:
            said["tool_calls"] = [_write_call(number, call) for number, call in enumerate(tool_calls)]
        written = {"model": self.model, "created_at": at or write_time(datetime.now(UTC)), **self.wrap(said)}
        if logprobs:
            written["logprobs"] = [_write_logprob(each) for each in logprobs]
        return written

    def end(self, finished: Finished, started: Started) -> dict[str, Any]:
        """The other fields of the last object: why the answer ended, counts and durations."""
        usage, timings = finished.completion.usage, finished.completion.timings
        reason = "stop" if finished.finish_reason == "tool_calls" else finished.finish_reason
        context = {"context": [*started.prompt_ids, *finished.completion.token_ids]} if self.gives_context else {}
        return {
            **context,
            "done": True,
            "done_reason": reason,
            "total_duration": nanoseconds(time.perf_counter() - self.began_s),
            "load_duration": nanoseconds(started.load_s),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_cached_count": usage.cached_tokens,
            "prompt_eval_duration": nanoseconds(timings.prefill_s),
            "eval_count": usage.completion_tokens or int(reason == "stop"),  # at least the token that ended it
            "eval_duration": nanoseconds(timings.decode_s),
        }


def write_chat(said: dict[str, Any]) -> dict[str, Any]:
    return {"message": {"role": "assistant", **said}}


def write_response(said: dict[str, Any]) -> dict[str, Any]:
    content = said.pop("content")
    return {"response": content, **said}


def _write_call(number: int, call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"index": number, "name": call.name, "arguments": call.arguments}}


def _write_logprob(token: ScoredToken) -> dict[str, Any]:
    return {**_write_token(token), "top_logprobs": [_write_token(each) for each in token.top]}


def _write_token(token: ScoredToken) -> dict[str, Any]:
    return {"token": token.data.decode("utf-8", "replace"), "logprob": token.logprob, "bytes": list(token.data)}
