"""Messages and tools as the Ollama API writes them, which Bough's own API takes too.

Nothing is larger than `bounds` says.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from bough.server.http.bounds import (
    FAIL_FAST,
    MAX_IMAGES,
    MAX_MESSAGES,
    MAX_SCHEMA_CHARACTERS,
    MAX_SCHEMA_VALUES,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    SHORT_NAME,
    SMALL_TOOLS,
    at_most,
    describe_excess,
)
from bough.server.http.wire import Wire
from bough.types import Message


def _to_lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def check_schema_size(schema: dict[str, Any]) -> None:
    """Raise ValueError for a JSON schema that is too large."""
    if excess := describe_excess(schema, MAX_SCHEMA_VALUES, MAX_SCHEMA_CHARACTERS):
        raise ValueError(f"the JSON schema {excess}")


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") not in (None, "function") or not isinstance(function, dict):
        raise ValueError("a tool has type 'function' and an object `function`")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError("a tool's function has no name")
    if not isinstance(function.get("parameters"), dict | None):
        raise ValueError(f"the parameters of {function['name'][:40]!r} must be a JSON schema object")
    check_schema_size(function.get("parameters") or {})
    return {**tool, "type": "function"}


Role = Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_to_lower)]
Tool = Annotated[dict[str, Any], AfterValidator(_check_tool)]
Tools = Annotated[list[Tool], FAIL_FAST, SMALL_TOOLS, at_most(MAX_TOOLS)]
Name = Annotated[str, Field(min_length=1), SHORT_NAME]
Images = Annotated[list[Any], at_most(MAX_IMAGES)]


class FunctionCall(Wire):
    """The name of a tool and its arguments, as an object."""

    name: Name
    arguments: dict[str, Any] | None = None


class ToolCall(Wire):
    """A call that an earlier answer made."""

    id: str | None = None
    function: FunctionCall

    def to_message(self) -> dict[str, Any]:
        called = {"name": self.function.name, "arguments": self.function.arguments or {}}
        return {**({"id": self.id} if self.id else {}), "type": "function", "function": called}


class ChatMessage(Wire):
    """One message of a conversation."""

    role: Role
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[ToolCall], FAIL_FAST, at_most(MAX_TOOL_CALLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def to_message(self) -> Message:
        """The message as chat templates take it."""
        optional = {
            "reasoning_content": self.thinking,
            "tool_calls": [each.to_message() for each in self.tool_calls or ()],
            "name": self.tool_name,
            "tool_call_id": self.tool_call_id,
        }
        given = {name: value for name, value in optional.items() if value}
        return {"role": self.role, "content": self.content or "", **given}


Messages = Annotated[list[ChatMessage], FAIL_FAST, at_most(MAX_MESSAGES)]
