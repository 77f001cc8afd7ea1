"""OpenAI's chat completions: messages in, one or more choices out, whole or as server-sent events.

Always true of a stream: one id; each choice begins with its role and has one finish reason; `[DONE]` ends it, unless it
failed half-way: then the last event is the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from bough.errors import RequestError
from bough.models.chat.messages import check_messages
from bough.server.apis.openai.wire import (
    DONE,
    NumAlternatives,
    NumTokens,
    ResponseHead,
    Sampling,
    Schema,
    check_arguments,
    check_tools,
    choose_tool,
    count,
    error_event,
    format_error,
    progress_comment,
    read_arguments,
    write_finish,
    write_logprobs,
)
from bough.server.http.bounds import (
    FAIL_FAST,
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    at_most,
    check_length,
)
from bough.server.http.streaming import EVENT_STREAM, AnswerStream, EventFrame, cancel_on_disconnect, sse, to_json
from bough.server.http.wire import SaltOf, ServiceOf, Wire, route_class
from bough.server.serving.answer import Answer
from bough.server.serving.ask import Answered, Ask, Delta, Event, Finished, Progress, ScoredToken
from bough.types import Message, ToolCall

router = APIRouter(route_class=route_class(format_error), tags=["OpenAI"])

WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"


class EarlierFunction(Wire):
    """The function of an earlier call, with its arguments as JSON text."""

    name: str
    arguments: str


class EarlierCall(Wire):
    """A tool call that an assistant made earlier in the conversation."""

    id: str = ""
    function: EarlierFunction


class ChatMessage(Wire):
    """One message. `check_messages` checks its content, as for every API."""

    role: str
    content: Any = None
    tool_calls: Annotated[list[EarlierCall], FAIL_FAST, at_most(MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class ResponseFormat(Wire):
    """Text, any JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


