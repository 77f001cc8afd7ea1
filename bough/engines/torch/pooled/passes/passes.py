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
from bough.engines.torch.pooled.passes.graphs import Graphs, Size
from bough.engines.torch.pooled.passes.static_batch import StaticBatch
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
        self._eager: dict[Size, StaticBatch] = {}

    def warm_up(self, num_lanes: int, before: Callable[[], None]) -> None:
        """Make graphs for so many lanes, on a thread of its own. Slots for that are taken here, by the arena's thread."""
        for group in self._wiring.shapes:
            self._memory.probe_slots(group)
        self.graphs = Graphs(self._forward, self._make_batch, num_lanes, is_recurrent=bool(self._layout.states))
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
        batch, compute = self._choose(len(lanes), is_run=False, has_shared=_share_slots(lanes))
        batch.set_lanes(lanes, ids)
        return compute()[: len(lanes)].clone()

    def run(self, lane: PooledTorchLane, ids: Sequence[int]) -> Tensor:
        """The logits [run, vocabulary] after each token of a short run."""
        batch, compute = self._choose(len(ids), is_run=True, has_shared=True)
        batch.set_run(lane, ids)
        return compute()[: len(ids)].clone()

    def run_state(self, lane: PooledTorchLane, ids: Sequence[int]) -> Tensor | None:
        """What the head reads after a short run, [hidden], in float32; None if no graph tells it."""
        graph = self.graphs.find(len(ids), is_run=True, has_shared=True) if self.graphs is not None else None
        if graph is None or graph.states is None:
            return None
        graph.batch.set_run(lane, ids)
        graph.replay()
        return graph.states[len(ids) - 1].to(torch.float32, copy=True)

    def long_run(self) -> AbstractContextManager[None]:
        """The way in which modules compute a long run: compiled, once that is ready."""
        layers = self.graphs.compiled if self.graphs is not None else None
        return nullcontext() if layers is None else layers.use()

    def _choose(self, num: int, *, is_run: bool, has_shared: bool) -> tuple[StaticBatch, Callable[[], Tensor]]:
        """The entries to fill, and what computes over them: a graph, if one is ready."""
        size = Size(1 << (num - 1).bit_length(), is_run)
        graph = self.graphs.find(num, is_run=is_run, has_shared=has_shared) if self.graphs is not None else None
        if graph is not None:
            self._eager.pop(size, None)  # its buffers are large
            return graph.batch, graph.replay
        if size not in self._eager:
            self._eager[size] = self._make_batch(size)
        return self._eager[size], self._eager[size].compute

    def _make_batch(self, size: Size) -> StaticBatch:
        return StaticBatch(
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
