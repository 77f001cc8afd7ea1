"""OpenAI's responses: items in, items out. Nothing is remembered between two requests but the tree.

Calls and thoughts of earlier turns are items of their own; the template sees them in the assistant's message, as in a chat.
Thoughts belong to the message or call that follows them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from bough.errors import RequestError
from bough.models.chat.messages import check_messages
from bough.prompting.ask import Ask
from bough.sampling_params import unset_names
from bough.server.apis.answering import SaltOf, ServiceOf, answer_ask, progress_comment
from bough.server.apis.openai import wire
from bough.server.apis.openai.items import ResponseWriter
from bough.server.http import bounds
from bough.server.http.json_routes import Wire, read_ask, route_class
from bough.server.http.streaming import Pieces, sse
from bough.server.serving.answer import Answer, Answered, Finished, PromptProgress
from bough.types import Message, SamplingParams, Tool

log = logging.getLogger(__name__)

router = APIRouter(route_class=route_class(wire.format_error), tags=["OpenAI"])

LOGPROBS = "message.output_text.logprobs"
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_ROLES = ("system", "developer", "user", "assistant")
HOSTED_TOOLS = (
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


class TextFormat(Wire):
    """Text, any JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any], bounds.SMALL_SCHEMA] | None = Field(default=None, alias="schema")


class ResponseTextOptions(Wire):
    """The format of the text."""

    format: TextFormat | None = None


class ResponseRequest(Wire):
    """The body of a request for a response. Other fields are accepted and ignored."""

    model: wire.Name
    input: Any
    instructions: str | None = None
    max_output_tokens: wire.NumTokens | None = None
    temperature: wire.Temperature | None = None
    top_p: wire.TopP | None = None
    stream: bool | None = None
    tools: Annotated[list[dict[str, Any]], bounds.FAIL_FAST, bounds.at_most(bounds.MAX_TOOLS)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: ResponseTextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[str], bounds.FAIL_FAST, bounds.at_most(bounds.MAX_INCLUDES)] | None = None
    top_logprobs: wire.NumAlternatives | None = None
    metadata: (
        Annotated[dict[str, Any], bounds.no_larger_than(bounds.MAX_METADATA_VALUES, bounds.MAX_METADATA_CHARACTERS)] | None
    ) = None
    user: Annotated[str, bounds.SHORT_NAME] | None = None
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None


@router.post("/v1/responses")
async def respond(body: ResponseRequest, request: Request, service: ServiceOf, salt: SaltOf) -> Response:
    """Answer with a response."""
    ask = await read_ask(request, to_ask, body, salt)
    return await answer_ask(request, service, ask, body, write_whole, write_events)


def to_ask(body: ResponseRequest, salt: str) -> Ask:
    """The ask of a body. Raises RequestError for a field that is not supported."""
    for field in ("previous_response_id", "conversation", "prompt"):
        if getattr(body, field) is not None:
            raise RequestError(f"{field} is not supported: the server keeps no responses; send the whole conversation")
    if body.background:
        raise RequestError("background is not supported: the server keeps no responses")
    tools = read_tools(body.tools or [])
    wanted = body.text.format if body.text and body.text.format else TextFormat()
    wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    params = SamplingParams(
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        format=wire.read_format(wanted.type, wanted.schema_, wanted.strict, "text.format.schema"),
        **wire.with_defaults(body.temperature, body.top_p),
    )
    return Ask(
        model=body.model,
        messages=read_input(body.input, body.instructions),
        params=params,
        unset=unset_names(wire.given_of(body.temperature, body.top_p)),
        tools=tools,
        tool_choice=wire.choose_tool(body.tool_choice, tools, body.parallel_tool_calls),
        counts_thinking=True,
        truncates=body.truncation == "auto",
        salt=salt,
    )


