"""The entries of a step: its static buffers, which any lanes fill, and one forward pass over them.

The entries are lanes that get one token each, or the tokens of a short run on one lane. All that a pass looks at lies in
tensors that stay where they are: token ids, positions, plans of attention, indices of states. So a graph that was captured
over them serves lanes of any length, however they share their rows. Entries beyond the lanes are padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bough.cache.tree.state import PAGE_TOKENS, Group
from bough.engines.shared.pool.plan import find_places, make_plan, make_run_plan
from bough.engines.shared.pool.rows import PooledRows
from bough.engines.torch.forward import Forward
from bough.engines.torch.lanes.layers import LaneCache
from bough.engines.torch.layout import Layout, StatePart
from bough.engines.torch.pooled.attention.bucket import Bucket, Scores
from bough.engines.torch.pooled.attention.buffers import PlanBuffers
from bough.engines.torch.pooled.attention.operator import attending
from bough.engines.torch.pooled.attention.staging import HostNumbers
from bough.engines.torch.pooled.lanes.lane import PooledTorchLane, make_layers
from bough.engines.torch.pooled.lanes.memory import PoolMemory
from bough.engines.torch.pooled.passes.wiring import GroupShape, Wiring

_MAX_PARTS = 160  # of an entry's attention: each has a result of its own until they are joined
_MAX_PARTS_OF_MANY = 72
_FEW_ENTRIES = 16
PROBED = 3
_PROBE_ROWS = 40


class _Started:
    """What a cache of a step tells of its lanes: they hold something, and positions say how much."""

    offset = 1


class StepStates:
    """The recurrent states of all entries: gathered before a pass, and put into the other slot of each lane after it."""

    def __init__(self, layout: Layout, memory: PoolMemory, entries: int) -> None:
        self._layers = make_layers(layout)
        self.cache = LaneCache(_Started(), self._layers)
        self._padding = {group: (memory.blank_slot(group).index, memory.spare_slot(group).index) for group in layout.states}
        self._indices = {group: torch.zeros(2, entries, dtype=torch.long, device=memory.device) for group in layout.states}
        self._numbers = {group: HostNumbers(indices) for group, indices in self._indices.items()}
        self._parts: list[tuple[Group, StatePart, Tensor, Tensor]] = []
        for group, state in layout.states.items():
            for part in state.parts:
                batch = torch.zeros(entries, *part.shape[1:], dtype=part.dtype, device=memory.device)
                self._parts.append((group, part, memory.state_part(group, part), batch))
            for layer, marks in state.marks.items():
                self._layers[layer].mark(marks)

    def set(self, lanes: Sequence[PooledTorchLane]) -> None:
        """Say where the states of these lanes lie. Padding begins with zeros, and nobody reads what becomes of it."""
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
    """The buffers of a step for so many entries, and the pass over them."""

    def __init__(
        self,
        forward: Forward,
        layout: Layout,
        memory: PoolMemory,
        wiring: Wiring,
        entries: int,
        *,
        is_run: bool = False,
        has_shared: bool = True,
    ) -> None:
        device = memory.device
        self.size = entries
        self.is_run = is_run
        self.has_shared = has_shared
        self.ids = torch.zeros(entries, 1, dtype=torch.long, device=device)
        self.positions = torch.zeros(entries, 1, dtype=torch.long, device=device)
        self._forward = forward
        self._memory = memory
        self._ids, self._positions = HostNumbers(self.ids), HostNumbers(self.positions)
        self._groups = list(wiring.shapes)
        self._buffers = {group.index: self._make_buffers(shape) for group, shape in wiring.shapes.items()}
        self._states = StepStates(layout, memory, entries) if layout.states and not is_run else None
        self._planned: list[tuple[PooledRows, int]] = []

    def _make_buffers(self, shape: GroupShape) -> PlanBuffers:
        bucket = Bucket(
            self.size,
            shape.heads,
            shape.shared,
            shape.dim,
            shape.dtype,
            self.ids.device,
            is_run=self.is_run,
            has_shared=self.has_shared,
            max_parts=_MAX_PARTS if self.size <= _FEW_ENTRIES else _MAX_PARTS_OF_MANY,
        )
        return PlanBuffers(bucket)

    def set_lanes(self, lanes: Sequence[PooledTorchLane], ids: Sequence[int] | Tensor) -> None:
        """Fill the entries: lanes that have room for one more token each, and the tokens, which may lie on the device."""
        self._plan(lanes)
        self._put_positions([lane.offset for lane in lanes])
        if self._states is not None:
            self._states.set(lanes)
        if isinstance(ids, Tensor):
            self.ids[: len(lanes), 0].copy_(ids)
        else:
            self._ids.put(ids)

    def set_run(self, lane: PooledTorchLane, ids: Sequence[int]) -> None:
        """Fill the entries with a run of tokens on one lane, which has room for them."""
        start, end = lane.offset, lane.offset + len(ids)
        self._planned = []
        for group in self._groups:
            pieces, buffers = _pieces(lane.rows_of(group)), self._buffers[group.index]
            buffers.put(make_run_plan(pieces, start, len(ids), buffers.shape), find_places(pieces, start, end))
        self._put_positions(range(start, end))
        self._ids.put(ids)

    def _put_positions(self, positions: Sequence[int]) -> None:
        """Padding stands at 0: some models look at the largest position of all."""
        self._positions.put([*positions, *[0] * (self.size - len(positions))])

    def _plan(self, lanes: Sequence[PooledTorchLane]) -> None:
        """Make new plans, unless the last ones were for the same slots."""
        wanted = [(rows, rows.version) for lane in lanes for rows in lane.row_groups()]
        if wanted == self._planned:
            return
        self._planned = []
        offsets = [lane.offset for lane in lanes]
        for group in self._groups:
            buffers = self._buffers[group.index]
            buffers.put(make_plan([_pieces(lane.rows_of(group)) for lane in lanes], offsets, buffers.shape))
        self._planned = wanted

    def set_probe(self) -> None:
        """Fill some entries so that a pass can be tried out: over numbers in slots that belong to no lane."""
        self._planned = []
        for group in self._groups:
            known, *grown = self._memory.probe_slots(group)
            pieces, buffers = [(known, 0, _PROBE_ROWS)], self._buffers[group.index]
            if self.is_run:
                pieces.append((grown[0], _PROBE_ROWS, PAGE_TOKENS))
                places = find_places(pieces, _PROBE_ROWS, _PROBE_ROWS + self.num_probed)
                buffers.put(make_run_plan(pieces, _PROBE_ROWS, self.num_probed, buffers.shape), places)
            else:
                first = pieces if self.has_shared else []
                start = _PROBE_ROWS if self.has_shared else 0
                lanes = [[*first, (slot, start, PAGE_TOKENS)] for slot in grown[: self.num_probed]]
                buffers.put(make_plan(lanes, [_PROBE_ROWS] * self.num_probed, buffers.shape))
        numbers = range(_PROBE_ROWS, _PROBE_ROWS + self.num_probed)
        self._put_positions(numbers if self.is_run else [_PROBE_ROWS] * self.num_probed)
        self._ids.put(numbers)
        if self._states is not None:
            self._states.set([])

    @property
    def num_probed(self) -> int:
        """How many entries `set_probe` fills."""
        return min(self.size, PROBED)

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
        """The new rows go to their slots, and each entry attends to the rows that its plan names."""
        return self._buffers[group].attend(
            query,
            key,
            value,
            rows,
            self.positions,
            scale=scores.scale,
            window=scores.window,
            softcap=scores.softcap,
            sinks=scores.sinks,
        )


def _pieces(rows: PooledRows) -> list[tuple[int, int, int]]:
    return [(piece.slot.index, piece.start, piece.end) for piece in rows.pieces]
