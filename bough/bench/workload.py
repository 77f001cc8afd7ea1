"""Workloads of the benchmarks: conversations of plain words, prompts of random ids, and models of random weights.

The same seed always gives the same words and ids.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

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

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 997,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16_384,
    },
}
"""Configurations of models with random weights, by name."""


def words(count: int, seed: int | str) -> str:
    """A text of `count` words with some punctuation, chosen by the seed."""
    chance = random.Random(f"bough {seed}")
    chosen = [chance.choice(_WORDS) for _ in range(count)]
    for at in range(7, count, 8):
        chosen[at] += "."
    return " ".join(chosen)


def random_prompts(ids: range, num_tokens: int, count: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `num_tokens` ids each, drawn from a range."""
    chance = random.Random(seed)
    return [[chance.randrange(ids.start, ids.stop) for _ in range(num_tokens)] for _ in range(count)]


@dataclass(frozen=True)
class SwitchSetup:
    """The size of the switching workload: conversations that take turns over one system prompt."""

    conversations: int = 6
    turns: int = 8
    system_words: int = 700
    message_words: int = 40
    reply_tokens: int = 16


class ScriptedChat:
    """One chat: the shared system prompt, the user's messages, and the model's answers."""

    def __init__(self, number: int, setup: SwitchSetup) -> None:
        self.number = number
        self.setup = setup
        self.messages: list[Message] = [{"role": "system", "content": words(setup.system_words, "system")}]

    def ask(self, turn: int) -> list[Message]:
        content = words(self.setup.message_words, f"user {self.number} {turn}")
        self.messages.append({"role": "user", "content": content})
        return list(self.messages)

    def add_reply(self, reply: str) -> None:
        self.messages.append({"role": "assistant", "content": reply})