def read_tools(tools: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """The functions among the tools, as other APIs write them: here a function's name is beside its type.

    Tools that OpenAI's own servers run are left out, because clients such as Codex always send them; the log names them,
    and the response lists the functions alone. Raises RequestError for any other tool.
    """
    if hosted := {tool["type"] for tool in tools if tool.get("type") in HOSTED_TOOLS}:
        log.info("tools that this server does not run are left out: %s", ", ".join(sorted(hosted)))
    found: list[Tool] = [
        {"type": tool.get("type"), "function": {key: each for key, each in tool.items() if key != "type"}}
        for tool in tools
        if tool.get("type") not in HOSTED_TOOLS
    ]
    wire.check_tools(found)
    return found


def read_input(given: Any, instructions: str | None) -> list[Message]:
    """The conversation as messages: a text is the user's message; otherwise there is a list of items."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise RequestError("input is neither a text nor a list of at least 1 item")
    bounds.check_length(given, "input", bounds.MAX_MESSAGES)
    arguments = (item.get("arguments") for item in given if isinstance(item, Mapping))
    wire.check_arguments((text for text in arguments if isinstance(text, str)), "input")
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
            content = _content(f"{place}.output", item.get("output"))
            named = {"name": self._names[call_id]} if self._names.get(call_id) else {}
            self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id, **named})
        elif kind == "reasoning":
            self._thinking += _content(f"{place}.content", item.get("content") or item.get("summary") or "")
        else:
            raise RequestError(f"{place} has the type {bounds.show(kind)}, which is not supported")

    def _add_message(self, place: str, item: Mapping[str, Any]) -> None:
        role = _text(place, item, "role")
        if role not in _ROLES:
            raise RequestError(f"{place}.role is {role!r:.80}, and must be one of {', '.join(_ROLES)}")
        self.messages.append({"role": role, "content": _content(f"{place}.content", item.get("content"))})
        if role == "assistant":
            self._add_thinking()

    def _add_call(self, place: str, item: Mapping[str, Any]) -> None:
        name, call_id = _text(place, item, "name"), _text(place, item, "call_id")
        arguments = wire.read_arguments(_text(place, item, "arguments"), f"{place}.arguments")
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        self._add_thinking()
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        self._names[call_id] = name

    def _add_thinking(self) -> None:
        """Add the thoughts that came before to the last message."""
        if self._thinking:
            self.messages[-1]["reasoning_content"] = self.messages[-1].get("reasoning_content", "") + self._thinking
            self._thinking = ""


def _text(place: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{place}.{name} is {bounds.show(value)}, and must be a text")
    return value


def _content(place: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{place} is a {type(content).__name__}, and must be a text or a list of parts")
    bounds.check_length(content, place, bounds.MAX_CONTENT_PARTS)
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXT_PARTS:
            raise RequestError(f"{place}[{number}] has the type {bounds.show(kind)}, and only text is supported")
        texts.append(_text(f"{place}[{number}]", part, "text"))
    return "".join(texts)


def write_whole(answered: Answered, body: ResponseRequest) -> dict[str, Any]:
    finished = answered.choices[0]
    writer = ResponseWriter(answered.started, _echo(body, answered.started.params))
    *_, last = (*writer.add(finished), *writer.finish(finished))
    response: dict[str, Any] = last["response"]
    return response


async def write_events(answer: Answer, body: ResponseRequest) -> Pieces:
    writer = ResponseWriter(answer.started, _echo(body, answer.started.params))
    for each in writer.start():
        yield sse(each, each["type"])
    try:
        async for event in answer:
            if isinstance(event, PromptProgress):
                if comment := progress_comment(event):
                    yield comment
            else:
                for each in writer.finish(event) if isinstance(event, Finished) else writer.add(event):
                    yield sse(each, each["type"])
    except Exception as error:  # the status is sent already: the error becomes an event
        failed = writer.fail(error)
        yield sse(failed, failed["type"])


def _echo(body: ResponseRequest, params: SamplingParams) -> dict[str, Any]:
    """The fields of a request that its response repeats, with the defaults that it was sampled with."""
    wanted = body.text.format if body.text and body.text.format else TextFormat()
    return {
        "model": body.model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature if body.temperature is None else body.temperature,
        "top_p": params.top_p if body.top_p is None else body.top_p,
        "tools": [tool for tool in body.tools or () if tool.get("type") not in HOSTED_TOOLS],
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
