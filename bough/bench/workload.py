"""Conversations made of plain words, the same ones every time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from bough.types import Message

_TEXT = """
river stone paper window garden market winter summer morning evening letter number system signal bridge engine
travel record simple useful little narrow bright silent careful heavy green yellow purple orange silver golden
library teacher student doctor sailor farmer worker writer reader builder people family friend mother father answer
question reason method result figure example problem measure weather weight length height minute second between through
against without within before after under over around near behind beside along across toward carry bring
follow gather listen notice offer open plan plant point prepare provide reach return search select share
shape shift sound stand start state store study supply support table thread ticket tower track trade
"""
_WORDS = _TEXT.split()


def words(count: int, seed: int | str) -> str:
    """So many words with some punctuation, chosen by the seed."""
    chance = random.Random(f"bough {seed}")
    chosen = [chance.choice(_WORDS) for _ in range(count)]
    for at in range(7, count, 8):
        chosen[at] += "."
    return " ".join(chosen)


@dataclass(frozen=True)
class SwitchSetup:
    """The shape of the switching workload: conversations that take turns over one system prompt."""

    conversations: int = 6
    turns: int = 8
    system_words: int = 700
    message_words: int = 40
    reply_tokens: int = 16


@dataclass
class Conversation:
    """One chat: the shared system prompt, what the user says, and what the model answered."""

    number: int
    setup: SwitchSetup
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages = [{"role": "system", "content": words(self.setup.system_words, "system")}]

    def ask(self, turn: int) -> list[Message]:
        content = words(self.setup.message_words, f"user {self.number} {turn}")
        self.messages.append({"role": "user", "content": content})
        return list(self.messages)

    def hear(self, reply: str) -> None:
        self.messages.append({"role": "assistant", "content": reply})
