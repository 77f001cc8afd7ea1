"""Anthropic's API: messages in, one message of content blocks out, whole or as server-sent events.

Always true of a stream: the name of an event is the type of its data; blocks do not overlap, each is started, filled and
stopped; `message_stop` ends it, unless it failed half-way: then the last event is the error. Always true of usage: input,
cache read and cache creation together are the prompt, the same number that `count_tokens` gives.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from bough.prompting.ask import Ask
from bough.server.apis.answering import SaltOf, ServiceOf, answer_ask, progress_comment
from bough.server.apis.anthropic.wire import CountRequest, MessagesRequest, to_ask
from bough.server.http.errors import HttpError, to_http_error
from bough.server.http.json_routes import read_ask, route_class
from bough.server.http.streaming import Pieces, cancel_on_disconnect, sse, to_json
from bough.server.logs import current_trace
from bough.server.serving.answer import Answer, Answered, Delta, Finished, PromptProgress
from bough.server.serving.service import Service
from bough.types import ToolCall, Usage

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "loop": "max_tokens", "tool_calls": "tool_use"}

Json = dict[str, Any]


def format_error(http_error: HttpError) -> Json:
    """The body of an error in Anthropic's API. Coding agents shorten a chat when they find the words about its length."""
    kind = _KINDS.get(http_error.status, "api_error" if http_error.status >= 500 else "invalid_request_error")
    trace = current_trace.get()
    text = f"prompt is too long: {http_error.text}" if http_error.code == "context_length_exceeded" else http_error.text
    error = {"type": "error", "error": {"type": kind, "message": text}}
    return {**error, "request_id": trace.request_id} if trace else error


router = APIRouter(route_class=route_class(format_error), tags=["Anthropic"])


@router.post("/v1/messages")
async def create_message(body: MessagesRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """Answer a conversation."""
    return await answer_ask(request, service, await _ask_of(body, request, service, salt), body, write_whole, write_events)


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """Count the tokens of a prompt, without answering it."""
    count = await cancel_on_disconnect(request, service.tokens.count(await _ask_of(body, request, service, salt)))
    return JSONResponse({"input_tokens": count})


async def _ask_of(body: CountRequest, request: Request, service: Service, salt: str) -> Ask:
    """The ask of a body. Thinking is asked only of models that support it: others would refuse the request."""
    think: bool | None = False
    if body.shows_thinking:
        entry = await asyncio.to_thread(service.catalog.find, body.model)
        think = True if "thinking" in entry.capabilities else None
    return await read_ask(request, to_ask, body, salt, think=think)


def write_whole(answered: Answered, body: MessagesRequest) -> Json:
    """The whole answer as one message. An empty answer has one empty text, which clients expect."""
    finished, content = answered.choices[0], []
    if finished.thinking and body.shows_thinking:
        content.append({"type": "thinking", "thinking": finished.thinking, "signature": ""})
    if finished.text or not finished.tool_calls:
        content.append({"type": "text", "text": finished.text})
    content += [_write_call(call, call.arguments) for call in finished.tool_calls]
    return _write_message(body.model, write_usage(finished.completion.usage), content=content, **_write_end(finished))


def _write_message(model: str, usage: Json, **more: Any) -> Json:
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}
    return {**head, "content": [], "stop_reason": None, "stop_sequence": None, **more, "usage": usage}


def write_usage(usage: Usage) -> Json:
    """Token counts. Cached tokens are not part of the input; there is no separate count of stored tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _write_call(call: ToolCall, arguments: Json) -> Json:
    call_id = f"toolu_{call.id.removeprefix('call_')}"
    return {"type": "tool_use", "id": call_id, "name": call.name, "input": arguments}


def _write_end(finished: Finished) -> Json:
    """Why the answer ended, and by which stop sequence. One that repeated itself was cut off, and the details say why."""
    stop = finished.completion.stop
    if stop is not None and finished.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    details = {"type": "loop", "cycle_tokens": finished.completion.cycle_tokens}
    more = {"stop_details": details} if finished.finish_reason == "loop" else {}
    return {"stop_reason": _REASONS[finished.finish_reason], "stop_sequence": None, **more}


async def write_events(answer: Answer, body: MessagesRequest) -> Pieces:
    stream = MessageStream(shows_thinking=body.shows_thinking)
    yield _event("message_start", message=_write_message(body.model, write_usage(answer.started.usage)))
    try:
        async for event in answer:
            if isinstance(event, PromptProgress):
                if comment := progress_comment(event):
                    yield comment
            else:
                for piece in stream.add(event) if isinstance(event, Delta) else stream.finish(event):
                    yield piece
    except Exception as error:  # the status is sent already: the error becomes an event
        yield sse(format_error(to_http_error(error)), "error")


class MessageStream:
    def __init__(self, *, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._open: str | None = None  # the type of the open block
        self._num_blocks = 0

    def add(self, delta: Delta) -> Iterator[str]:
        """The events for a piece of the answer; none if it has nothing to show."""
        if delta.thinking and self._shows_thinking:
            yield from self._enter({"type": "thinking", "thinking": "", "signature": ""})
            yield self._fill({"type": "thinking_delta", "thinking": delta.thinking})
        if delta.text:
            yield from self._enter({"type": "text", "text": ""})
            yield self._fill({"type": "text_delta", "text": delta.text})
        for call in delta.tool_calls:
            yield from self._leave()
            yield from self._enter(_write_call(call, {}))
            yield self._fill({"type": "input_json_delta", "partial_json": to_json(call.arguments)})
            yield from self._leave()

    def finish(self, finished: Finished) -> Iterator[str]:
        """The last events. A message without any content has one empty text."""
        if not self._num_blocks:
            yield from self._enter({"type": "text", "text": ""})
        yield from self._leave()
        yield _event("message_delta", delta=_write_end(finished), usage=write_usage(finished.completion.usage))
        yield _event("message_stop")

    def _enter(self, block: Json) -> Iterator[str]:
        """Start this block, unless one of its type is open."""
        if self._open == block["type"]:
            return
        yield from self._leave()
        self._open = block["type"]
        self._num_blocks += 1
        yield _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _fill(self, delta: Json) -> str:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _leave(self) -> Iterator[str]:
        if self._open == "thinking":
            yield self._fill({"type": "signature_delta", "signature": ""})
        if self._open is not None:
            self._open = None
            yield _event("content_block_stop", index=self._num_blocks - 1)


def _event(kind: str, **data: Any) -> str:
    return sse({"type": kind, **data}, kind)
