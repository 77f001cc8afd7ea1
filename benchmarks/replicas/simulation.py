"""Replays a trace over several replicas, each with a cache of its own, and one way to choose between them.

A simulation of events: requests arrive at the trace's times, scaled so that computing all of it without reuse would take a
given share of what the replicas can compute. Each replica has one server, which takes requests in their order, and computes
what the real cache does not have. Replies are decoded beside that, and end later. Replicas tell the router what has changed
in their trees, a moment later.

The scaling shortens the pauses between turns as well: with many replicas a turn may come before the one before has ended.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.replicas.replica import SimulatedReplica
from benchmarks.replicas.routes import LongestPrefix, PowerOfTwo, RoundRobin, Route, SoonestRoute
from bough.replay.trace import Trace, TraceRequest
from bough.routing.page_reports import INTERVAL_S

PREFILL_TOKENS_S = 40_000.0
"""An 8B model on an H200: 8,192 tokens in 205 ms."""

STORE_TOKENS_S = 95_000.0
"""The same model in bfloat16, 128 KiB a token, over a network of 100 Gbit/s."""

REPLY_TOKEN_S = 0.01
"""What a token of a reply takes, beside others. Meanwhile the request counts as under way."""

BOUND = "bound"
"""One tree with the memory of all replicas, in front of all their servers."""


@dataclass(frozen=True)
class ClusterSetup:
    """How many replicas there are, the share of all distinct blocks that fits into all of them, and what work costs.

    With `is_budget_each` that share fits into each of them.
    """

    num_replicas: int
    budget: float
    is_budget_each: bool = False
    load: float = 0.7
    prefill_tokens_s: float = PREFILL_TOKENS_S
    store_tokens_s: float = STORE_TOKENS_S
    reply_token_s: float = REPLY_TOKEN_S

    def tree_blocks(self, trace: Trace, num_trees: int) -> int:
        """The blocks that fit into each tree, if so many trees share the memory of all replicas."""
        total = self.budget * trace.num_blocks * (self.num_replicas if self.is_budget_each else 1)
        return max(1, int(total / num_trees))

    def prefill_s(self, num_tokens: int) -> float:
        return num_tokens / self.prefill_tokens_s

    def reply_s(self, request: TraceRequest, block_tokens: int) -> float:
        """What a reply takes. Only its whole blocks are known, which are right on average."""
        return (len(request.stored) - len(request.prompt)) * block_tokens * self.reply_token_s

    def time_scale(self, trace: Trace) -> float:
        """What the trace's times are multiplied by."""
        work_s = self.prefill_s(trace.prompt_tokens)
        lasts_s = trace.requests[-1].time_s - trace.requests[0].time_s
        return work_s / (self.num_replicas * self.load * lasts_s) if lasts_s else 1.0


ROUTES: dict[str, Callable[[ClusterSetup, Trace], Route]] = {
    "soonest": lambda setup, trace: SoonestRoute(setup.num_replicas, trace.block_tokens, setup.prefill_s(1)),
    "soonest-copying": lambda setup, trace: SoonestRoute(
        setup.num_replicas, trace.block_tokens, setup.prefill_s(1), 1 / setup.store_tokens_s
    ),
    "longest-prefix": lambda setup, trace: LongestPrefix(setup.num_replicas, trace.block_tokens),
    "power-of-two": lambda setup, trace: PowerOfTwo(setup.num_replicas),
    "round-robin": lambda setup, trace: RoundRobin(setup.num_replicas),
}
"""Makes each way to choose a replica. Bough uses the first, or with a store the second."""


@dataclass(frozen=True)
class ClusterResult:
    """The result of one replay over several replicas.

    `first_token_s` is the mean of the simulated times to the first token, and `predicted_s` of those that the router
    predicted. `busy_share` is the mean share of the time in which a replica computes, `imbalance` the busiest replica's
    share divided by the mean.
    """

    route: str
    num_replicas: int
    reused_share: float
    first_token_s: float
    p95_s: float
    busy_share: float
    imbalance: float
    predicted_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class _Tally:
    """What is counted while a trace is replayed."""

    reused_blocks: int = 0
    waits_s: list[float] = field(default_factory=list)
    predicted_s: list[float] = field(default_factory=list)

    def result(self, name: str, trace: Trace, setup: ClusterSetup, busy_s: list[float], ends_s: float) -> ClusterResult:
        mean_s = sum(busy_s) / setup.num_replicas
        return ClusterResult(
            name,
            setup.num_replicas,
            self.reused_blocks * trace.block_tokens / max(1, trace.prompt_tokens),
            statistics.fmean(self.waits_s),
            sorted(self.waits_s)[int(0.95 * len(self.waits_s))],
            mean_s / ends_s if ends_s else 0.0,
            max(busy_s) / mean_s if mean_s else 1.0,
            statistics.fmean(self.predicted_s) if self.predicted_s else None,
        )


