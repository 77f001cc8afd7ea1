"""OpenAI's responses: items in, items out. Nothing is remembered between two requests but the tree.

Calls and thoughts of earlier turns come as items of their own; the template sees them in the assistant's message that they
belong to, as it would in a chat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from bough.errors import RequestError
from bough.models.chat.messages import check_messages
from bough.models.defaults import unset_names
from bough.server.apis.openai.items import ResponseWriter
from bough.server.apis.openai.wire import (
    Name,
    NumAlternatives,
    NumTokens,
    Temperature,
    TopP,
    check_arguments,
    check_tools,
    choose_tool,
    format_error,
    given_of,
    progress_comment,
    read_arguments,
    temperature_and_top_p,
)
from bough.server.http.bounds import (
    FAIL_FAST,
    MAX_CONTENT_PARTS,
    MAX_INCLUDES,
    MAX_MESSAGES,
    MAX_METADATA_CHARACTERS,
    MAX_METADATA_VALUES,
    MAX_TOOLS,
    SHORT_NAME,
    SMALL_SCHEMA,
    at_most,
    check_length,
    no_larger_than,
    show,
)
from bough.server.http.streaming import EVENT_STREAM, AnswerStream, cancel_on_disconnect, sse
from bough.server.http.wire import SaltOf, ServiceOf, Wire, route_class
from bough.server.serving.answer import Answer
from bough.server.serving.ask import Ask, Delta, Finished, Progress, Started
from bough.types import Message, SamplingParams, Tool

log = logging.getLogger(__name__)

router = APIRouter(route_class=route_class(format_error), tags=["OpenAI"])

LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_ROLES = ("system", "developer", "user", "assistant")
HOSTED_TOOLS = frozenset(
    (
        "code_interpreter",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "mcp",
        "namespace",
        "tool_search",
        "web_search",
        "web_search_preview",
    )
)
_STATEFUL = ("previous_response_id", "conversation", "prompt")


class TextFormat(Wire):
    """Text, any JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: Annotated[dict[str, Any], SMALL_SCHEMA] | None = Field(default=None, alias="schema")


class TextOptions(Wire):
    """The format of the text."""

    format: TextFormat | None = None


