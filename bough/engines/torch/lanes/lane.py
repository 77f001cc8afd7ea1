"""A lane on PyTorch: one live sequence in contiguous buffers. Nothing here waits for a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bough.cache.tree.state import Group, Page, State
from bough.engines.shared.lane import ContiguousLane
from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch.lanes.buffers import RowBuffer, StateBuffer
from bough.engines.torch.lanes.layers import LaneCache, RowLayer, StateAndRowLayer, StateLayer
from bough.engines.torch.lanes.pages import Pages
from bough.engines.torch.layout import Layout


class TorchLane(ContiguousLane[RowBuffer, StateBuffer]):
    """Pages come from the device, or one by one from the host. `cache` is what the model is given."""

    def __init__(self, layout: Layout, pages: Pages, device: torch.device, sizes: LaneSizes) -> None:
        self._pages = pages
        rows = {group: RowBuffer(group, shape, device, sizes) for group, shape in layout.rows.items()}
        layers = self._make_layers(layout, rows)
        states = {
            group: StateBuffer(state, {index: layers[index] for index in state.num_states}, device)
            for group, state in layout.states.items()
        }
        super().__init__(rows, states)
        self.cache = LaneCache(self, layers)

    def begin_run(self, num_tokens: int) -> None:
        """Get ready for a run of that many tokens. Until `end_run` the recurrent state counts as damaged."""
        assert not self._is_damaged, "a run failed on this lane: adopt or clear first"
        for rows in self._rows.values():
            rows.begin_run(self._offset, num_tokens)
        self._is_damaged = bool(self._states)

    def end_run(self, num_tokens: int) -> None:
        """The model has evaluated the run."""
        for rows in self._rows.values():
            rows.end_run()
        for state in self._states.values():
            state.copy_back()
        self._offset += num_tokens
        self._is_damaged = False

    def state_views(self) -> list[Tensor]:
        """The tensors of all recurrent states, in the order of the layout's parts."""
        return [view for state in self._states.values() for view in state.views()]

    def _adopt_page(self, rows: RowBuffer, page: Page, start: int, end: int) -> None:
        with self._pages.on_device(page) as content:
            rows.write(page, content, start, end)

    def _rows_out(self, rows: RowBuffer, start: int, end: int) -> Page:
        return self._pages.make_page(rows.group, start, end, rows.read(start, end))

    def _copy_state_in(self, target: StateBuffer, state: State) -> None:
        target.write(partial(self._pages.read_state, state))

    def _copy_state_out(self, group: Group, source: StateBuffer) -> State:
        return self._pages.make_state(group, self._offset, source.read())

    def _make_layers(self, layout: Layout, buffers: Mapping[Group, RowBuffer]) -> list[Any]:
        row_slots = {index: (rows, i) for rows in buffers.values() for i, index in enumerate(rows.layout.layers)}
        num_states = {index: num for state in layout.states.values() for index, num in state.num_states.items()}
        return [self._make_layer(i, row_slots.get(i), num_states.get(i), layout) for i in range(layout.num_layers)]

    def _make_layer(self, index: int, slot: tuple[RowBuffer, int] | None, num_states: int | None, layout: Layout) -> Any:
        if slot is None:
            return layout.empty[index]() if num_states is None else StateLayer(num_states)
        return RowLayer(self, *slot) if num_states is None else StateAndRowLayer(num_states, self, *slot)


def has_started(lanes: Sequence[TorchLane]) -> bool:
    """Whether each of these lanes holds at least one token."""
    return all(lane.offset for lane in lanes)
