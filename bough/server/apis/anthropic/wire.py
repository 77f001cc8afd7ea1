"""Bodies of Anthropic's API, and how they become an ask.

`cache_control` and all other fields that are not listed are accepted and change nothing: the cache is automatic. A line by
which a coding agent accounts for its requests is left out of the prompt, because it changes with every one of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from bough.errors import RequestError
from bough.models.defaults import unset_names
from bough.server.http.bounds import (
    FAIL_FAST,
    FEW_STOPS,
    MAX_BLOCKS,
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    SHORT_NAME,
    SHORT_STOP,
    SMALL_SCHEMA,
    at_most,
    check_tools_size,
    show,
)
from bough.server.http.wire import Wire
from bough.server.serving.ask import Ask, ToolChoice, ToolMode
from bough.types import Message, SamplingParams, Tool

_ACCOUNTING_NAME = "x-anthropic-billing-header:"
_ACCOUNTING = re.compile(rf"(?im)^[ \t]*{_ACCOUNTING_NAME}.*$(?:\r?\n)*")
_MODES: dict[str, ToolMode] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class Block(Wire):
    """A part of a message. Which of the fields it must have depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Annotated[str | Annotated[list[Block], FAIL_FAST] | None, at_most(MAX_CONTENT_PARTS)] = None
    is_error: bool | None = None


Blocks = Annotated[list[Block], FAIL_FAST]


