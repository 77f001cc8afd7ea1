"""Other names of models: the record of one alias, and the names and patterns of the setting `aliases`.

An alias has no weights of its own: it stands for a model, and may add an overlay (a system prompt, parameters, a chat
template and so on), as a model made with `/api/create` does. Its record is a small JSON file in the model folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from bough.config import parse_aliases
from bough.errors import RequestError
from bough.system.folders import write_private
from bough.types import Message

MAX_RECORD_BYTES = 2**20  # it is read for each request
WRITING = ".writing-"  # the prefix of a record that is not whole yet
_FORMAT = 1


@dataclass(frozen=True)
class Overlay:
    """The additions of an alias to its model. Parameters have Ollama's names; the template is kept as it was given.

    `capabilities` are those of the template, and empty without one.
    """

    system: str = ""
    template: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    license: str = ""
    capabilities: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        return self == Overlay()


@dataclass(frozen=True)
class Alias:
    """A name that stands for the model `target`."""

    name: str
    target: str
    created: datetime
    overlay: Overlay = field(default_factory=Overlay)


def read_alias(file: Path) -> Alias | None:
    """Read the alias in a file; None if there is no such file, or no valid record in it."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        overlay = record["overlay"]
        return Alias(
            name=str(record["name"]),
            target=str(record["target"]),
            created=datetime.fromisoformat(record["created"]),
            overlay=Overlay(
                system=str(overlay["system"]),
                template=str(overlay["template"]),
                parameters=dict(overlay["parameters"]),
                messages=tuple({str(key): value for key, value in each.items()} for each in overlay["messages"]),
                license=str(overlay["license"]),
                capabilities=tuple(map(str, overlay["capabilities"])),
            ),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_alias(file: Path, alias: Alias) -> None:
    """Write a record. Raises OSError, or RequestError if it is too large."""
    record = {"format": _FORMAT, **asdict(alias), "created": alias.created.isoformat()}
    content = (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()
    if len(content) > MAX_RECORD_BYTES:
        raise RequestError(f"the record of {alias.name!r} has {len(content):,} bytes, and may have {MAX_RECORD_BYTES:,}")
    write_private(file, content, WRITING)


class AliasRules:
    """The aliases of the settings: names and patterns, each with the name that it stands for.

    In a pattern, `*` stands for any text. Of several patterns that match, the one with the most other characters wins.
    """

    def __init__(self, text: str) -> None:
        rules = parse_aliases(text)
        self.names = {name: target for name, target in rules.items() if "*" not in name}
        patterns = sorted((name for name in rules if "*" in name), key=lambda name: (name.count("*") - len(name), name))
        self.patterns = {name: rules[name] for name in patterns}

    def match(self, name: str) -> str | None:
        """The name that a name stands for by a pattern, or None."""
        for pattern, target in self.patterns.items():
            if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name, re.DOTALL):
                return target
        return None
