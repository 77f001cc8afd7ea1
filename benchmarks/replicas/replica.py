"""A replica in a replay: the real cache, one server that computes, and what it tells the router.

One block of the trace stands for one page. Pages know their block, so that what the cache publishes and evicts can be told.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from bough.cache.tree.state import Group, Page, State, Tier
from bough.replay.engine import GROUP, CountingEngine, CountingLane
from bough.replay.strategies import ReplayTree
from bough.replay.trace import TraceRequest
from bough.routing.page_reports import Outbox, PageMessage, PageNote

ON_DEVICE = PageNote(Tier.DEVICE)


class TellingEngine(CountingEngine):
    """Knows which blocks have pages, and which of them have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[int] = []  # of the request that is being served
        self.held: Counter[int] = Counter()
        self.changed: set[int] = set()

    def make_lane(self) -> CountingLane:
        return TellingLane(self)

    def make_block_page(self, start: int, end: int) -> Page:
        assert end == start + 1, "a page is one block"
        block = self.blocks[start]
        self.held[block] += 1
        self.changed.add(block)
        return Page(GROUP, start, end, block, GROUP.bytes_per_token)

    def release(self, item: Page | State) -> None:
        assert isinstance(item, Page)
        self.held[item.rows] -= 1
        if not self.held[item.rows]:
            del self.held[item.rows]
        self.changed.add(item.rows)


class TellingLane(CountingLane):
    """A lane whose pages know their block."""

    def __init__(self, engine: TellingEngine) -> None:
        super().__init__(on_capture=lambda state: None)
        self._engine = engine

    def publish(self, group: Group, start: int, end: int) -> Page:
        assert end <= self.offset
        return self._engine.make_block_page(start, end)


class SimulatedReplica:
    """Serves requests in the order in which they were sent, one at a time."""

    def __init__(self, number: int, budget: int) -> None:
        self.engine = TellingEngine()
        self.tree = ReplayTree(budget, engine=self.engine)
        self.free_s = 0.0  # when it has done all that was sent to it
        self.busy_s = 0.0
        self._outbox = Outbox(str(number), incarnation=1)

    def serve(self, request: TraceRequest, start_s: float) -> int:
        """Serve a request that starts then. Returns the number of blocks that were reused."""
        self.engine.blocks = request.stored
        return self.tree.serve(replace(request, time_s=start_s))

    def list_all(self) -> PageMessage:
        """Everything that it holds, as it tells when it starts."""
        return self._outbox.list_all()

    def tell(self, now: float) -> PageMessage:
        """What has changed since the last time."""
        for block in self.engine.changed:
            self._outbox.note(digest_of(block), ON_DEVICE if block in self.engine.held else None, now)
        self.engine.changed.clear()
        return self._outbox.take()


def digest_of(block: int) -> bytes:
    """What stands for a block, which already stands for all blocks before it."""
    return (block << 4).to_bytes(16, "little")
