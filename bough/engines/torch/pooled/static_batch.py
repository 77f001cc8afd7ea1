"""The entries of a step: its static buffers, which any lanes fill, and one forward pass over them.

The entries are lanes with one token each, or the tokens of a short run on one lane. Everything that a pass reads is in
tensors that stay in place: token ids, positions, plans of attention, indices of states. So a graph that was captured over
them serves lanes of any length, however they share their rows. Entries beyond the lanes are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bough.cache.tree.state import PAGE_TOKENS, Group
from bough.engines.shared.pool.plan import Piece, find_places, make_plan, make_run_plan
from bough.engines.shared.pool.slot_rows import PooledRows
from bough.engines.torch.attention import Scores
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.lanes.layers import LaneCache
from bough.engines.torch.layout import TorchLayout, TorchStatePart
from bough.engines.torch.pooled.attention.bucket import StepBucket
from bough.engines.torch.pooled.attention.buffers import HostNumbers, PlanBuffers
from bough.engines.torch.pooled.lane import PooledTorchLane, make_pooled_layers
from bough.engines.torch.pooled.memory import PoolMemory
from bough.engines.torch.pooled.wiring import Wiring, attending

_MAX_PARTS = 160  # of an entry's attention: each has a result of its own until they are joined
_MAX_PARTS_OF_MANY = 72
_FEW_ENTRIES = 16
_PROBED = 3
_PROBE_ROWS = 40


@dataclass(frozen=True)
class PassSize:
    """A size of static buffers: the number of entries, lanes or tokens of a run, and whether lanes may share slots."""

    entries: int
    is_run: bool = False
    has_shared: bool = True

    def __str__(self) -> str:
        what = "tokens of a run" if self.is_run else "lanes" if self.has_shared else "distinct lanes"
        return f"{self.entries} {what}"


class _Started:
    """The offset of a step's cache: lanes have content, and positions say how much."""

    offset = 1


class StepStates:
    """The recurrent states of all entries: gathered before a pass, and written to each lane's other slot after it."""

    def __init__(self, layout: TorchLayout, memory: PoolMemory, entries: int) -> None:
        self._layers = make_pooled_layers(layout)
        self.cache = LaneCache(_Started(), self._layers)
        self._padding = {group: (memory.blank[group].index, memory.spare[group].index) for group in layout.states}
        self._indices = {group: torch.zeros(2, entries, dtype=torch.long, device=memory.device) for group in layout.states}
        self._numbers = {group: HostNumbers(indices) for group, indices in self._indices.items()}
        self._parts: list[tuple[Group, TorchStatePart, Tensor, Tensor]] = []
        for group, state in layout.states.items():
            for part in state.parts:
                batch = torch.zeros(entries, *part.shape[1:], dtype=part.dtype, device=memory.device)
                self._parts.append((group, part, memory.state_part(group, part), batch))
            for layer, marks in state.marks.items():
                self._layers[layer].mark(marks)

    def set(self, lanes: Sequence[PooledTorchLane]) -> None:
        """Set the slots of these lanes' states. Padding starts from zeros, and its results are never read."""
        for place, (group, indices) in enumerate(self._indices.items()):
            pairs = [lane.states[place] for lane in lanes]
            blank, spare = ([slot] * (indices.shape[1] - len(lanes)) for slot in self._padding[group])
            now = [pair.slots[pair.side].index for pair in pairs]
            then = [pair.slots[1 - pair.side].index for pair in pairs]
            self._numbers[group].put([*now, *blank, *then, *spare])

    def gather(self) -> None:
        for group, part, everywhere, batch in self._parts:
            torch.index_select(everywhere, 0, self._indices[group][0], out=batch)
            self._layers[part.layer].bind(part.name, part.state_index, batch)

    def scatter(self) -> None:
        for group, part, everywhere, _ in self._parts:
            left = getattr(self._layers[part.layer], part.name)[part.state_index]
            everywhere.index_copy_(0, self._indices[group][1], left)


