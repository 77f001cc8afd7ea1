"""What every server is asked: continuing texts, reading new prompts, and many at once.

The texts are the same for all servers, and new in every round and every run, so that no server has them in its cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from bough.bench.peers.client import Peer, PeerError, Received
from bough.bench.workload import SwitchSetup, words

FIRST_TOKENS = 4  # of an answer whose first token is wanted
TOKENS_PER_WORD = 1.3  # if no server tells how long a prompt is


@dataclass(frozen=True)
class PeerSetup:
    """The sizes of all workloads. Prompts have about so many tokens."""

    rounds: int = 3
    answer_tokens: int = 64
    contexts: Sequence[int] = (32, 500)
    prefills: Sequence[int] = (512, 2000)
    streams: Sequence[int] = (4, 8)
    switch: SwitchSetup = field(default_factory=lambda: SwitchSetup(turns=4))
    limit_s: float = 1200.0  # for everything; what is not measured by then has failed


@dataclass(frozen=True)
class Value:
    """What one measurement gave, in the unit of its case, and how many tokens the server counted in the prompt."""

    value: float
    prompt_tokens: int | None = None


class Case(Protocol):
    """One thing to measure. With `is_rate`, more is better; otherwise less is."""

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str: ...

    @property
    def is_rate(self) -> bool: ...

    @property
    def context_tokens(self) -> int:
        """About how many tokens the text should have."""
        ...

    def measure(self, peer: Peer, text: str) -> Value:
        """Ask once, with a text that starts with words that no server has seen. Raises PeerError."""
        ...


@dataclass(frozen=True)
class Texts:
    """Texts of about a number of tokens. `run` is different in every run of the benchmark."""

    run: str
    tokens_per_word: float = TOKENS_PER_WORD

    def make(self, num_tokens: int, seed: str) -> str:
        seed = f"{self.run} {seed}"
        return f"{seed}: {words(max(1, round(num_tokens / self.tokens_per_word) - 4), seed)}"


@dataclass(frozen=True)
class DecodeCase:
    """The speed of one stream after its first token."""

    context_tokens: int
    answer_tokens: int
    unit: str = "tokens/s"
    is_rate: bool = True

    @property
    def name(self) -> str:
        return f"decode after {self.context_tokens:,} tokens"

    def measure(self, peer: Peer, text: str) -> Value:
        received = peer.complete(text, self.answer_tokens)
        note_short(peer, received, self.answer_tokens)
        if received.tokens_per_s is None:
            raise PeerError(f"{peer.name}: the answer has {received.tokens} tokens in one piece, and no speed")
        return Value(received.tokens_per_s, received.prompt_tokens)


@dataclass(frozen=True)
class PrefillCase:
    """The time to the first token of a prompt that nobody has seen."""

    context_tokens: int
    unit: str = "ms"
    is_rate: bool = False

    @property
    def name(self) -> str:
        return f"first token of {self.context_tokens:,} new tokens"

    def measure(self, peer: Peer, text: str) -> Value:
        received = peer.complete(text, FIRST_TOKENS)
        return Value(1000 * received.first_s, received.prompt_tokens)


@dataclass(frozen=True)
class ManyCase:
    """The tokens of several streams that start together, divided by the time until the last has ended."""

    num_streams: int
    answer_tokens: int
    context_tokens: int = 32
    unit: str = "tokens/s"
    is_rate: bool = True

    @property
    def name(self) -> str:
        return f"{self.num_streams} streams at once"

    def measure(self, peer: Peer, text: str) -> Value:
        with ThreadPoolExecutor(self.num_streams) as pool:
            started_s = time.perf_counter()
            asked = [
                pool.submit(peer.complete, f"{number} {text}", self.answer_tokens) for number in range(self.num_streams)
            ]
            answers = [each.result() for each in asked]
            took_s = time.perf_counter() - started_s
        for received in answers:
            note_short(peer, received, self.answer_tokens)
        return Value(sum(each.tokens for each in answers) / took_s, answers[0].prompt_tokens)


def make_cases(setup: PeerSetup) -> list[DecodeCase | PrefillCase | ManyCase]:
    """All cases but switching, in the order in which they run."""
    return [
        *(DecodeCase(each, setup.answer_tokens) for each in setup.contexts),
        *(PrefillCase(each) for each in setup.prefills),
        *(ManyCase(each, setup.answer_tokens) for each in setup.streams),
    ]


def note_short(peer: Peer, received: Received, wanted: int) -> None:
    """Say that an answer ended early: the server does not know `ignore_eos`."""
    if received.tokens < 0.9 * wanted:
        peer.note(f"ended an answer after {received.tokens} of {wanted} tokens")


def measure_tokens_per_word(peer: Peer) -> float:
    """How many tokens a word of the texts has, as this server counts; a usual number if it does not tell."""
    num_words = 200
    received = peer.complete(words(num_words, "length"), 1)
    return received.prompt_tokens / num_words if received.prompt_tokens else TOKENS_PER_WORD