class Cluster:
    """Replicas, a way to choose between them, and the events to come."""

    def __init__(self, trace: Trace, setup: ClusterSetup, name: str) -> None:
        num_blocks = setup.tree_blocks(trace, setup.num_replicas)
        self.replicas = [SimulatedReplica(number, num_blocks) for number in range(setup.num_replicas)]
        self.route = ROUTES[name](setup, trace)
        self._trace = trace
        self._setup = setup
        self._name = name
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._num_events = 0
        for replica in self.replicas:
            self.route.told(replica.list_all())

    def run(self, on_request: Callable[[], object] = lambda: None) -> ClusterResult:
        """Replay all requests."""
        scale, start_s = self._setup.time_scale(self._trace), self._trace.requests[0].time_s
        tally, now = _Tally(), 0.0
        for number, request in enumerate(self._trace.requests):
            now = (request.time_s - start_s) * scale
            self._advance(now)
            self._serve(number, request, now, tally)
            on_request()
        ends_s = max([now, *(replica.free_s for replica in self.replicas)])
        self._advance(ends_s + INTERVAL_S)
        return tally.result(self._name, self._trace, self._setup, [each.busy_s for each in self.replicas], ends_s)

    def _serve(self, number: int, request: TraceRequest, now: float, tally: _Tally) -> None:
        chosen = self.route.choose(number, request, now)
        replica = self.replicas[chosen]
        starts_s, copied = max(now, replica.free_s), self.route.copied(number)
        if copied is not None and copied.is_coming:
            starts_s = max(starts_s, self.replicas[copied.source].free_s)
        reused = replica.serve(request, starts_s)
        loaded = max(0, copied.num_blocks - reused) if copied is not None else 0
        reused += loaded
        load_s = loaded * self._trace.block_tokens / self._setup.store_tokens_s
        first_s = starts_s + load_s + self._setup.prefill_s(request.prompt_tokens - reused * self._trace.block_tokens)
        replica.free_s = first_s
        replica.busy_s += first_s - starts_s
        batch = replica.tell(first_s)
        self._at(first_s, lambda: self.route.first_token(number, first_s))
        self._at(first_s + INTERVAL_S, lambda: self.route.told(batch))
        self._at(first_s + self._setup.reply_s(request, self._trace.block_tokens), lambda: self.route.finished(chosen))
        tally.reused_blocks += reused
        tally.waits_s.append(first_s - now)
        if (predicted_s := self.route.predicted_s(number)) is not None:
            tally.predicted_s.append(predicted_s)

    def _at(self, time_s: float, call: Callable[[], object]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, call))

    def _advance(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            heapq.heappop(self._events)[2]()


def replay_bound(trace: Trace, setup: ClusterSetup, on_request: Callable[[], object] = lambda: None) -> ClusterResult:
    """Replay with one tree that has all the memory, and with all servers behind one queue: no routing can do better."""
    tree, free_s = SimulatedReplica(0, setup.tree_blocks(trace, 1)), [0.0] * setup.num_replicas
    scale, tally, busy_s = setup.time_scale(trace), _Tally(), 0.0
    for request in trace.requests:
        now = (request.time_s - trace.requests[0].time_s) * scale
        starts_s = max(now, heapq.heappop(free_s))
        reused = tree.serve(request, starts_s)
        first_s = starts_s + setup.prefill_s(request.prompt_tokens - reused * trace.block_tokens)
        heapq.heappush(free_s, first_s)
        busy_s += first_s - starts_s
        tally.reused_blocks += reused
        tally.waits_s.append(first_s - now)
        on_request()
    return tally.result(BOUND, trace, setup, [busy_s / setup.num_replicas] * setup.num_replicas, max(free_s))


def replay_cluster(
    trace: Trace, setup: ClusterSetup, name: str, on_request: Callable[[], object] = lambda: None
) -> ClusterResult:
    """Replay a renumbered trace over several replicas, or the bound."""
    return replay_bound(trace, setup, on_request) if name == BOUND else Cluster(trace, setup, name).run(on_request)
