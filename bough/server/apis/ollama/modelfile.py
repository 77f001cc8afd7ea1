"""Modelfiles: reading the text of one, and writing the one that `/api/show` shows.

A Modelfile is a list of instructions, each with its value on the same line, or between quotes, three of which allow several
lines. Instructions may be written in any case; a line that begins with # is a comment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bough.errors import RequestError
from bough.models.aliases import Overlay
from bough.types import Message

INSTRUCTIONS = ("FROM", "SYSTEM", "TEMPLATE", "PARAMETER", "MESSAGE", "LICENSE")
_LONG_QUOTE = '"""'
_WORD = re.compile(r"\s*(\S+)[ \t]*")


@dataclass
class Modelfile:
    """The values of a Modelfile, under the names of the fields of `/api/create`."""

    source: str = ""
    system: str = ""
    template: str = ""
    license: list[str] = field(default_factory=list)
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)


def parse_modelfile(text: str) -> Modelfile:
    """Read a Modelfile. Raises RequestError, with its name, for an instruction that is not supported."""
    found = Modelfile()
    for name, value in _instructions(text):
        if name == "FROM":
            found.source = value
        elif name == "SYSTEM":
            found.system = value
        elif name == "TEMPLATE":
            found.template = value
        elif name == "LICENSE":
            found.license.append(value)
        elif name == "PARAMETER":
            _add_parameter(found.parameters, value)
        else:
            role, _, content = value.partition(" ")
            found.messages.append({"role": role.lower(), "content": _unquote(content.strip())})
    return found


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    position = 0
    while word := _WORD.match(text, position):
        if word[1].startswith("#"):
            position = _line_end(text, word.start(1))
            continue
        name = word[1].upper()
        if name not in INSTRUCTIONS:
            known = ", ".join(INSTRUCTIONS)
            raise RequestError(f"the Modelfile has {word[1][:40]!r}, which is not supported; there are {known}")
        end = _value_end(text, word.end(), name)
        yield name, _unquote(text[word.end() : end].strip()) if name != "MESSAGE" else text[word.end() : end].strip()
        position = end


def _value_end(text: str, start: int, name: str) -> int:
    """Where the value of an instruction ends: with its quotes, or with its line."""
    line_end = _line_end(text, start)
    opening = text.find(_LONG_QUOTE, start, line_end)
    if opening < 0:
        return line_end
    closing = text.find(_LONG_QUOTE, opening + len(_LONG_QUOTE))
    if closing < 0:
        raise RequestError(f'the Modelfile has {name} with """ that no other """ ends')
    while text.startswith(_LONG_QUOTE, closing + 1):  # a quote at the end of the value
        closing += 1
    return closing + len(_LONG_QUOTE)


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return len(text) if end < 0 else end


def _unquote(value: str) -> str:
    if value.startswith(_LONG_QUOTE) and value.endswith(_LONG_QUOTE) and len(value) >= 2 * len(_LONG_QUOTE):
        return value[len(_LONG_QUOTE) : -len(_LONG_QUOTE)]
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] == '"' else value


def _add_parameter(parameters: dict[str, Any], value: str) -> None:
    """Add a parameter. Stop strings may be given several times."""
    name, _, text = value.partition(" ")
    text = _unquote(text.strip())
    if name == "stop":
        parameters.setdefault("stop", []).append(text)
    else:
        parameters[name] = _read_number(text)


def _read_number(text: str) -> Any:
    """The number or truth value that a text stands for; other texts as they are, for the check of the options to refuse."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text.lower(), text)


def write_parameters(parameters: Mapping[str, Any]) -> str:
    """The parameters, one per line, and one line for each stop string."""
    return "\n".join(f"{name:<30} {json.dumps(value, ensure_ascii=False)}" for name, value in _pairs(parameters))


def _pairs(parameters: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        (name, each)
        for name, value in parameters.items()
        for each in (value if isinstance(value, list | tuple) else [value])
    ]


def write_modelfile(source: str, template: str, parameters: Mapping[str, Any], overlay: Overlay) -> str:
    """The text that would make the model again."""
    lines = [f"FROM {source}", f"TEMPLATE {_quote(template)}"]
    if overlay.system:
        lines.append(f"SYSTEM {_quote(overlay.system)}")
    lines += [f"PARAMETER {name} {_quote(value)}" for name, value in _pairs(parameters)]
    lines += [f"MESSAGE {each['role']} {_quote(each['content'])}" for each in overlay.messages]
    if overlay.license:
        lines.append(f"LICENSE {_quote(overlay.license)}")
    return "\n".join([*lines, ""])


def _quote(value: Any) -> str:
    return f"{_LONG_QUOTE}{value}{_LONG_QUOTE}" if isinstance(value, str) else str(value)
