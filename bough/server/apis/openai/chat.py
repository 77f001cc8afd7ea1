"""OpenAI's chat completions: messages in, one or more choices out, whole or as server-sent events.

Always true of a stream: one id; each choice begins with its role and has one finish reason; `[DONE]` ends it, unless it
failed half-way: then the last event is the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response

from bough.errors import RequestError
from bough.models.chat.messages import check_messages
from bough.prompting.ask import Ask
from bough.server.apis.answering import SaltOf, ServiceOf, answer_ask, progress_comment, write_logprobs
from bough.server.apis.openai import wire
from bough.server.http import bounds
from bough.server.http.errors import to_http_error
from bough.server.http.json_routes import Wire, read_ask, route_class
from bough.server.http.streaming import EventFrame, Pieces, sse, to_json
from bough.server.serving.answer import Answer, Answered, Delta, Event, Finished, PromptProgress, ScoredToken
from bough.types import Message, ToolCall

router = APIRouter(route_class=route_class(wire.format_error), tags=["OpenAI"])

WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"


class EarlierFunction(Wire):
    """The function of an earlier call, with its arguments as JSON text."""

    name: str
    arguments: str


class EarlierCall(Wire):
    """A tool call that an assistant made earlier in the conversation."""

    id: str = ""
    function: EarlierFunction


class OpenAIMessage(Wire):
    """One message. `check_messages` checks its content, as for every API."""

    role: str
    content: Any = None
    tool_calls: Annotated[list[EarlierCall], bounds.FAIL_FAST, bounds.at_most(bounds.MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class ResponseFormat(Wire):
    """Text, any JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: wire.Schema | None = None


