"""Bodies of Anthropic's API, and how they become an ask.

`cache_control` and all other fields that are not listed are accepted and change nothing: the cache is automatic. The line
in which a coding agent accounts for a request is left out of the prompt, because it is different in every request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from bough.errors import RequestError
from bough.prompting.ask import Ask, ToolChoice, ToolMode
from bough.sampling_params import unset_names
from bough.server.http import bounds
from bough.server.http.json_routes import Wire
from bough.types import Message, SamplingParams, Tool

_ACCOUNTING_NAME = "x-anthropic-billing-header:"
_ACCOUNTING = re.compile(rf"(?im)^[ \t]*{_ACCOUNTING_NAME}.*$(?:\r?\n)*")
_MODES: dict[str, ToolMode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class ContentBlock(Wire):
    """A part of a message. Which of the fields it must have depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Annotated[
        str | Annotated[list[ContentBlock], bounds.FAIL_FAST] | None, bounds.at_most(bounds.MAX_CONTENT_PARTS)
    ] = None
    is_error: bool | None = None


Blocks = Annotated[list[ContentBlock], bounds.FAIL_FAST]


class InputMessage(Wire):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Blocks, bounds.at_most(bounds.MAX_CONTENT_PARTS)]


class InputTool(Wire):
    """A tool that the client runs. Tools that Anthropic's own servers describe have a type, but no schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")
    type: str | None = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any], bounds.SMALL_SCHEMA] | None = None


class InputToolChoice(Wire):
    """Whether a tool may, must or must not be used."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Wire):
    """Whether the answer shows the model's thinking. The budget is ignored."""

    type: str


class OutputFormat(Wire):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], bounds.SMALL_SCHEMA] = Field(alias="schema")


class OutputConfig(Wire):
    """The format of the answer."""

    format: OutputFormat | None = None


def _check_num_blocks(messages: Any) -> Any:
    """Raise ValueError for messages with too many blocks, those of tool results included, before any block is validated."""
    num_blocks, left = 0, [messages if isinstance(messages, list) else []]
    while left:
        for each in left.pop():
            content = each.get("content") if isinstance(each, dict) else None
            if isinstance(content, list):
                num_blocks += len(content)
                left.append(content)
    if num_blocks > bounds.MAX_BLOCKS:
        raise ValueError(f"it has {num_blocks:,} blocks, and may have {bounds.MAX_BLOCKS:,}")
    return messages


Messages = Annotated[
    list[InputMessage],
    Field(min_length=1),
    bounds.FAIL_FAST,
    BeforeValidator(_check_num_blocks),
    bounds.at_most(bounds.MAX_MESSAGES),
]


class CountRequest(Wire):
    """The parts of a prompt."""

    model: Annotated[str, Field(min_length=1), bounds.SHORT_NAME]
    messages: Messages
    system: Annotated[str | Blocks | None, bounds.at_most(bounds.MAX_CONTENT_PARTS)] = None
    tools: Annotated[list[InputTool], bounds.FAIL_FAST, bounds.at_most(bounds.MAX_TOOLS)] | None = None
    tool_choice: InputToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"


class MessagesRequest(CountRequest):
    """A prompt, and how to answer it."""

    max_tokens: int = Field(gt=0)
    stream: bool | None = None
    stop_sequences: Annotated[list[Annotated[str, bounds.SHORT_STOP]], bounds.FAIL_FAST, bounds.FEW_STOPS] | None = None
    temperature: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=0)


def to_ask(body: CountRequest, salt: str, *, think: bool | None) -> Ask:
    """The ask of a body. Raises RequestError for a part that is not supported."""
    ask = Ask(
        model=body.model,
        messages=read_messages(body),
        tools=_read_tools(body.tools or []),
        tool_choice=_read_choice(body.tool_choice),
        think=think,
        salt=salt,
    )
    return _add_sampling(ask, body) if isinstance(body, MessagesRequest) else ask


def _add_sampling(ask: Ask, body: MessagesRequest) -> Ask:
    """The ask with the sampling of the body, or Anthropic's defaults. A top-p of 0 is greedy, as a temperature of 0 is."""
    sampling = {
        "temperature": 0.0 if body.top_p == 0 else body.temperature,
        "top_p": 1.0 if body.top_p == 0 else body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
    }
    given: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    wanted = body.output_config.format if body.output_config else None
    schema = wanted.schema_ if wanted else None
    params = SamplingParams(max_tokens=body.max_tokens, format=schema, **{"temperature": 1.0, **given})
    return replace(ask, params=params, unset=unset_names(given))


