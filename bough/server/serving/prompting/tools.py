"""Tools: how they are described to a model, and the grammar that makes it call one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bough.errors import RequestError
from bough.models.chat.messages import SYSTEM_ROLES
from bough.server.serving.ask import Tool, ToolChoice
from bough.types import Message

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_DESCRIPTION = """You may call functions. These are described by one JSON object per line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as a JSON object between tags, once for each call:
<tool_call>
{{"name": "name of the function", "arguments": {{"name of an argument": "its value"}}}}
</tool_call>"""


@dataclass(frozen=True)
class TemplateInput:
    """The input of a chat template."""

    messages: list[Message]
    tools: list[Tool] | None


def prepare_messages(
    messages: Sequence[Message], tools: Sequence[Tool], choice: ToolChoice, *, template_knows_tools: bool
) -> TemplateInput:
    """The messages and tools for a template. If it does not support tools, they and past calls become plain text."""
    offered = [] if choice.mode == "none" else list(tools)
    if template_knows_tools:
        return TemplateInput(list(messages), offered or None)
    written = [_write_out(message) for message in messages]
    return TemplateInput(_describe(written, offered) if offered else written, None)


def _describe(messages: list[Message], tools: list[Tool]) -> list[Message]:
    """The messages with the tools at the end of the system message, which is added if there is none."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    description = _DESCRIPTION.format(tools=lines)
    if messages and messages[0].get("role") in SYSTEM_ROLES:
        system = _text_of(messages[0])
        content = f"{system}\n\n{description}" if system else description
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def _write_out(message: Message) -> Message:
    """The message with its calls, or the result that it carries, in its text."""
    if message.get("role") == "tool":
        return {**message, "content": f"<tool_response>\n{_text_of(message)}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    parts = [_text_of(message), *(_write_call(call["function"]) for call in message["tool_calls"])]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(part for part in parts if part)}


def _write_call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return f"{_CALL}\n{json.dumps(call, ensure_ascii=False)}\n{_CALL_END}"


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)


def forced_format(tools: Sequence[Tool], choice: ToolChoice) -> dict[str, Any] | None:
    """The JSON schema that an answer must follow to be a call of a tool, or of the named one; None if none is forced.

    Raises RequestError if there is no such tool.
    """
    if choice.mode != "required":
        return None
    wanted = [tool["function"] for tool in tools if choice.name in (None, tool["function"]["name"])]
    if not wanted:
        names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        raise RequestError(f"a call of {choice.name or 'a tool'} is asked for; the tools are: {names}")
    schemas = [_call_schema(function, f"tool_{number}") for number, function in enumerate(wanted)]
    definitions = {key: value for schema in schemas for key, value in schema.pop("$defs", {}).items()}
    forced = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {**forced, "$defs": definitions} if definitions else forced


def _call_schema(function: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The schema of a call. Parameters that refer to parts of themselves move to a place among the definitions."""
    arguments: dict[str, Any] = {**(function.get("parameters") or {}), "type": "object"}
    moved = _refer_below(arguments, f"#/$defs/{place}")
    schema = {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    if moved == arguments:
        return schema
    schema["properties"] = {"name": {"const": function["name"]}, "arguments": {"$ref": f"#/$defs/{place}"}}
    return {**schema, "$defs": {place: moved}}


def _refer_below(schema: Any, root: str) -> Any:
    """The schema with its references, which are to its own root, put below another root."""
    if isinstance(schema, list):
        return [_refer_below(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: root + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _refer_below(value, root)
        for key, value in schema.items()
    }
