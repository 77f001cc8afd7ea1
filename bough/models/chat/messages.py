"""Messages and tools before a template renders them: checked, their content as one text, calls read.

Where the template does not know tools, they and past calls become plain text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bough.errors import RequestError
from bough.types import Message, Tool

ROLES = ("system", "developer", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")
TOOLS_TEXT = "tools_text"  # of a system message: the part of its content that describes the tools
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_DESCRIPTION = """You may call functions. These are described by one JSON object per line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as a JSON object between tags, once for each call:
<tool_call>
{{"name": "name of the function", "arguments": {{"name of an argument": "its value"}}}}
</tool_call>"""


def check_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copy the messages, with the content of each as one text. Raises RequestError, with its number, for a bad one."""
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
        if message["role"] == "assistant" and any(map(message.get, ("tool_calls", "thinking", "reasoning_content"))):
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


@dataclass(frozen=True)
class TemplateInput:
    """The input of a chat template."""

    messages: list[Message]
    tools: list[Tool] | None


def read_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages with the arguments of earlier calls as objects, and with the name of its tool in each result.

    In OpenAI's API arguments are JSON text. Raises RequestError, with its number, for a call that cannot be read.
    """
    names: dict[str, str] = {}
    return [_read_message(f"messages[{number}]", message, names) for number, message in enumerate(messages)]


def _read_message(place: str, message: Message, names: dict[str, str]) -> Message:
    """A message for the template. `names` has the tool of each call so far by the call's id, and is added to."""
    if message.get("role") == "tool":
        name = names.get(str(message.get("tool_call_id")))
        return {**message, "name": name} if name else message
    calls = message.get("tool_calls")
    if not calls:
        return message
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{place}.tool_calls is a {type(calls).__name__}, and must be a list of calls")
    read = [_read_call(f"{place}.tool_calls[{number}]", call) for number, call in enumerate(calls)]
    names.update((str(call["id"]), call["function"]["name"]) for call in read if call.get("id") is not None)
    return {**message, "tool_calls": read}


def _read_call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{place} is {call!r:.80}, and must be an object with a function that has a name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{place}.function.arguments is no JSON: {arguments[:80]!r}") from error
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{place}.function.arguments is {arguments!r:.80}, and must be an object")
    return {**call, "function": {**function, "arguments": arguments}}


def prepare_messages(messages: Sequence[Message], tools: Sequence[Tool], *, template_knows_tools: bool) -> TemplateInput:
    """The messages and tools for a template. If it does not support tools, they and past calls become plain text."""
    if template_knows_tools:
        return TemplateInput(list(messages), list(tools) or None)
    written = [_write_out(message) for message in messages]
    return TemplateInput(_describe(written, tools) if tools else written, None)


def _describe(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    """Put the tools at the beginning of the system message, which is added if there is none.

    Agents have the working folder and the time in their system text, and the same tools every time: these come first, so
    that all sessions of an agent share them. The message has them in TOOLS_TEXT, too, if more text follows.
    """
    description = _DESCRIPTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if not messages or messages[0].get("role") not in SYSTEM_ROLES:
        return [{"role": "system", "content": description}, *messages]
    system = _text_of(messages[0])
    content = {"content": f"{description}\n\n{system}", TOOLS_TEXT: description} if system else {"content": description}
    return [{**messages[0], **content}, *messages[1:]]


def _write_out(message: Message) -> Message:
    """Put a message's calls, or its result of one, into its text."""
    if message.get("role") == "tool":
        return {**message, "content": f"<tool_response>\n{_text_of(message)}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    parts = [_text_of(message), *(_write_call(call["function"]) for call in message["tool_calls"])]
    return {
        **{key: value for key, value in message.items() if key != "tool_calls"},
        "content": "\n".join(filter(None, parts)),
    }


def _write_call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return f"{_CALL}\n{json.dumps(call, ensure_ascii=False)}\n{_CALL_END}"


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text", "")) for part in content)
