"""The messages of a chat: a system text and exchanges of a question and its answer.

Always true: the exchanges are whole. A question that got no answer is no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bough.types import Message


@dataclass(frozen=True)
class Exchange:
    """A question and what was answered."""

    question: str
    answer: str


@dataclass
class Conversation:
    """What was said so far."""

    system: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    def messages(self, question: str, last: int | None = None) -> list[Message]:
        """The prompt that asks `question` after the exchanges up to `last`."""
        said: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        for each in self.exchanges[:last]:
            said += [{"role": "user", "content": each.question}, {"role": "assistant", "content": each.answer}]
        return [*said, {"role": "user", "content": question}]
