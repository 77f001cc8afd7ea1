"""A chat as it is kept: its conversation with all branches, and the JSON files of saved chats.

Always true: a question without an answer is not part of a conversation. A file is written as a whole, and only its owner
can read it. One that cannot be read, or does not hold a chat, raises BoughError and stays as it is.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from bough.cli.chat.parameters import check
from bough.errors import BoughError, RequestError
from bough.system.folders import write_private
from bough.types import Message

FIRST = "main"
"""The name of the first branch."""

LAST = "last"
"""The name of a chat that was not given another."""

_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class Exchange:
    question: str
    answer: str


@dataclass
class Conversation:
    """The system text and the exchanges so far."""

    system: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    def messages(self, question: str, last: int | None = None) -> list[Message]:
        """The prompt that asks `question` after the exchanges up to `last`."""
        said: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for each in self.exchanges[:last]:
            said += [{"role": "user", "content": each.question}, {"role": "assistant", "content": each.answer}]
        return [*said, {"role": "user", "content": question}]


@dataclass
class ChatSession:
    """All that is needed to resume a chat. `given` are the parameters that were set; `name` is the saved chat's, if any."""

    model: str = ""
    given: dict[str, Any] = field(default_factory=dict)
    branches: dict[str, Conversation] = field(default_factory=lambda: {FIRST: Conversation()})
    current: str = FIRST
    name: str | None = None

    @property
    def conversation(self) -> Conversation:
        """The branch that goes on."""
        return self.branches[self.current]

    @property
    def is_empty(self) -> bool:
        return not any(branch.exchanges for branch in self.branches.values())

    def branch(self, name: str = "") -> None:
        """Go on from here in a new branch. Raises RequestError if there is one of that name."""
        numbered = (f"branch-{number}" for number in count(2))
        name = name or next(each for each in numbered if each not in self.branches)
        if name in self.branches:
            raise RequestError(f"there is a branch {name} already; /switch {name} goes to it")
        here = self.conversation
        self.branches[name] = Conversation(here.system, list(here.exchanges))
        self.current = name

    def switch(self, name: str) -> None:
        if name not in self.branches:
            raise RequestError(f"there is no branch {name}; the branches are {', '.join(self.branches)}")
        self.current = name


def check_name(name: str) -> str:
    """The name of a chat or a branch. Raises RequestError for one that could not be a file's."""
    if not _NAME.fullmatch(name):
        raise RequestError(f"{name[:80]!r} is not a name: up to 64 letters, digits, '.', '_' and '-'")
    return name


class Sessions:
    """The chats in one folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """All names, the one that was saved last first."""
        saved: list[tuple[float, str]] = []
        for file in self.folder.glob("*.json"):
            with contextlib.suppress(OSError):  # it has just been deleted
                saved.append((file.stat().st_mtime, file.stem))
        return [name for _, name in sorted(saved, reverse=True) if _NAME.fullmatch(name)]

    def save(self, session: ChatSession, name: str) -> None:
        """Write the chat under a name, over an older one. Raises RequestError for a bad name, BoughError if it fails."""
        file = self._file(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_private(file, json.dumps(_to_plain(session), ensure_ascii=False, indent=1))
        except OSError as error:
            raise BoughError(f"the chat was not saved to {file}: {error.strerror or error}") from error

    def load(self, name: str | None = None) -> ChatSession:
        """The chat of that name; without one, that which was saved last."""
        names = self.names()
        if name is None and not names:
            raise RequestError("there is no chat to resume yet")
        name = name or names[0]
        file = self._file(name)
        try:
            return _from_plain(json.loads(file.read_text(encoding="utf-8")), name)
        except FileNotFoundError as error:
            known = f"the chats are {', '.join(names)}" if names else "there are none yet"
            raise RequestError(f"there is no chat {name}; {known}") from error
        except OSError as error:
            raise BoughError(f"the chat in {file} cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RequestError) as error:
            raise BoughError(f"the file {file} is damaged: {type(error).__name__}: {error}") from error

    def _file(self, name: str) -> Path:
        return self.folder / f"{check_name(name)}.json"


def _to_plain(session: ChatSession) -> dict[str, Any]:
    branches = {name: asdict(branch) for name, branch in session.branches.items()}
    about = {"format": _FORMAT, "model": session.model, "parameters": session.given}
    return about | {"current": session.current, "branches": branches}


def _from_plain(plain: Mapping[str, Any], name: str) -> ChatSession:
    """The chat that was saved. Raises one of several exceptions if it is not one."""
    if plain["format"] != _FORMAT:
        raise ValueError(f"its format is {plain['format']!r}, and must be {_FORMAT}")
    branches = {check_name(each): _read_conversation(branch) for each, branch in plain["branches"].items()}
    if plain["current"] not in branches:
        raise ValueError(f"it has no branch {plain['current']!r}")
    return ChatSession(_text(plain["model"]), check(plain["parameters"]), branches, plain["current"], name)


def _read_conversation(plain: Mapping[str, Any]) -> Conversation:
    said = [Exchange(_text(each["question"]), _text(each["answer"])) for each in plain["exchanges"]]
    return Conversation(_text(plain["system"]), said)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"it has a {type(value).__name__} where a text must be")
    return value
