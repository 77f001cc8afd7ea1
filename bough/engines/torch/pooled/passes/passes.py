"""Which buffers a step or a short run uses, and whether its pass is replayed as a graph or run module by module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from bough.engines.torch.forward import Forward
from bough.engines.torch.layout import Layout
from bough.engines.torch.pooled.lanes.lane import PooledTorchLane
from bough.engines.torch.pooled.lanes.memory import PoolMemory
from bough.engines.torch.pooled.passes.entries import Entries
from bough.engines.torch.pooled.passes.graphs import Captured, Graphs, Size
from bough.engines.torch.pooled.passes.wiring import Wiring

LARGEST_STEP = 64


class Passes:
    """Passes over static buffers: by graphs as far as they are ready, else in sizes of powers of two, made at first use."""

    def __init__(self, forward: Forward, layout: Layout, memory: PoolMemory, wiring: Wiring) -> None:
        self.graphs: Graphs | None = None
        self._forward = forward
        self._layout = layout
        self._memory = memory
        self._wiring = wiring
        self._eager: dict[Size, Entries] = {}

    def warm_up(self, num_lanes: int, before: Callable[[], None]) -> None:
        """Make graphs for so many lanes, on a thread of its own. Slots for that are taken here, by the arena's thread."""
        for group in self._wiring.shapes:
            self._memory.probe_slots(group)
        self.graphs = Graphs(self._forward, self._make_entries, num_lanes)
        self.graphs.start(before)

    def close(self) -> None:
        """Stop the warm-up, and let go of all buffers and graphs."""
        if self.graphs is not None:
            self.graphs.close()
        self._eager.clear()

    def step(self, lanes: Sequence[PooledTorchLane], ids: Sequence[int] | Tensor) -> Tensor:
        """The logits [lanes, vocabulary] after one more token on each lane."""
        if len(lanes) > LARGEST_STEP:
            first, rest = self.step(lanes[:LARGEST_STEP], ids[:LARGEST_STEP]), lanes[LARGEST_STEP:]
            return torch.cat([first, self.step(rest, ids[LARGEST_STEP:])])
        graph = self._find(len(lanes), is_run=False, has_shared=_share_slots(lanes))
        if graph is not None:
            self._eager.clear()  # their buffers are large
            graph.entries.set_lanes(lanes, ids)
            return graph.replay()[: len(lanes)].clone()
        entries = self._entries_for(len(lanes), is_run=False)
        entries.set_lanes(lanes, ids)
        return entries.compute()[: len(lanes)].clone()

    def run(self, lane: PooledTorchLane, ids: Sequence[int]) -> Tensor:
        """The logits [run, vocabulary] after each token of a short run."""
        graph = self._find(len(ids), is_run=True, has_shared=True)
        if graph is not None:
            graph.entries.set_run(lane, ids)
            return graph.replay()[: len(ids)].clone()
        entries = self._entries_for(len(ids), is_run=True)
        entries.set_run(lane, ids)
        return entries.compute()[: len(ids)].clone()

    def long_run(self) -> AbstractContextManager[None]:
        """The way in which modules compute a long run: compiled, once that is ready."""
        layers = self.graphs.compiled if self.graphs is not None else None
        return nullcontext() if layers is None else layers.use()

    def _find(self, num: int, *, is_run: bool, has_shared: bool) -> Captured | None:
        return None if self.graphs is None else self.graphs.find(num, is_run=is_run, has_shared=has_shared)

    def _entries_for(self, num: int, *, is_run: bool) -> Entries:
        size = Size(1 << (num - 1).bit_length(), is_run)
        if size not in self._eager:
            self._eager[size] = self._make_entries(size)
        return self._eager[size]

    def _make_entries(self, size: Size) -> Entries:
        return Entries(
            self._forward,
            self._layout,
            self._memory,
            self._wiring,
            size.entries,
            is_run=size.is_run,
            has_shared=size.has_shared,
        )


def _share_slots(lanes: Sequence[PooledTorchLane]) -> bool:
    """Whether any two of these lanes have a slot in common: then they have their first one."""
    firsts = [id(rows.pieces[0].slot) for lane in lanes for rows in lane.row_groups()]
    return len(set(firsts)) < len(firsts)
