"""Checks messages of clients, and makes their content one text, before a template renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bough.errors import RequestError
from bough.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copies of the messages with their content as one text. Raises RequestError, with its number, for a bad one."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError(f"messages is a {type(messages).__name__}, and must be a list of messages")
    if not messages:
        raise RequestError("messages is empty, and must have at least one message")
    return [_check(number, message) for number, message in enumerate(messages)]


def _check(number: int, message: Mapping[str, Any]) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{number}] is a {type(message).__name__}, and must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"messages[{number}] has the role {role!r:.80}, and must have one of {', '.join(ROLES)}")
    return {**message, "content": _flatten(number, message)}


def _flatten(number: int, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if message["role"] == "assistant" and any(
            message.get(key) for key in ("tool_calls", "thinking", "reasoning_content")
        ):
            return ""
        raise RequestError(f"messages[{number}] ({message['role']}) has no content")
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise RequestError(
            f"messages[{number}] has a {type(content).__name__} as content, and must have text or a list of parts"
        )
    return "".join(_part_text(number, part) for part in content)


def _part_text(number: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(f"messages[{number}] has a part of type {kind!r:.80}; only parts of type 'text' are supported")
