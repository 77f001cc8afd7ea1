"""What was said: exchanges of questions and answers, in one conversation and its branches.

Always true: the exchanges are whole. A question without an answer is not part of a conversation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

from bough.errors import RequestError
from bough.types import Message

FIRST = "main"


@dataclass(frozen=True)
class Exchange:
    """A question and its answer."""

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
    """All that a chat can be resumed from: the model, the parameters that were set, and every branch of the conversation.

    `name` is the one that it was saved by or loaded from, if any.
    """

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
        """Go on in another branch."""
        if name not in self.branches:
            raise RequestError(f"there is no branch {name}; the branches are {', '.join(self.branches)}")
        self.current = name
