"""Conversations that take turns over one long system prompt, on every server: `bough bench http`'s workload."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bough.bench.peers.client import Peer, PeerError, Received
from bough.bench.workload import ScriptedChat, SwitchSetup


@dataclass
class SwitchRun:
    """The answers of one server, by turn; `failure` says why there are no more."""

    chats: list[ScriptedChat]
    later: list[Received] = field(default_factory=list)
    total_s: float = 0.0
    failure: str = ""

    @property
    def first_token_ms(self) -> float | None:
        """The median over the turns after each conversation's first."""
        return 1000 * statistics.median(each.first_s for each in self.later) if self.later else None

    @property
    def cached_share(self) -> float | None:
        """The cached share of the prompt tokens of later turns; None if the server does not tell."""
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
    runs = {peer.name: SwitchRun([_start(number, setup, run) for number in range(setup.conversations)]) for peer in peers}
    for turn in range(setup.turns):
        for number in range(setup.conversations):
            for peer in peers:
                if not runs[peer.name].failure:
                    _ask(peer, runs[peer.name], number, turn, setup)
            on_turn()
    return runs


def _start(number: int, setup: SwitchSetup, run: str) -> ScriptedChat:
    chat = ScriptedChat(number, setup)
    chat.messages[0]["content"] = f"{run} {chat.messages[0]['content']}"
    return chat


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
