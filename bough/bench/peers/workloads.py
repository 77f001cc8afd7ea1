"""The workloads: continuing texts, reading new prompts, many streams at once, and conversations that take turns.

The texts are the same for all servers, and new in every round and every run, so that no server has them in its cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from bough.bench.peers.client import Peer, PeerError
from bough.bench.server import ReceivedAnswer
from bough.bench.workload import ScriptedChat, SwitchSetup, words

FIRST_TOKENS = 4  # of an answer whose first token is measured
MANY_CONTEXT_TOKENS = 32
TOKENS_PER_WORD = 1.3  # if no server says how long a prompt is


@dataclass(frozen=True)
class PeerSetup:
    """The sizes of all workloads. Prompts have about this many tokens."""

    rounds: int = 3
    answer_tokens: int = 64
    contexts: Sequence[int] = (32, 500)
    prefills: Sequence[int] = (512, 2000)
    streams: Sequence[int] = (4, 8)
    switch: SwitchSetup = field(default_factory=lambda: SwitchSetup(turns=4))
    limit_s: float = 1200.0  # for everything; all later requests fail


@dataclass(frozen=True)
class MeasuredValue:
    """The result of one measurement, in the unit of its case, and the tokens that the server counted in the prompt."""

    value: float
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class PeerCase:
    """One thing to measure. With `is_rate`, more is better; otherwise less is.

    `measure` asks once, with a text of about `context_tokens` that starts with words that no server has seen. It raises
    PeerError.
    """

    name: str
    unit: str
    is_rate: bool
    context_tokens: int
    measure: Callable[[Peer, str], MeasuredValue]


@dataclass(frozen=True)
class Texts:
    """Texts of about a number of tokens. `run` is different in every run of the benchmark."""

    run: str
    tokens_per_word: float = TOKENS_PER_WORD

    def make(self, num_tokens: int, seed: str) -> str:
        seed = f"{self.run} {seed}"
        return f"{seed}: {words(max(1, round(num_tokens / self.tokens_per_word) - 4), seed)}"


def make_cases(setup: PeerSetup) -> list[PeerCase]:
    """All cases but switching, in the order in which they run."""
    rate, tokens = "tokens/s", setup.answer_tokens
    return [
        *(PeerCase(f"decode after {n:,} tokens", rate, True, n, partial(_decode, tokens)) for n in setup.contexts),
        *(PeerCase(f"first token of {n:,} new tokens", "ms", False, n, _prefill) for n in setup.prefills),
        *(
            PeerCase(f"{n} streams at once", rate, True, MANY_CONTEXT_TOKENS, partial(_decode_many, n, tokens))
            for n in setup.streams
        ),
    ]


def _decode(answer_tokens: int, peer: Peer, text: str) -> MeasuredValue:
    """The speed of one stream after its first token."""
    received = peer.complete(text, answer_tokens)
    _note_short(peer, received, answer_tokens)
    if received.tokens_per_s is None:
        raise PeerError(f"{peer.name}: the answer has {received.tokens} tokens in one piece, and no speed")
    return MeasuredValue(received.tokens_per_s, received.prompt_tokens)


def _prefill(peer: Peer, text: str) -> MeasuredValue:
    received = peer.complete(text, FIRST_TOKENS)
    return MeasuredValue(1000 * received.first_s, received.prompt_tokens)


def _decode_many(num_streams: int, answer_tokens: int, peer: Peer, text: str) -> MeasuredValue:
    """The tokens of several streams that start together, divided by the time until the last has ended."""
    with ThreadPoolExecutor(num_streams) as pool:
        started_s = time.perf_counter()
        asked = [pool.submit(peer.complete, f"{number} {text}", answer_tokens) for number in range(num_streams)]
        answers = [each.result() for each in asked]
        took_s = time.perf_counter() - started_s
    for received in answers:
        _note_short(peer, received, answer_tokens)
    return MeasuredValue(sum(each.tokens for each in answers) / took_s, answers[0].prompt_tokens)


def _note_short(peer: Peer, received: ReceivedAnswer, wanted: int) -> None:
    """Note an answer that ended early: the server does not know `ignore_eos`."""
    if received.tokens < 0.9 * wanted:
        peer.note(f"ended an answer after {received.tokens} of {wanted} tokens")


def measure_tokens_per_word(peer: Peer) -> float:
    """The tokens of a word of the texts, as this server counts them; a usual number if it does not say."""
    num_words = 200
    received = peer.complete(words(num_words, "length"), 1)
    return received.prompt_tokens / num_words if received.prompt_tokens else TOKENS_PER_WORD


@dataclass
class SwitchRun:
    """Conversations over one long system prompt on one server; `failure` says why they ended early."""

    chats: list[ScriptedChat]
    later: list[ReceivedAnswer] = field(default_factory=list)
    total_s: float = 0.0
    failure: str = ""

    @property
    def first_token_ms(self) -> float | None:
        """The median over the turns after each conversation's first."""
        return 1000 * statistics.median(each.first_s for each in self.later) if self.later else None

    @property
    def cached_share(self) -> float | None:
        """The cached share of the prompt tokens of later turns; None if the server does not say."""
        prompt = sum(each.prompt_tokens or 0 for each in self.later)
        if not prompt or any(each.cached_tokens is None for each in self.later):
            return None
        return sum(each.cached_tokens or 0 for each in self.later) / prompt


def run_switching(
    peers: Sequence[Peer], setup: SwitchSetup, run: str, on_turn: Callable[[], None] = lambda: None
) -> dict[str, SwitchRun]:
    """Run all conversations, turn by turn; the servers take turns with each request.

    `run` begins the system prompt, and is different in every run of the benchmark.
    """
    runs = {peer.name: SwitchRun([ScriptedChat(n, setup) for n in range(setup.conversations)]) for peer in peers}
    for chat in (chat for each in runs.values() for chat in each.chats):
        chat.messages[0]["content"] = f"{run} {chat.messages[0]['content']}"
    for turn in range(setup.turns):
        for number in range(setup.conversations):
            for peer in peers:
                if not runs[peer.name].failure:
                    _ask(peer, runs[peer.name], number, turn, setup)
            on_turn()
    return runs


def _ask(peer: Peer, run: SwitchRun, number: int, turn: int, setup: SwitchSetup) -> None:
    try:
        received = peer.chat(run.chats[number].ask(turn), setup.reply_tokens)
    except PeerError as error:
        run.failure = str(error)
        return
    run.chats[number].add_reply(received.text)
    run.total_s += received.last_s
    if turn > 0:
        run.later.append(received)
