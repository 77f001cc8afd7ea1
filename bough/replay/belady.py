"""The offline reference: Belady's rule evicts the leaf whose next use is farthest in the future, known from the trace."""

from __future__ import annotations

from bisect import bisect_right

from bough.cache.residency.policy import Key, Policy
from bough.cache.tree.node import Node
from bough.cache.tree.tokens import cut, unpack
from bough.replay.strategies import ReplayTree
from bough.replay.trace import Trace, TraceRequest


class Future:
    """The requests in which each block will be used."""

    def __init__(self, trace: Trace) -> None:
        self.now = -1  # the number of the current request
        self._uses: dict[int, list[int]] = {}
        for number, request in enumerate(trace.requests):
            for block in request.prompt:
                self._uses.setdefault(block, []).append(number)

    def next_use(self, block: int) -> float:
        """The number of the next request that uses a block; infinite if there is none."""
        uses = self._uses.get(block, [])
        at = bisect_right(uses, self.now)
        return uses[at] if at < len(uses) else float("inf")

    def leaf_belady(self, node: Node) -> Key:
        """Evict the leaf whose last block has the latest next use; of equals the deepest."""
        (last,) = unpack(cut(node.edge, -1))
        return (-self.next_use(last), -node.end)


class BeladyTree:
    """The real cache with Belady's rule."""

    state_costs = None

    def __init__(self, budget: int, trace: Trace) -> None:
        self._future = Future(trace)
        self._tree = ReplayTree(budget, Policy(self._future.leaf_belady))

    @property
    def num_evicted(self) -> int:
        return self._tree.num_evicted

    def serve(self, request: TraceRequest) -> int:
        self._future.now += 1
        return self._tree.serve(request)
