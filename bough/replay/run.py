"""Replays one trace with one policy and one budget. Lists the policies by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bough.cache.residency.policy import LRU, LRU2, WHOLE_NODES
from bough.replay.belady import BeladyTree
from bough.replay.recurrent import PlacedTree, SpacedTree
from bough.replay.strategies import ReplayCopies, ReplaySingleEntry, ReplayStrategy, ReplayTree
from bough.replay.trace import Trace
from bough.types import Mark

POLICIES: dict[str, Callable[[Trace, int], ReplayStrategy]] = {
    "duel": lambda trace, budget: ReplayTree(budget),
    "lru": lambda trace, budget: ReplayTree(budget, LRU),
    "lru2": lambda trace, budget: ReplayTree(budget, LRU2),
    "nodes": lambda trace, budget: ReplayTree(budget, WHOLE_NODES),
    "copies": lambda trace, budget: ReplayCopies(budget),
    "single": lambda trace, budget: ReplaySingleEntry(budget),
    "belady": lambda trace, budget: BeladyTree(budget, trace),
    "placed": lambda trace, budget: PlacedTree(trace, budget),
    "placed-chat": lambda trace, budget: PlacedTree(trace, budget, marks=tuple(Mark)),
    "spaced-512": lambda trace, budget: SpacedTree(trace, budget, 512),
    "spaced-2048": lambda trace, budget: SpacedTree(trace, budget, 2048),
    "spaced-8192": lambda trace, budget: SpacedTree(trace, budget, 8192),
}
"""Makes each strategy for a trace and a budget in blocks. The library uses the first.

From `placed` on, the model has recurrent layers besides full attention. For such models the library works like `placed` for
prompts of ids, and like `placed-chat` for messages.
"""


@dataclass(frozen=True)
class Result:
    """The result of one replay: the share of all prompt tokens that was reused, and the number of evicted blocks.

    For a model with recurrent layers also the number of states that were captured, and their share of the held bytes.
    """

    policy: str
    budget: float
    reused_share: float
    evictions: int
    states: int | None = None
    state_share: float | None = None


def replay(trace: Trace, policy: str, budget: float, on_request: Callable[[], object] = lambda: None) -> Result:
    """Replay a renumbered trace with a budget that is a share of its distinct blocks."""
    strategy = POLICIES[policy](trace, max(1, int(budget * trace.num_blocks)))
    reused = 0
    for request in trace.requests:
        reused += strategy.serve(request)
        on_request()
    share = reused * trace.block_tokens / max(1, trace.prompt_tokens)
    result, costs = Result(policy, budget, share, strategy.num_evicted), strategy.state_costs
    return result if costs is None else replace(result, states=costs.num_made, state_share=costs.share)
