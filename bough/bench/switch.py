"""`bough bench switch`: several conversations take turns over one system prompt, with each strategy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bough.bench.alone import Alone
from bough.bench.strategies import make_strategy
from bough.bench.workload import ScriptedChat, SwitchSetup, words
from bough.cache.tree.tokens import pack
from bough.cache.tree.trie import NoMemory, Trie
from bough.runtime import Runtime
from bough.types import Completion

OVERHEAD_PROMPTS = 4
OVERHEAD_WORDS = 350


@dataclass(frozen=True)
class Turn:
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
    turns: list[Turn] = field(default_factory=list)
    kept_bytes: int = 0
    replies: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def later(self) -> list[Turn]:
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


def run_strategy(name: str, runtime: Runtime, setup: SwitchSetup) -> Iterator[tuple[StrategyResult, Turn]]:
    """Run the workload with one strategy, and yield after each turn."""
    strategy = make_strategy(name, runtime)
    alone, oracle, result = Alone(runtime, strategy), Oracle(), StrategyResult(name)
    conversations = [ScriptedChat(number, setup) for number in range(setup.conversations)]
    for turn in range(setup.turns):
        for conversation in conversations:
            ids = list(runtime.prompts.encode(conversation.ask(turn)).ids)
            answer = alone.generate(conversation.messages, max_tokens=setup.reply_tokens, ignore_eos=True)
            conversation.add_reply(answer.text)
            result.turns.append(make_turn(conversation.number, turn, oracle.possible(ids), answer))
            result.replies.append(answer.token_ids)
            result.kept_bytes = strategy.kept_bytes
            oracle.add([*ids, *fed_tokens(answer)])
            yield result, result.turns[-1]
    strategy.clear()


def fed_tokens(answer: Completion) -> tuple[int, ...]:
    """The generated tokens that the lane evaluated: all if the model ended its answer itself, else all but the last."""
    ended_itself = answer.finish_reason == "stop" and answer.stop is None
    return answer.token_ids if ended_itself else answer.token_ids[:-1]


def make_turn(conversation: int, turn: int, possible: int, answer: Completion) -> Turn:
    """The counts and times of one answer."""
    usage, timings = answer.usage, answer.timings
    return Turn(
        conversation,
        turn,
        usage.prompt_tokens,
        possible,
        usage.cached_tokens,
        timings.first_token_s,
        timings.total_s,
    )


def measure_overhead(runtime: Runtime, on_step: Callable[[], None] = lambda: None, rounds: int = 3) -> float:
    """The overhead of the tree for prompts that share nothing: total time with the tree, divided by without, − 1.

    The two take turns prompt by prompt, so that a change in the machine's speed affects both. For each prompt the fastest
    round counts.
    """
    best: dict[str, list[float]] = {"tree": [], "none": []}
    for number in range(OVERHEAD_PROMPTS):
        times: dict[str, list[float]] = {"tree": [], "none": []}
        for round_number in range(rounds):
            order = ("tree", "none") if round_number % 2 else ("none", "tree")
            for name in order:
                times[name].append(_time_alone(name, runtime, number))
                on_step()
        for name, values in times.items():
            best[name].append(min(values))
    return sum(best["tree"]) / sum(best["none"]) - 1


def _time_alone(name: str, runtime: Runtime, number: int) -> float:
    prompt = f"{number} {words(OVERHEAD_WORDS, f'overhead {number}')}"
    strategy = make_strategy(name, runtime)
    answer = Alone(runtime, strategy).generate(prompt, raw=True, max_tokens=16, ignore_eos=True)
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
