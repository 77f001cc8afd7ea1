"""`bough bench switch`: several conversations take turns over one system prompt, with each strategy."""

from __future__ import annotations

import math
import statistics
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from bough.bench.alone import SingleRequests
from bough.bench.report import drawing
from bough.bench.strategies import STRATEGIES, make_strategy
from bough.bench.workload import ScriptedChat, SwitchSetup, words
from bough.cache.tree.trie import NoMemory, Trie
from bough.runtime import Runtime
from bough.tokens import pack
from bough.types import Chunk, Completion, Message

OVERHEAD_PROMPTS = 4
OVERHEAD_WORDS = 350

_COLUMNS = ("later turns", "first turns", "reused", "possible", "total", "kept for later")


@dataclass(frozen=True)
class SwitchTurn:
    """One request of the workload: its counts and times. `possible_tokens` are those that an unlimited tree would reuse."""

    conversation: int
    turn: int
    prompt_tokens: int
    possible_tokens: int
    cached_tokens: int
    first_token_s: float
    total_s: float

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@dataclass
class StrategyResult:
    """All turns with one strategy. `replies` are the generated ids, for comparison."""

    name: str
    turns: list[SwitchTurn] = field(default_factory=list)
    kept_bytes: int = 0
    replies: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def later(self) -> list[SwitchTurn]:
        """The turns after each conversation's first."""
        return [turn for turn in self.turns if turn.turn > 0]

    def as_dict(self) -> dict[str, float]:
        later = self.later
        prompt = sum(turn.prompt_tokens for turn in later) or 1
        return {
            "later_ttft_ms": round(1000 * _median([turn.first_token_s for turn in later]), 2),
            "first_ttft_ms": round(1000 * _median([turn.first_token_s for turn in self.turns if turn.turn == 0]), 2),
            "reused_share": round(sum(turn.cached_tokens for turn in later) / prompt, 5),
            "possible_share": round(sum(turn.possible_tokens for turn in later) / prompt, 5),
            "total_s": round(sum(turn.total_s for turn in self.turns), 3),
            "bytes": self.kept_bytes,
        }


def _median(values: list[float]) -> float:
    return statistics.median(values) if values else 0.0


class Oracle:
    """Computes what an unlimited tree could reuse, with a trie of ids alone."""

    def __init__(self) -> None:
        self._trie = Trie(NoMemory())

    def possible(self, prompt: list[int]) -> int:
        return min(self._trie.match(prompt).length, len(prompt) - 1)

    def add(self, tokens: list[int]) -> None:
        found = self._trie.match(tokens)
        if found.length < len(tokens):
            node = found.node
            if found.length < node.end:
                node = self._trie.split(node, found.length)
            self._trie.append(node, pack(tokens[found.length :]))


class StrategyRun:
    """Conversations that take turns with one strategy: asks, and counts what each turn cost."""

    def __init__(self, name: str, runtime: Runtime) -> None:
        self.strategy = make_strategy(name, runtime)
        self.result = StrategyResult(name)
        self._prompts = runtime.prompts
        self._alone = SingleRequests(runtime, self.strategy)
        self._oracle = Oracle()

    def ask(self, chat: int, turn: int, messages: list[Message], **sampling: Any) -> Iterator[Chunk | Completion]:
        """Yield the pieces of the answer, then its completion, which is noted. `sampling` is that of `SamplingParams`."""
        ids = self._prompts.encode(messages).tokens.ids
        for piece in self._alone.stream(messages, **sampling):
            if isinstance(piece, Completion):
                self._note(chat, turn, ids, piece)
            yield piece

    def _note(self, chat: int, turn: int, ids: list[int], answer: Completion) -> None:
        usage, timings, possible = answer.usage, answer.timings, self._oracle.possible(ids)
        times = (timings.first_token_s, timings.total_s)
        self.result.turns.append(SwitchTurn(chat, turn, usage.prompt_tokens, possible, usage.cached_tokens, *times))
        self.result.replies.append(answer.token_ids)
        self.result.kept_bytes = self.strategy.kept_bytes
        has_ended_itself = answer.finish_reason == "stop" and answer.stop is None
        fed_ids = answer.token_ids if has_ended_itself else answer.token_ids[:-1]  # the last one was not evaluated
        self._oracle.add([*ids, *fed_ids])


