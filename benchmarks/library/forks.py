"""Many forks of one long chat: what is computed, what is reused, and what the tree holds afterwards.

The tree should hold each distinct token once: one prefix, and a tail for each fork. How many tokens are distinct is counted
here from the prompts and the answers, without the tree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from bough.bench.workload import words
from bough.runner import Chat, Runner
from bough.tokens import common_prefix, pack

_QUESTION_WORDS = 12


@dataclass(frozen=True)
class ForkSetup:
    """How many forks there are, of how long a chat, and how many tokens each answers with."""

    forks: int = 64
    prefix_tokens: int = 2000
    tokens: int = 16


@dataclass(frozen=True)
class ForkFigures:
    """The forks' requests, and the tree after them. Lanes are not part of the tree: their bytes are told apart.

    `distinct_prompt_tokens` are the tokens of all prompts, where what several have in common counts once;
    `distinct_tokens` are those of prompts and answers, and `row_bytes` what their rows take.
    """

    forks: int
    prefix_tokens: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    distinct_prompt_tokens: int
    tree_tokens: int
    distinct_tokens: int
    tree_bytes: int
    row_bytes: int
    lane_bytes_before: int
    lane_bytes: int
    seconds: float

    @property
    def tail_tokens(self) -> int:
        """What the tree holds besides the prefix."""
        return self.tree_tokens - self.prefix_tokens

    @property
    def prefixes_computed(self) -> float:
        """How often the prefix was computed, if every tail was computed once."""
        tails = self.distinct_prompt_tokens - self.prefix_tokens
        return (self.computed_tokens - tails) / self.prefix_tokens


def measure_forks(runner: Runner, setup: ForkSetup) -> ForkFigures:
    """Fork a long chat, and send a message in all forks at once. The tree is cleared before."""
    runner.cache.clear()
    before = runner.cache.stats()
    chats = _long_chat(runner, setup.prefix_tokens).fork(setup.forks)
    questions = [words(_QUESTION_WORDS, f"fork {number}") for number in range(setup.forks)]
    started_s = time.perf_counter()
    answers = runner.send_all(chats, questions, max_tokens=setup.tokens, ignore_eos=True)
    seconds = time.perf_counter() - started_s
    prompts = [runner.tokenize(chat.messages[:-1]) for chat in chats]
    rows = [[*prompt, *answer.token_ids[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    after, distinct_tokens = runner.cache.stats(), count_distinct(rows)
    return ForkFigures(
        setup.forks,
        min(common_prefix(pack(prompts[0]), pack(other)) for other in prompts[1:]),
        sum(answer.usage.prompt_tokens for answer in answers),
        sum(answer.usage.cached_tokens for answer in answers),
        sum(answer.usage.computed_tokens for answer in answers),
        count_distinct(prompts),
        after["tokens"],
        distinct_tokens,
        after["tree_bytes"],
        distinct_tokens * sum(group.bytes_per_token for group in runner.runtime.engine.groups),
        before["lane_bytes"],
        after["lane_bytes"],
        round(seconds, 2),
    )


def _long_chat(runner: Runner, num_tokens: int) -> Chat:
    """A chat whose system prompt has so many tokens."""
    ids = runner.tokenize(words(num_tokens, "forks"), raw=True)
    return runner.chat(system=runner.detokenize(ids[:num_tokens]))


def count_distinct(sequences: Iterable[list[int]]) -> int:
    """How many tokens a tree of these sequences has: what several begin with counts once."""
    ordered = sorted(sequences)  # so that each has most in common with the one before
    shared = sum(common_prefix(pack(one), pack(other)) for one, other in pairwise(ordered))
    return sum(map(len, ordered)) - shared