class ChatRequest(Sampling):
    """The body of a chat. Other fields are accepted and ignored."""

    messages: Annotated[list[ChatMessage], FAIL_FAST, at_most(MAX_MESSAGES)]
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumAlternatives | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], FAIL_FAST, at_most(MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """Answer a chat."""
    ask = await asyncio.to_thread(to_ask, body, salt)
    if not body.stream:
        answered = await cancel_on_disconnect(request, service.complete(ask))
        return JSONResponse(write_whole(answered, body))
    answer = await cancel_on_disconnect(request, service.open(ask))
    return AnswerStream(answer, write_events(answer, body), EVENT_STREAM)


def to_ask(body: ChatRequest, salt: str) -> Ask:
    """The ask of a body. Raises RequestError for what is not supported."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tools = body.tools or []
    check_tools(tools)
    return Ask(
        model=body.model,
        messages=read_messages(body.messages),
        params=body.params(max_tokens, logprobs=_num_alternatives(body), format=_format_of(body.response_format)),
        unset=body.unset(),
        tools=tools,
        tool_choice=choose_tool(body.tool_choice, tools, body.parallel_tool_calls),
        counts_thinking=not body.stream or body.has_usage_chunk,
        num_choices=body.n or 1,
        salt=salt,
    )


def _num_alternatives(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError(f"top_logprobs is {body.top_logprobs}, and needs logprobs to be true")
    return None


def _format_of(wanted: ResponseFormat | None) -> str | dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return "json"
    if wanted.json_schema is None:
        raise RequestError("response_format.json_schema is missing, and the type is json_schema")
    return wanted.json_schema.schema_


def read_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """The messages for templates: arguments become objects, and tool results get the name of their tool."""
    names: dict[str, str] = {}
    check_arguments((call.function.arguments for each in messages for call in each.tool_calls or ()), "messages")
    found = [_read_message(number, message, names) for number, message in enumerate(messages)]
    return check_messages(found)


def _read_message(number: int, message: ChatMessage, names: dict[str, str]) -> Message:
    if isinstance(message.content, list):
        check_length(message.content, f"messages[{number}].content", MAX_CONTENT_PARTS)
    plain: Message = {"role": message.role, "content": message.content}
    if message.role == "tool":
        if message.tool_call_id is None:
            raise RequestError(f"messages[{number}].tool_call_id is missing, and a tool's message must have it")
        name = names.get(message.tool_call_id, message.name)
        return {**plain, "tool_call_id": message.tool_call_id, **({"name": name} if name else {})}
    if message.role == "assistant" and message.reasoning_content:
        plain["reasoning_content"] = message.reasoning_content
    if message.role == "assistant" and message.tool_calls:
        plain["tool_calls"] = [_read_call(number, i, call) for i, call in enumerate(message.tool_calls)]
        names.update((call.id, call.function.name) for call in message.tool_calls)
    return plain


def _read_call(number: int, i: int, call: EarlierCall) -> dict[str, Any]:
    arguments = read_arguments(call.function.arguments, f"messages[{number}].tool_calls[{i}].function.arguments")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def write_whole(answered: Answered, body: ChatRequest) -> dict[str, Any]:
    """The whole answer as one object."""
    head = ResponseHead.make("chatcmpl-", body.model, answered.started.digest)
    choices = [_write_choice(each, body) for each in answered.choices]
    return head.write(WHOLE, choices, usage=count(answered.choices).write())


def _write_choice(finished: Finished, body: ChatRequest) -> dict[str, Any]:
    content = None if finished.tool_calls and not finished.text else finished.text
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if finished.thinking:
        message["reasoning_content"] = finished.thinking
    if finished.tool_calls:
        message["tool_calls"] = [_write_call(call) for call in finished.tool_calls]
    return {
        "index": finished.choice,
        "message": message,
        "logprobs": _write_logprobs(finished.logprobs) if body.logprobs else None,
        **write_finish(finished),
    }


def _write_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": to_json(call.arguments)}}


def _write_logprobs(logprobs: Sequence[ScoredToken]) -> dict[str, Any]:
    return {"content": write_logprobs(logprobs), "refusal": None}


async def write_events(answer: Answer, body: ChatRequest) -> AsyncIterator[str]:
    """The answer as server-sent events, in the order in which its pieces come."""
    stream = ChatStream(answer, body)
    for number in range(answer.ask.num_choices):
        yield stream.chunk(number, {"role": "assistant", "content": ""})
    try:
        async for events in answer.batches():
            if piece := "".join([stream.write(event) for event in events]):
                yield piece
    except Exception as error:  # the status is sent already: the error becomes an event
        yield error_event(error)
        return
    if body.has_usage_chunk:
        yield stream.usage()
    yield DONE


class ChatStream:
    """Writes the chunks of one streamed answer, and collects the usage for its end."""

    def __init__(self, answer: Answer, body: ChatRequest) -> None:
        self._body = body
        self._head = ResponseHead.make("chatcmpl-", body.model, answer.started.digest)
        self._usage: dict[str, Any] = {"usage": None} if body.has_usage_chunk else {}
        self._finished: list[Finished] = []
        self._num_calls = [0] * answer.ask.num_choices
        self._frames: dict[int, EventFrame] = {}  # of chunks that are nothing but text, by choice

    def write(self, event: Event) -> str:
        """What an event adds to the stream; may be empty."""
        if isinstance(event, Delta):
            is_text = event.text and not (event.thinking or event.tool_calls or event.logprobs)
            return self._add_text(event) if is_text else self.add(event)
        return progress_comment(event) if isinstance(event, Progress) else self.finish(event)

    def _add_text(self, delta: Delta) -> str:
        frame = self._frames.get(delta.choice)
        if frame is None:
            frame = self._frames[delta.choice] = EventFrame(lambda text: self.chunk(delta.choice, {"content": text}))
        return frame.fill(delta.text)

    def add(self, delta: Delta) -> str:
        """The chunk for a piece of a choice; empty if it has nothing to show."""
        written: dict[str, Any] = {}
        if delta.thinking:
            written["reasoning_content"] = delta.thinking
        if delta.text or (delta.logprobs and self._body.logprobs):
            written["content"] = delta.text
        if delta.tool_calls:
            written["tool_calls"] = self._write_calls(delta)
        return self.chunk(delta.choice, written, logprobs=delta.logprobs) if written else ""

    def _write_calls(self, delta: Delta) -> list[dict[str, Any]]:
        start = self._num_calls[delta.choice]
        self._num_calls[delta.choice] += len(delta.tool_calls)
        return [{"index": start + i, **_write_call(call)} for i, call in enumerate(delta.tool_calls)]

    def finish(self, finished: Finished) -> str:
        """The last chunk of a choice."""
        self._finished.append(finished)
        return self.chunk(finished.choice, {}, **write_finish(finished))

    def usage(self) -> str:
        """The chunk without choices that has the usage of all of them."""
        return sse(self._head.write(CHUNK, [], usage=count(self._finished).write()))

    def chunk(
        self,
        number: int,
        delta: dict[str, Any],
        *,
        logprobs: Sequence[ScoredToken] = (),
        finish_reason: str | None = None,
        **details: Any,
    ) -> str:
        written = _write_logprobs(logprobs) if self._body.logprobs and logprobs else None
        choice = {"index": number, "delta": delta, "logprobs": written, "finish_reason": finish_reason, **details}
        return sse(self._head.write(CHUNK, [choice], **self._usage))
