"""Ollama's API for answers and vectors: /api/chat, /api/generate, /api/embed, and the older /api/embeddings.

Always true of an answer: it streams one JSON object per line, unless the client asked not to; only the last object has
counts and durations, in whole numbers and nanoseconds; a request is refused before the first line.

Without a prompt or a text all of them load the model, or unload it if keep_alive is 0. Options have no effect on vectors.
/api/embeddings takes one text and does not normalise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from bough.errors import RequestError
from bough.prompting.ask import Ask
from bough.server.apis.answering import SaltOf, ServiceOf, open_answer, write_left_out, write_logprobs
from bough.server.apis.ollama import wire
from bough.server.apis.ollama.wire import nanoseconds, write_time
from bough.server.http.errors import format_plain_error, to_http_error
from bough.server.http.json_routes import route_class
from bough.server.http.streaming import NDJSON, ClosingStream, EventFrame, Pieces, cancel_on_disconnect, json_line
from bough.server.http.vectors import list_response, write_numbers
from bough.server.serving.answer import Answer, Delta, Event, Finished, Started
from bough.server.serving.service import Service
from bough.types import Message

router = APIRouter(route_class=route_class(format_plain_error), tags=["Ollama"])


@router.post("/api/chat")
async def chat(body: wire.OllamaChatRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
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
async def generate(body: wire.OllamaGenerateRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """What follows a prompt."""
    body.check()
    writer = LineWriter(body.model, write_response)
    if not body.prompt and not body.suffix:
        return await _load(body, service, writer)
    ask = body.to_ask(salt)
    if ask.think:
        entry = await asyncio.to_thread(service.catalog.find, ask.model)
        if "thinking" not in entry.capabilities:
            raise RequestError(f'"{ask.model}" does not support thinking')
    if body.suffix:
        ask = replace(ask, text=body.prompt or "", suffix=body.suffix, truncates=False)
    elif body.raw:
        ask = replace(ask, text=body.prompt)
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages: list[Message] = [*system, {"role": "user", "content": body.prompt}]
        ask = replace(ask, messages=messages, context=body.context or (), may_lack_template=True)
        writer = replace(writer, gives_context=True)
    return await _answer(body, ask, writer, request, service)


@router.post("/api/embed")
async def embed(body: wire.EmbedRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """The vectors of one text or of several, each of length 1."""
    began_s, ask = time.perf_counter(), body.to_ask(salt)
    if not ask.inputs:
        await cancel_on_disconnect(request, _load_or_unload(service, ask.model, ask.keep_alive_s))
        return JSONResponse({"model": ask.model, "embeddings": []})
    vectors = await cancel_on_disconnect(request, service.embeddings.embed(ask))
    fields: dict[str, Any] = {
        "model": ask.model,
        "total_duration": nanoseconds(time.perf_counter() - began_s),
        "load_duration": nanoseconds(vectors.load_s),
        "prompt_eval_count": vectors.num_tokens,
    }
    return list_response(fields, "embeddings", map(write_numbers, vectors))


@router.post("/api/embeddings")
async def embed_one(body: wire.OllamaEmbeddingsRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """The vector of one text, as the model gives it."""
    ask = body.to_ask(salt)
    if not ask.inputs:
        await cancel_on_disconnect(request, _load_or_unload(service, ask.model, ask.keep_alive_s))
        return JSONResponse({"embedding": []})
    (vector,) = await cancel_on_disconnect(request, service.embeddings.embed(ask))
    return Response(f'{{"embedding":{write_numbers(vector)}}}', media_type="application/json")


async def _load(body: wire.AnswerRequest, service: Service, writer: LineWriter) -> Response:
    await _load_or_unload(service, body.model, body.keep_alive)
    reason = "unload" if body.keep_alive == 0 else "load"
    return JSONResponse({**writer.write(Delta()), "done": True, "done_reason": reason})


async def _load_or_unload(service: Service, model: str, keep_alive_s: float | None) -> None:
    """Serve a request without a prompt: load the model, or unload it if `keep_alive_s` is 0."""
    if keep_alive_s == 0:
        await service.unload(model)
    else:
        await service.load(model, keep_alive_s)


async def _answer(body: wire.AnswerRequest, ask: Ask, writer: LineWriter, request: Request, service: Service) -> Response:
    if body.streams:
        answer = await open_answer(request, service, ask)
        return ClosingStream(write_lines(answer, writer), NDJSON, answer.close, write_left_out(answer.started))
    answered = await cancel_on_disconnect(request, service.complete(ask))
    (finished,) = answered.choices
    written = {**writer.write(finished), **writer.end(finished, answered.started)}
    return JSONResponse(written, headers=write_left_out(answered.started))


async def write_lines(answer: Answer, writer: LineWriter) -> Pieces:
    """The lines of a stream. An error on the way is the last line."""
    frame = EventFrame(lambda at, text: json_line({**writer.write(Delta(text=text), at), "done": False}), num_texts=2)
    try:
        async for events in answer.batches():
            if piece := "".join([_write_event(event, writer, frame, answer.started) for event in events]):
                yield piece
    except Exception as error:
        yield json_line(format_plain_error(to_http_error(error)))


def _write_event(event: Event, writer: LineWriter, frame: EventFrame, started: Started) -> str:
    """The line of an event; "" if it has none. `frame` is for lines that have text alone."""
    if isinstance(event, Finished):
        return json_line({**writer.write(Delta()), **writer.end(event, started)})
    if not isinstance(event, Delta):
        return ""
    if event.thinking or event.tool_calls or event.logprobs:
        return json_line({**writer.write(event), "done": False})
    return frame.fill(write_time(datetime.now(UTC)), event.text) if event.text else ""


@dataclass(frozen=True)
class LineWriter:
    """Writes the lines of one answer. It is made when the request arrives, and measures from then on."""

    model: str
    wrap: Callable[[dict[str, Any]], dict[str, Any]]  # puts the message into an object as the endpoint does
    gives_context: bool = False  # the ids of prompt and answer, for the client to send back
    began_s: float = field(default_factory=time.perf_counter)
    _numbers: Iterator[int] = field(default_factory=count)  # of the calls

    def write(self, piece: Delta | Finished, at: str = "") -> dict[str, Any]:
        """An object with a piece of the answer, or with all of it. `at` is the time of writing, now if it is ""."""
        said: dict[str, Any] = {"content": piece.text}
        if piece.thinking:
            said["thinking"] = piece.thinking
        if piece.tool_calls:
            said["tool_calls"] = [
                {"id": call.id, "function": {"index": next(self._numbers), "name": call.name, "arguments": call.arguments}}
                for call in piece.tool_calls
            ]
        written = {"model": self.model, "created_at": at or write_time(datetime.now(UTC)), **self.wrap(said)}
        if piece.logprobs:
            written["logprobs"] = write_logprobs(piece.logprobs)
        return written

    def end(self, finished: Finished, started: Started) -> dict[str, Any]:
        """The other fields of the last object: why the answer ended, what the prompt lacks, counts and durations."""
        usage, timings = finished.completion.usage, finished.completion.timings
        reason = "stop" if finished.finish_reason == "tool_calls" else finished.finish_reason
        context = {"context": [*started.prompt, *finished.completion.token_ids]} if self.gives_context else {}
        cut = {"text_cut": True} if started.left_out.is_text_cut else {}
        return {
            **context,
            "done": True,
            "done_reason": reason,
            "total_duration": nanoseconds(time.perf_counter() - self.began_s),
            "load_duration": nanoseconds(started.load_s),
            "messages_left_out": started.left_out.num_messages,
            **cut,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_cached_count": usage.cached_tokens,
            "prompt_eval_duration": nanoseconds(timings.prefill_s),
            "eval_count": usage.completion_tokens or int(reason == "stop"),  # at least the token that ended it
            "eval_duration": nanoseconds(timings.decode_s),
        }


def write_chat(said: dict[str, Any]) -> dict[str, Any]:
    return {"message": {"role": "assistant", **said}}


def write_response(said: dict[str, Any]) -> dict[str, Any]:
    return {"response": said.pop("content"), **said}
