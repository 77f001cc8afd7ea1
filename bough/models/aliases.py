"""Other names of models: the record of one alias, and the names and patterns of the setting `aliases`.

An alias has no weights of its own: it stands for a model, and may add an overlay (a system prompt, parameters, a chat
template and so on), as a model that was made with `/api/create` does. Its record is a small JSON file in the model folder.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bough.config import parse_aliases
from bough.errors import RequestError
from bough.types import Message

MAX_RECORD_BYTES = 2**20  # it is read for each request
WRITING = ".writing-"  # how the name of a record begins until it is whole
_FORMAT = 1


@dataclass(frozen=True)
class Overlay:
    """What an alias adds to its model. Parameters have Ollama's names; the template is kept as it was given.

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


def make_alias(name: str, target: str, overlay: Overlay | None = None) -> Alias:
    """A new alias, made now."""
    return Alias(name, target, datetime.now(UTC).replace(microsecond=0), overlay or Overlay())


def read_alias(file: Path) -> Alias | None:
    """The alias in a file; None if there is no such file, or no valid record in it."""
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
    """Write a record, whole or not at all. Raises OSError, or RequestError if it is too large."""
    record = {"format": _FORMAT, **asdict(alias), "created": alias.created.isoformat()}
    content = (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()
    if len(content) > MAX_RECORD_BYTES:
        raise RequestError(f"the record of {alias.name!r} has {len(content):,} bytes, and may have {MAX_RECORD_BYTES:,}")
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=WRITING)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(file)
    finally:
        Path(name).unlink(missing_ok=True)


class AliasRules:
    """The aliases of the settings: names and patterns, each with the name that it stands for.

    In a pattern, `*` stands for any text. Of several patterns that match, the one with the most other characters counts.
    """

    def __init__(self, text: str) -> None:
        rules = parse_aliases(text)
        self.names = {name: target for name, target in rules.items() if "*" not in name}
        patterns = sorted((name for name in rules if "*" in name), key=lambda name: (name.count("*") - len(name), name))
        self.patterns = {name: rules[name] for name in patterns}

    def match(self, name: str) -> str | None:
        """What a name stands for by a pattern, or None."""
        return next((target for pattern, target in self.patterns.items() if _matches(pattern, name)), None)


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name, re.DOTALL) is not None