class ResponseRequest(Wire):
    """The body of a request for a response. Other fields are accepted and ignored."""

    model: Name
    input: Any
    instructions: str | None = None
    max_output_tokens: NumTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    tools: Annotated[list[dict[str, Any]], FAIL_FAST, at_most(MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[str], FAIL_FAST, at_most(MAX_INCLUDES)] | None = None
    top_logprobs: NumAlternatives | None = None
    metadata: Annotated[dict[str, Any], no_larger_than(MAX_METADATA_VALUES, MAX_METADATA_CHARACTERS)] | None = None
    user: Annotated[str, SHORT_NAME] | None = None
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None


@router.post("/v1/responses")
async def respond(body: ResponseRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """Answer with a response."""
    ask = await asyncio.to_thread(to_ask, body, salt)
    if body.stream:
        answer = await cancel_on_disconnect(request, service.open(ask))
        return AnswerStream(answer, write_events(answer, body), EVENT_STREAM)
    answered = await cancel_on_disconnect(request, service.complete(ask))
    return JSONResponse(write_whole(answered.started, answered.choices[0], body))


def to_ask(body: ResponseRequest, salt: str) -> Ask:
    """The ask of a body. Raises RequestError for what is not supported."""
    for field in _STATEFUL:
        if getattr(body, field) is not None:
            raise RequestError(f"{field} is not supported: the server keeps no responses; send the whole conversation")
    if body.background:
        raise RequestError("background is not supported: the server keeps no responses")
    tools = read_tools(body.tools or [])
    return Ask(
        model=body.model,
        messages=read_input(body.input, body.instructions),
        params=_params_of(body),
        unset=unset_names(given_of(body.temperature, body.top_p)),
        tools=tools,
        tool_choice=choose_tool(body.tool_choice, tools, body.parallel_tool_calls),
        counts_thinking=True,
        truncates=body.truncation == "auto",
        salt=salt,
    )


def _params_of(body: ResponseRequest) -> SamplingParams:
    wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    return SamplingParams(
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        format=_format_of(body.text.format if body.text else None),
        **temperature_and_top_p(body.temperature, body.top_p),
    )


def _format_of(wanted: TextFormat | None) -> str | dict[str, Any] | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return "json"
    if wanted.schema_ is None:
        raise RequestError("text.format.schema is missing, and the type is json_schema")
    return wanted.schema_


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """The functions among the tools, as every other API writes them: here a function's name stands beside its type.

    Tools that OpenAI's own servers run are left out, because clients such as Codex send them without being asked; the log
    names them, and the response lists the functions alone. Raises RequestError for any other tool.
    """
    kept = functions_of(tools)
    if len(kept) < len(tools):
        names = sorted({str(tool["type"]) for tool in tools if tool.get("type") in HOSTED_TOOLS})
        log.info("tools that this server does not run are left out: %s", ", ".join(names))
    found: list[Tool] = [
        {"type": tool.get("type"), "function": {key: each for key, each in tool.items() if key != "type"}} for tool in kept
    ]
    check_tools(found)
    return found


def functions_of(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools without those that OpenAI's own servers run."""
    return [tool for tool in tools if tool.get("type") not in HOSTED_TOOLS]


def read_input(given: Any, instructions: str | None) -> list[Message]:
    """The conversation as messages: a text is what the user says; otherwise there is a list of items."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestError("input is neither a text nor a list of at least 1 item")
    check_length(given, "input", MAX_MESSAGES)
    arguments = (item.get("arguments") for item in given if isinstance(item, Mapping))
    check_arguments((text for text in arguments if isinstance(text, str)), "input")
    history = History([{"role": "system", "content": instructions}] if instructions else [])
    for number, item in enumerate(given):
        history.add(f"input[{number}]", item)
    return check_messages(history.messages)


class History:
    """Joins items into messages, in their order."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages = messages
        self._names: dict[str, str] = {}
        self._thinking = ""

    def add(self, place: str, item: Any) -> None:
        """Add the next item. Raises RequestError, with its place, for an invalid one."""
        if not isinstance(item, Mapping):
            raise RequestError(f"{place} is a {type(item).__name__}, and must be an object")
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(place, item)
        elif kind == "function_call":
            self._add_call(place, item)
        elif kind == "function_call_output":
            call_id = _text(place, item, "call_id")
            name = self._names.get(call_id)
            message = {"role": "tool", "content": _content(f"{place}.output", item.get("output")), "tool_call_id": call_id}
            self.messages.append({**message, **({"name": name} if name else {})})
        elif kind == "reasoning":
            self._thinking = _content(f"{place}.content", item.get("content") or item.get("summary") or "")
        else:
            raise RequestError(f"{place} has the type {show(kind)}, which is not supported")

    def _add_message(self, place: str, item: Mapping[str, Any]) -> None:
        role = _text(place, item, "role")
        if role not in _ROLES:
            raise RequestError(f"{place}.role is {role!r:.80}, and must be one of {', '.join(_ROLES)}")
        message: Message = {"role": role, "content": _content(f"{place}.content", item.get("content"))}
        self.messages.append(self._with_thinking(message) if role == "assistant" else message)

    def _add_call(self, place: str, item: Mapping[str, Any]) -> None:
        name, call_id = _text(place, item, "name"), _text(place, item, "call_id")
        arguments = read_arguments(_text(place, item, "arguments"), f"{place}.arguments")
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append(self._with_thinking({"role": "assistant", "content": ""}))
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        self._names[call_id] = name

    def _with_thinking(self, message: Message) -> Message:
        thinking, self._thinking = self._thinking, ""
        return {**message, "reasoning_content": thinking} if thinking else message


def _text(place: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{place}.{name} is {show(value)}, and must be a text")
    return value


def _content(place: str, content: Any) -> str:
    """The text of a content: it is a text, or parts that are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place} is a {type(content).__name__}, and must be a text or a list of parts")
    check_length(content, place, MAX_CONTENT_PARTS)
    return "".join(_part(f"{place}[{number}]", part) for number, part in enumerate(content))


def _part(place: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind not in _TEXT_PARTS:
        raise RequestError(f"{place} has the type {show(kind)}, and only text is supported")
    return _text(place, part, "text")


def write_whole(started: Started, finished: Finished, body: ResponseRequest) -> dict[str, Any]:
    """The whole response as one object."""
    writer = ResponseWriter(started, echo(body, started.params))
    pieces = Delta(0, finished.text, finished.thinking, finished.tool_calls, finished.logprobs)
    *_, last = (*writer.add(pieces), *writer.finish(finished))
    response: dict[str, Any] = last["response"]
    return response


async def write_events(answer: Answer, body: ResponseRequest) -> AsyncIterator[str]:
    """The response as server-sent events, each with its name."""
    writer = ResponseWriter(answer.started, echo(body, answer.started.params))
    for each in writer.start():
        yield sse(each, each["type"])
    try:
        async for event in answer:
            if isinstance(event, Progress):
                if comment := progress_comment(event):
                    yield comment
            else:
                for each in writer.finish(event) if isinstance(event, Finished) else writer.add(event):
                    yield sse(each, each["type"])
    except Exception as error:  # the status is sent already: the error becomes an event
        failed = writer.fail(error)
        yield sse(failed, failed["type"])


def echo(body: ResponseRequest, params: SamplingParams) -> dict[str, Any]:
    """What a response repeats of its request, with the defaults filled in that it was sampled with."""
    wanted = body.text.format if body.text and body.text.format else TextFormat()
    return {
        "model": body.model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature if body.temperature is None else body.temperature,
        "top_p": params.top_p if body.top_p is None else body.top_p,
        "tools": functions_of(body.tools or []),
        "tool_choice": body.tool_choice or "auto",
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True)},
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        "metadata": body.metadata or {},
        "user": body.user,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "background": False,
        "store": False,
        "previous_response_id": None,
        "error": None,
        "incomplete_details": None,
        "usage": None,
    }