def read_messages(body: CountRequest) -> list[Message]:
    """The system text and the conversation for templates. Raises RequestError, with its place, for a bad part."""
    blocks = [ContentBlock(type="text", text=body.system)] if isinstance(body.system, str) else body.system or []
    texts = [drop_accounting(_read_text(block, f"system.{number}")) for number, block in enumerate(blocks)]
    system = "\n\n".join(filter(None, texts))  # each block is a paragraph
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    names: dict[str, str] = {}
    for number, message in enumerate(body.messages):
        messages += _read_message(message, f"messages.{number}.content", names)
    return messages


def drop_accounting(text: str) -> str:
    """The text without the lines in which a coding agent accounts for its requests."""
    return _ACCOUNTING.sub("", text) if _ACCOUNTING_NAME in text.lower() else text


def _read_message(message: InputMessage, place: str, names: dict[str, str]) -> list[Message]:
    """The messages of a turn. Tool results are messages of their own, before the text of the user."""
    content = [ContentBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
    blocks = {f"{place}.{number}": block for number, block in enumerate(content)}
    if message.role == "assistant":
        return [_read_assistant(blocks, names)]
    if not blocks:
        raise RequestError(f"{place} is empty, and must have at least one block")
    if message.role == "system":
        text = drop_accounting(_join_text(blocks))
        return [{"role": "system", "content": text}] if text else []
    messages = [_read_result(block, place, names) for place, block in blocks.items() if block.type == "tool_result"]
    texts = {place: block for place, block in blocks.items() if block.type != "tool_result"}
    return [*messages, {"role": "user", "content": _join_text(texts)}] if texts else messages


def _read_result(block: ContentBlock, place: str, names: dict[str, str]) -> Message:
    if not block.tool_use_id:
        raise RequestError(f"{place}.tool_use_id is missing, and a tool_result must have it")
    content = block.content or ""
    if not isinstance(content, str):
        content = _join_text({f"{place}.content.{number}": each for number, each in enumerate(content)})
    name = names.get(block.tool_use_id)
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        **({"name": name} if name else {}),
        "content": f"Error: {content}" if block.is_error else content,
    }


def _read_assistant(blocks: dict[str, ContentBlock], names: dict[str, str]) -> Message:
    """An earlier answer. Redacted thinking is left out."""
    thinking, calls, texts = "", [], {}
    for place, block in blocks.items():
        if block.type == "thinking":
            thinking += block.thinking or ""
        elif block.type == "tool_use":
            if not block.id or not block.name or block.input is None:
                raise RequestError(f"{place} is a tool_use, and must have id, name and input")
            names[block.id] = block.name
            calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}})
        elif block.type != "redacted_thinking":
            texts[place] = block
    optional = {"reasoning_content": thinking, "tool_calls": calls}
    given = {name: value for name, value in optional.items() if value}
    return {"role": "assistant", "content": _join_text(texts), **given}


def _join_text(blocks: dict[str, ContentBlock]) -> str:
    return "".join(_read_text(block, place) for place, block in blocks.items())


def _read_text(block: ContentBlock, place: str) -> str:
    if block.type != "text":
        raise RequestError(f"{place} has the type {bounds.show(block.type)}, which is not supported here; text is")
    if block.text is None:
        raise RequestError(f"{place}.text is missing, and a block of type text must have it")
    return block.text


def _read_tools(tools: Iterable[InputTool]) -> list[Tool]:
    found: list[Tool] = []
    places: dict[str, str] = {}
    for number, tool in enumerate(tools):
        place = f"tools.{number}"
        if tool.input_schema is None:
            is_unknown = tool.type not in (None, "custom")
            kind = f"of the type {bounds.show(tool.type)}, which this server does not know, and " if is_unknown else ""
            raise RequestError(f"{place} ({tool.name}) is {kind}without input_schema, which a tool must have")
        if tool.input_schema.get("type", "object") != "object":
            given = bounds.show(tool.input_schema["type"])
            raise RequestError(f"{place}.input_schema.type is {given}, and must be 'object'")
        if places.setdefault(tool.name, place) != place:
            raise RequestError(f"{place}.name is {tool.name!r}, like that of {places[tool.name]}")
        described = {"description": tool.description} if tool.description else {}
        function = {"name": tool.name, **described, "parameters": tool.input_schema}
        found.append({"type": "function", "function": function})
    bounds.check_tools_size(found)
    return found


def _read_choice(choice: InputToolChoice | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if choice.type == "tool" and not choice.name:
        raise RequestError("tool_choice.name is missing, and the type is tool")
    name = choice.name if choice.type == "tool" else None
    return ToolChoice(_MODES[choice.type], name, is_single=bool(choice.disable_parallel_tool_use))
