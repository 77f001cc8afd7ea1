"""A conversation of 2,000 tokens comes back from a slow disk while answers stream.

At 40 MB/s reading is quicker than computing, at 10 MB/s it is not. Either way the prefix is in memory afterwards: the
conversation is asked a second and a third time, after others have taken its lane. Beside it one whose prompt nobody
has asked before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gaps.figures import GapCase, GapFigures
from benchmarks.gaps.server import IDLE_LANES, Asked, Server, running_server
from benchmarks.gaps.slow_server import DiskSpeed
from benchmarks.gaps.streams import GapStreams
from bough.bench.workload import words
from bough.types import Message

PART = "loading"
FAST_MB_S, SLOW_MB_S = 40, 10
QUIET_S = 15.0

_TURNS = 10
_MESSAGE_WORDS = 84  # comes to 2,000 tokens with the default model
_AFTER_S = 0.5
_ON_DISK = {FAST_MB_S: ("first", "second"), SLOW_MB_S: ("third",)}  # conversations


def measure_loading(model: str, folder: Path) -> Iterator[GapCase]:
    """Compute the conversations, then start again for each speed, so that they lie on disk alone."""
    with running_server(model, folder) as server:
        for names in _ON_DISK.values():
            for name in names:
                server.warm(_conversation(name))
    for mb_s, names in _ON_DISK.items():
        with running_server(model, folder, speed=DiskSpeed(read_bytes_s=1e6 * mb_s)) as server:
            # What is computed under another salt reads nothing: the server learns how quickly it computes, not the disk.
            rate = server.ask(_question(_conversation("rate")[:6], "rate"), salt=f"rate-{mb_s}")
            with GapStreams(server.url, model) as streams:
                yield from _Loading(server, streams, mb_s, rate).run(names)


class _Loading:
    """What is asked at one speed of the disk."""

    def __init__(self, server: Server, streams: GapStreams, mb_s: int, rate: Asked) -> None:
        self._server, self._streams, self._mb_s = server, streams, mb_s
        self._tokens_s = round(rate.log["computed_tokens"] / rate.first_token_s)  # computed alone, before the streams

    def run(self, names: Sequence[str]) -> Iterator[GapCase]:
        known = [_conversation(name) for name in names]
        yield self._ask("on disk", [_question(messages, "once") for messages in known])
        for what in ("in memory", "in memory, third time"):
            self._take_idle_lanes()
            yield self._ask(what, [_question(messages, what) for messages in known])
        if self._mb_s == SLOW_MB_S:
            yield self._ask("unknown", [_question(_conversation("unknown"), "once")])

    def _take_idle_lanes(self) -> None:
        """Let other prompts, under another salt, take the lanes that the streams leave."""
        for number in range(IDLE_LANES):
            self._server.ask(_question([], f"other {number}"), salt="others")

    def _ask(self, what: str, prompts: list[list[Message]]) -> GapCase:
        quiet, gaps, asked = self._streams.rest(QUIET_S), list[float](), list[Asked]()
        for messages in prompts:
            with self._streams.watch(gaps):
                asked.append(self._server.ask(messages))
                time.sleep(_AFTER_S)
        name, facts = f"{self._mb_s} MB/s, prompt {what}", _describe(asked) | {"alone_tokens_s": self._tokens_s}
        return GapCase(PART, name, quiet, GapFigures.of(gaps), _note(asked), self._streams.add_facts(facts))


def _note(asked: Sequence[Asked]) -> str:
    """What came of the last request; the first ones may have taught the server how slow the disk is."""
    last = asked[-1]
    first_ms = 1000 * statistics.median(each.first_token_s for each in asked)
    read_mb, cached = last.counts.get("loaded_bytes disk", 0) / 1e6, last.counts.get("prompt_tokens cached", 0)
    of = f"of {last.log['prompt_tokens']:,} tokens {cached:,} cached, {_recomputed(last):,} known and recomputed"
    return f"first token {first_ms:,.0f} ms; {of}; {read_mb:.0f} MB read"


def _describe(asked: Sequence[Asked]) -> dict[str, Any]:
    times_ms = [round(1000 * each.first_token_s, 1) for each in asked]
    return {
        "first_token_ms": statistics.median(times_ms),
        "first_token_each_ms": times_ms,
        "recomputed_tokens": [_recomputed(each) for each in asked],
        "metrics": [each.counts for each in asked],
        "log": [each.log for each in asked],
    }


def _recomputed(asked: Asked) -> int:
    """The tokens that the tree knew and the server computed again."""
    return asked.counts.get("prompt_tokens matched", 0) - asked.counts.get("prompt_tokens cached", 0)


def _conversation(name: str) -> list[Message]:
    roles = ("user", "assistant") * _TURNS
    return [{"role": role, "content": words(_MESSAGE_WORDS, f"{name} {turn}")} for turn, role in enumerate(roles)]


def _question(messages: list[Message], name: str) -> list[Message]:
    return [*messages, {"role": "user", "content": words(12, f"question {name}")}]