def run_strategy(name: str, runtime: Runtime, setup: SwitchSetup) -> Iterator[StrategyResult]:
    """Run the workload with one strategy, and yield the result so far after each turn."""
    run = StrategyRun(name, runtime)
    conversations = [ScriptedChat(number, setup) for number in range(setup.conversations)]
    for turn in range(setup.turns):
        for chat in conversations:
            *_, answer = run.ask(chat.number, turn, chat.ask(turn), max_tokens=setup.reply_tokens, ignore_eos=True)
            chat.add_reply(answer.text)
            yield run.result
    run.strategy.clear()


def measure_overhead(runtime: Runtime, on_step: Callable[[], None] = lambda: None, rounds: int = 3) -> float:
    """The overhead of the tree for prompts that share nothing: total time with the tree, divided by without, − 1.

    The two take turns prompt by prompt, so that a change in the machine's speed affects both. For each prompt the fastest
    round counts.
    """
    sum_s = {"tree": 0.0, "none": 0.0}
    for number in range(OVERHEAD_PROMPTS):
        best_s = dict.fromkeys(sum_s, math.inf)
        for round_number in range(rounds):
            for name in ("tree", "none") if round_number % 2 else ("none", "tree"):
                best_s[name] = min(best_s[name], _time_alone(name, runtime, number))
                on_step()
        for name in sum_s:
            sum_s[name] += best_s[name]
    return sum_s["tree"] / sum_s["none"] - 1


def _time_alone(name: str, runtime: Runtime, number: int) -> float:
    prompt = f"{number} {words(OVERHEAD_WORDS, f'overhead {number}')}"
    strategy = make_strategy(name, runtime)
    answer = SingleRequests(runtime, strategy).generate(prompt, raw=True, max_tokens=16, ignore_eos=True)
    strategy.clear()
    return answer.timings.total_s


def as_report(runtime: Runtime, setup: SwitchSetup, results: dict[str, StrategyResult], overhead: float) -> dict[str, Any]:
    """The whole run as plain data: set-up, one entry for each strategy, and the overhead."""
    about = {
        "model": runtime.files.name if runtime.files else "",
        "workload": "switch",
        **setup.__dict__,
        "shares": "of the prompt tokens of later turns",
        **runtime.engine.describe(),
    }
    same = all(result.replies == results["tree"].replies for result in results.values()) if "tree" in results else None
    return {
        "setup": about | {"answers_equal": same},
        "strategies": {name: result.as_dict() for name, result in results.items()},
        "no_reuse_overhead": round(overhead, 4),
    }


def strategy_table(results: dict[str, StrategyResult]) -> Table:
    """One row for each strategy: times to the first token, shares, seconds, bytes."""
    table = Table(title="time to first token (median), by strategy", title_justify="left")
    table.add_column("strategy")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for name, result in results.items():
        figures = result.as_dict()
        table.add_row(
            STRATEGIES[name],
            f"{figures['later_ttft_ms']:,.0f} ms",
            f"{figures['first_ttft_ms']:,.0f} ms",
            f"{figures['reused_share']:.1%}",
            f"{figures['possible_share']:.1%}",
            f"{figures['total_s']:.1f} s",
            f"{figures['bytes'] / 2**20:,.1f} MiB",
        )
    return table


def turn_table(results: dict[str, StrategyResult]) -> Table:
    """One row for each turn: its counts with the tree, and the times of all strategies."""
    table = Table(title="turn by turn", title_justify="left")
    for column in ("turn", "chat", "prompt", "cached", "computed"):
        table.add_column(column, justify="right")
    others = [name for name in results if name != "tree"]
    for name in ("tree", *others):
        table.add_column(f"first token, {STRATEGIES[name]}", justify="right")
    for number, turn in enumerate(results["tree"].turns):
        turns = [turn, *(results[name].turns[number] for name in others)]
        counts = map("{:,}".format, (turn.prompt_tokens, turn.cached_tokens, turn.computed_tokens))
        times = (f"{1000 * each.first_token_s:,.0f} ms" for each in turns)
        table.add_row(str(turn.turn + 1), string.ascii_uppercase[turn.conversation % 26], *counts, *times)
    return table


def plot_switch(results: dict[str, StrategyResult], file: Path) -> None:
    """Time to first token by turn, one line for each strategy, as a PNG. Raises RequestError if it cannot be written."""
    with drawing(file) as figure:
        axes = figure.subplots()
        for name, result in results.items():
            turns = range(1, len(result.turns) + 1)
            axes.plot(turns, [1000 * turn.first_token_s for turn in result.turns], marker=".", label=STRATEGIES[name])
        axes.set(xlabel="request", ylabel="time to first token, ms", yscale="log", title="Conversations taking turns")
        axes.grid(alpha=0.3, which="both")
        axes.legend()