class OpenAIChatRequest(wire.Sampling):
    """The body of a chat. Other fields are accepted and ignored."""

    messages: Annotated[list[OpenAIMessage], bounds.FAIL_FAST, bounds.at_most(bounds.MAX_MESSAGES)]
    max_tokens: wire.NumTokens | None = None
    max_completion_tokens: wire.NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: wire.NumAlternatives | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[dict[str, Any]], bounds.FAIL_FAST, bounds.at_most(bounds.MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None


@router.post("/v1/chat/completions")
async def chat(body: OpenAIChatRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """Answer a chat."""
    ask = await read_ask(request, to_ask, body, salt)
    return await answer_ask(request, service, ask, body, write_whole, write_events)


def to_ask(body: OpenAIChatRequest, salt: str) -> Ask:
    """The ask of a body. Raises RequestError for a field that is not supported."""
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    tools = body.tools or []
    wire.check_tools(tools)
    if body.top_logprobs and not body.logprobs:
        raise RequestError(f"top_logprobs is {body.top_logprobs}, and needs logprobs to be true")
    num_alternatives = (body.top_logprobs or 0) if body.logprobs else None
    wanted = body.response_format or ResponseFormat(type="text")
    schema, strict = (wanted.json_schema.schema_, wanted.json_schema.strict) if wanted.json_schema else (None, None)
    answer_format = wire.read_format(wanted.type, schema, strict, "response_format.json_schema")
    return Ask(
        model=body.model,
        messages=read_messages(body.messages),
        params=body.params(max_tokens, logprobs=num_alternatives, format=answer_format),
        unset=body.unset(),
        tools=tools,
        tool_choice=wire.choose_tool(body.tool_choice, tools, body.parallel_tool_calls),
        counts_thinking=not body.stream or body.has_usage_chunk,
        num_choices=body.n or 1,
        salt=salt,
    )


def read_messages(messages: Sequence[OpenAIMessage]) -> list[Message]:
    """The messages for templates: arguments become objects, and tool results get the name of their tool."""
    names: dict[str, str] = {}
    wire.check_arguments((call.function.arguments for each in messages for call in each.tool_calls or ()), "messages")
    return check_messages([_read_message(f"messages[{i}]", message, names) for i, message in enumerate(messages)])


def _read_message(place: str, message: OpenAIMessage, names: dict[str, str]) -> Message:
    if isinstance(message.content, list):
        bounds.check_length(message.content, f"{place}.content", bounds.MAX_CONTENT_PARTS)
    plain: Message = {"role": message.role, "content": message.content}
    if message.role == "tool":
        if message.tool_call_id is None:
            raise RequestError(f"{place}.tool_call_id is missing, and a tool's message must have it")
        name = names.get(message.tool_call_id, message.name)
        return {**plain, "tool_call_id": message.tool_call_id, **({"name": name} if name else {})}
    if message.role == "assistant" and message.reasoning_content:
        plain["reasoning_content"] = message.reasoning_content
    if message.role == "assistant" and message.tool_calls:
        calls = plain["tool_calls"] = []
        for i, call in enumerate(message.tool_calls):
            names[call.id] = name = call.function.name
            arguments = wire.read_arguments(call.function.arguments, f"{place}.tool_calls[{i}].function.arguments")
            calls.append({"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}})
    return plain


def write_whole(answered: Answered, body: OpenAIChatRequest) -> dict[str, Any]:
    head = wire.ResponseHead("chatcmpl-", body.model, answered.started.digest)
    choices = [_write_choice(each, body) for each in answered.choices]
    return head.write(WHOLE, choices, usage=wire.count(answered.choices).write())


def _write_choice(finished: Finished, body: OpenAIChatRequest) -> dict[str, Any]:
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
        **wire.write_finish(finished),
    }


def _write_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": to_json(call.arguments)}}


def _write_logprobs(logprobs: Sequence[ScoredToken]) -> dict[str, Any]:
    return {"content": write_logprobs(logprobs, wire.LEAST_LOGPROB), "refusal": None}


async def write_events(answer: Answer, body: OpenAIChatRequest) -> Pieces:
    stream = ChatStream(answer, body)
    for number in range(answer.ask.num_choices):
        yield stream.chunk(number, {"role": "assistant", "content": ""})
    try:
        async for events in answer.batches():
            if piece := "".join([stream.write(event) for event in events]):
                yield piece
    except Exception as error:  # the status is sent already: the error becomes an event
        yield sse(wire.format_error(to_http_error(error)))
        return
    if body.has_usage_chunk:
        yield stream.usage()
    yield wire.DONE


class ChatStream:
    """Writes the chunks of one streamed answer, and collects the usage for its end."""

    def __init__(self, answer: Answer, body: OpenAIChatRequest) -> None:
        self._body = body
        self._head = wire.ResponseHead("chatcmpl-", body.model, answer.started.digest)
        self._usage: dict[str, Any] = {"usage": None} if body.has_usage_chunk else {}
        self._finished: list[Finished] = []
        self._num_calls = [0] * answer.ask.num_choices
        self._frames: dict[int, EventFrame] = {}  # of chunks that are nothing but text, by choice

    def write(self, event: Event) -> str:
        """What an event adds to the stream; may be empty."""
        if isinstance(event, PromptProgress):
            return progress_comment(event)
        if isinstance(event, Finished):
            self._finished.append(event)
            return self.chunk(event.choice, {}, **wire.write_finish(event))
        if not event.text or event.thinking or event.tool_calls or event.logprobs:
            return self._write_delta(event)
        frame = self._frames.get(event.choice)
        if frame is None:
            frame = self._frames[event.choice] = EventFrame(lambda text: self.chunk(event.choice, {"content": text}))
        return frame.fill(event.text)

    def _write_delta(self, delta: Delta) -> str:
        written: dict[str, Any] = {}
        if delta.thinking:
            written["reasoning_content"] = delta.thinking
        if delta.text or (delta.logprobs and self._body.logprobs):
            written["content"] = delta.text
        if delta.tool_calls:
            start = self._num_calls[delta.choice]
            self._num_calls[delta.choice] += len(delta.tool_calls)
            written["tool_calls"] = [{"index": i, **_write_call(call)} for i, call in enumerate(delta.tool_calls, start)]
        return self.chunk(delta.choice, written, delta.logprobs) if written else ""

    def usage(self) -> str:
        """The chunk without choices that has the usage of all of them."""
        return sse(self._head.write(CHUNK, [], usage=wire.count(self._finished).write()))

    def chunk(self, number: int, delta: dict[str, Any], logprobs: Sequence[ScoredToken] = (), **end: Any) -> str:
        written = _write_logprobs(logprobs) if self._body.logprobs and logprobs else None
        choice = {"index": number, "delta": delta, "logprobs": written, "finish_reason": None, **end}
        return sse(self._head.write(CHUNK, [choice], **self._usage))