class StaticBatch:
    """The buffers of a step of this size, and the pass over them."""

    def __init__(
        self, forward: TorchForward, layout: TorchLayout, memory: PoolMemory, wiring: Wiring, size: PassSize
    ) -> None:
        self.size = size
        self.ids = torch.zeros(size.entries, 1, dtype=torch.long, device=memory.device)
        self.positions = torch.zeros(size.entries, 1, dtype=torch.long, device=memory.device)
        self._forward = forward
        self._memory = memory
        self._ids, self._positions = HostNumbers(self.ids), HostNumbers(self.positions)
        max_parts = _MAX_PARTS if size.entries <= _FEW_ENTRIES else _MAX_PARTS_OF_MANY
        self._groups = list(wiring.shared)
        self._buffers: dict[int, PlanBuffers] = {}
        for group, shared in wiring.shared.items():
            rows = layout.rows[group]
            shape = (size.entries, rows.heads, shared, rows.key_dim, rows.dtype, memory.device)
            bucket = StepBucket(*shape, is_run=size.is_run, has_shared=size.has_shared, max_parts=max_parts)
            self._buffers[group.index] = PlanBuffers(bucket)
        self._states = StepStates(layout, memory, size.entries) if layout.states and not size.is_run else None
        self._planned: list[tuple[PooledRows, int]] = []

    def set_lanes(self, lanes: Sequence[PooledTorchLane], ids: Sequence[int] | Tensor) -> None:
        """Fill the entries: lanes with room for one more token each, and the tokens, which may be on the device."""
        offsets = [lane.offset for lane in lanes]
        wanted = [(rows, rows.version) for lane in lanes for rows in lane.row_groups()]
        if wanted != self._planned:  # else the last plans were for the same slots
            self._planned = []  # until all plans are made
            for group in self._groups:
                self._plan_step(group, [lane.rows_of(group).plan_pieces() for lane in lanes], offsets)
            self._planned = wanted
        self._put_positions(offsets)
        if self._states is not None:
            self._states.set(lanes)
        if isinstance(ids, Tensor):
            self.ids[: len(lanes), 0].copy_(ids)
        else:
            self._ids.put(ids)

    def set_run(self, lane: PooledTorchLane, ids: Sequence[int]) -> None:
        """Fill the entries with a run of tokens on one lane, which has room for them."""
        positions = range(lane.offset, lane.offset + len(ids))
        self._planned = []
        for group in self._groups:
            self._plan_run(group, lane.rows_of(group).plan_pieces(), positions)
        self._put_positions(positions)
        self._ids.put(ids)

    def set_probe(self) -> None:
        """Fill `num_probed` entries to try out a pass, over numbers in slots that belong to no lane."""
        start, num = _PROBE_ROWS, self.num_probed
        numbers = range(start, start + num)
        self._planned = []
        for group in self._groups:
            known, *grown = self._memory.probe_slots(group)
            shared = [(known, 0, start)] if self.size.is_run or self.size.has_shared else []
            lanes = [[*shared, (slot, start if shared else 0, PAGE_TOKENS)] for slot in grown[:num]]
            if self.size.is_run:
                self._plan_run(group, lanes[0], numbers)
            else:
                self._plan_step(group, lanes, [start] * num)
        self._put_positions(numbers if self.size.is_run else [start] * num)
        self._ids.put(numbers)
        if self._states is not None:
            self._states.set([])

    @property
    def num_probed(self) -> int:
        return min(self.size.entries, _PROBED)

    @torch.no_grad()
    def compute(self) -> Tensor:
        """One pass over all entries: the logits [entries, vocabulary], in the model's own type."""
        cache: Any = None
        if self._states is not None:
            self._states.gather()
            cache = self._states.cache
        with attending(self):
            output = self._forward.call(self.ids, self.positions, cache, use_cache=cache is not None)
        if self._states is not None:
            self._states.scatter()
        logits: Tensor = output.logits[:, -1]
        return logits

    def attend(self, group: int, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scores: Scores) -> Tensor:
        """Write the new rows to their slots, and attend over the rows in each entry's plan."""
        return self._buffers[group].attend(query, key, value, rows, self.positions, scores)

    def _plan_step(self, group: Group, lanes: Sequence[Sequence[Piece]], offsets: Sequence[int]) -> None:
        buffers = self._buffers[group.index]
        buffers.put(make_plan(lanes, offsets, buffers.shape))

    def _plan_run(self, group: Group, pieces: Sequence[Piece], run: range) -> None:
        buffers = self._buffers[group.index]
        plan = make_run_plan(pieces, run.start, len(run), buffers.shape)
        buffers.put(plan, find_places(pieces, run.start, run.stop))

    def _put_positions(self, positions: Sequence[int]) -> None:
        """Set the positions; those of padding are 0, because some models use the largest of all."""
        self._positions.put([*positions, *[0] * (self.size.entries - len(positions))])