class InputMessage(Wire):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Blocks, at_most(MAX_CONTENT_PARTS)]

    @property
    def blocks(self) -> list[Block]:
        return [Block(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class InputTool(Wire):
    """A tool that the client runs. Tools that Anthropic's own servers describe have a type, but no schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")
    type: str | None = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any], SMALL_SCHEMA] | None = None


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
    schema_: Annotated[dict[str, Any], SMALL_SCHEMA] = Field(alias="schema")


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
    if num_blocks > MAX_BLOCKS:
        raise ValueError(f"it has {num_blocks:,} blocks, and may have {MAX_BLOCKS:,}")
    return messages


Messages = Annotated[
    list[InputMessage], Field(min_length=1), FAIL_FAST, BeforeValidator(_check_num_blocks), at_most(MAX_MESSAGES)
]


class CountRequest(Wire):
    """What a prompt is made of."""

    model: Annotated[str, Field(min_length=1), SHORT_NAME]
    messages: Messages
    system: Annotated[str | Blocks | None, at_most(MAX_CONTENT_PARTS)] = None
    tools: Annotated[list[InputTool], FAIL_FAST, at_most(MAX_TOOLS)] | None = None
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
    stop_sequences: Annotated[list[Annotated[str, SHORT_STOP]], FAIL_FAST, FEW_STOPS] | None = None
    temperature: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=0)


def to_ask(body: CountRequest, salt: str, *, think: bool | None) -> Ask:
    """The ask of a body. Raises RequestError for what is not supported."""
    return Ask(
        model=body.model,
        messages=read_messages(body),
        params=_params_of(body) if isinstance(body, MessagesRequest) else SamplingParams(),
        unset=_unset_in(body) if isinstance(body, MessagesRequest) else frozenset(),
        tools=_read_tools(body.tools or []),
        tool_choice=_read_choice(body.tool_choice),
        think=think,
        salt=salt,
    )


def _params_of(body: MessagesRequest) -> SamplingParams:
    """Sampling as asked for, with Anthropic's defaults; a top-p of 0 is greedy."""
    wanted = body.output_config.format if body.output_config else None
    temperature = 1.0 if body.temperature is None else body.temperature
    return SamplingParams(
        max_tokens=body.max_tokens,
        temperature=0.0 if body.top_p == 0 else temperature,
        top_p=body.top_p or 1.0,
        top_k=body.top_k or 0,
        stop=tuple(body.stop_sequences or ()),
        format=wanted.schema_ if wanted else None,
    )


def _unset_in(body: MessagesRequest) -> frozenset[str]:
    """The parameters that the request leaves to the model; a top-p of 0 gives a temperature, too."""
    given = {"top_p": body.top_p, "top_k": body.top_k, "stop": body.stop_sequences}
    given["temperature"] = body.temperature if body.top_p != 0 else 0.0
    return unset_names([name for name, value in given.items() if value is not None])


def read_messages(body: CountRequest) -> list[Message]:
    """The system text and the conversation for templates. Raises RequestError, with its place, for a bad part."""
    system = _read_system(body.system)
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    names: dict[str, str] = {}
    for number, message in enumerate(body.messages):
        messages += _read_message(message, f"messages.{number}", names)
    return messages


def _read_system(system: str | Sequence[Block] | None) -> str:
    """The system text; its blocks are paragraphs."""
    if system is None or isinstance(system, str):
        return drop_accounting(system or "")
    texts = [drop_accounting(_read_text(block, f"system.{number}")) for number, block in enumerate(system)]
    return "\n\n".join(text for text in texts if text)


def drop_accounting(text: str) -> str:
    """The text without the lines in which a coding agent accounts for its requests."""
    return _ACCOUNTING.sub("", text) if _ACCOUNTING_NAME in text.lower() else text


def _read_message(message: InputMessage, place: str, names: dict[str, str]) -> list[Message]:
    blocks = {f"{place}.content.{number}": block for number, block in enumerate(message.blocks)}
    if message.role == "assistant":
        return [_read_assistant(blocks, names)]
    if not blocks:
        raise RequestError(f"{place}.content is empty, and must have at least one block")
    if message.role == "system":
        text = drop_accounting(_join_text(blocks))
        return [{"role": "system", "content": text}] if text else []
    return _read_user(blocks, names)


def _read_user(blocks: dict[str, Block], names: dict[str, str]) -> list[Message]:
    """Tool results, each as a message of its own, and then the text of the user."""
    results = {place: block for place, block in blocks.items() if block.type == "tool_result"}
    rest = {place: block for place, block in blocks.items() if place not in results}
    messages = [_read_result(block, place, names) for place, block in results.items()]
    return [*messages, {"role": "user", "content": _join_text(rest)}] if rest else messages


def _read_result(block: Block, place: str, names: dict[str, str]) -> Message:
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


def _read_assistant(blocks: dict[str, Block], names: dict[str, str]) -> Message:
    """An earlier answer. Redacted thinking is left out."""
    calls = [_read_call(block, place, names) for place, block in blocks.items() if block.type == "tool_use"]
    thinking = "".join(block.thinking or "" for block in blocks.values() if block.type == "thinking")
    known = ("tool_use", "thinking", "redacted_thinking")
    message: Message = {
        "role": "assistant",
        "content": _join_text({place: block for place, block in blocks.items() if block.type not in known}),
    }
    if thinking:
        message["reasoning_content"] = thinking
    return {**message, "tool_calls": calls} if calls else message


def _read_call(block: Block, place: str, names: dict[str, str]) -> dict[str, Any]:
    if not block.id or not block.name or block.input is None:
        raise RequestError(f"{place} is a tool_use, and must have id, name and input")
    names[block.id] = block.name
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _join_text(blocks: dict[str, Block]) -> str:
    return "".join(_read_text(block, place) for place, block in blocks.items())


def _read_text(block: Block, place: str) -> str:
    if block.type != "text":
        raise RequestError(f"{place} has the type {show(block.type)}, which is not supported here; text is")
    if block.text is None:
        raise RequestError(f"{place}.text is missing, and a block of type text must have it")
    return block.text


def _read_tools(tools: Iterable[InputTool]) -> list[Tool]:
    found = [_read_tool(tool, f"tools.{number}") for number, tool in enumerate(tools)]
    check_tools_size(found)
    names = [tool["function"]["name"] for tool in found]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise RequestError(f"tools.{number}.name is {name!r}, like that of tools.{names.index(name)}")
    return found


def _read_tool(tool: InputTool, place: str) -> Tool:
    if tool.input_schema is None:
        kind = (
            f"of the type {show(tool.type)}, which this server does not know, and "
            if tool.type not in (None, "custom")
            else ""
        )
        raise RequestError(f"{place} ({tool.name}) is {kind}without input_schema, which a tool must have")
    if tool.input_schema.get("type", "object") != "object":
        raise RequestError(f"{place}.input_schema.type is {show(tool.input_schema['type'])}, and must be 'object'")
    described = {"description": tool.description} if tool.description else {}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _read_choice(choice: InputToolChoice | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if choice.type == "tool" and not choice.name:
        raise RequestError("tool_choice.name is missing, and the type is tool")
    name = choice.name if choice.type == "tool" else None
    return ToolChoice(_MODES[choice.type], name, is_single=bool(choice.disable_parallel_tool_use))
