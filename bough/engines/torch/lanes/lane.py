"""A lane on PyTorch: one live sequence in contiguous buffers. No method waits for a copy."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from bough.cache.tree.state import Group, Page, State
from bough.engines.shared.lane import ContiguousLane
from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch.lanes.buffers import TorchRowBuffer, TorchStateBuffer
from bough.engines.torch.lanes.layers import LaneCache, make_layers, make_row_layer
from bough.engines.torch.lanes.pages import TorchPages
from bough.engines.torch.layout import TorchLayout
from bough.engines.torch.row_types import ClippedNumbers


class TorchLane(ContiguousLane[TorchRowBuffer, TorchStateBuffer]):
    """Adopts pages from the device, or one by one from the host. `cache` is passed to the model."""

    def __init__(
        self, layout: TorchLayout, pages: TorchPages, device: torch.device, sizes: LaneSizes, clipped: ClippedNumbers
    ) -> None:
        self._pages = pages
        self.clipped = clipped
        rows = {group: TorchRowBuffer(group, shape, device, sizes, clipped) for group, shape in layout.rows.items()}
        layers = make_layers(layout, lambda group, *numbers: make_row_layer(self, rows[group], *numbers))
        states = {
            group: TorchStateBuffer(state, {index: layers[index] for index in state.num_states}, device)
            for group, state in layout.states.items()
        }
        super().__init__(rows, states)
        self.cache = LaneCache(self, layers)

    def begin_run(self, num_tokens: int) -> None:
        """Prepare a run. Until `end_run` the recurrent state counts as damaged."""
        assert not self._is_damaged, "a run failed on this lane: adopt or clear first"
        for rows in self._rows.values():
            rows.begin_run(self._offset, num_tokens)
        self._is_damaged = bool(self._states)

    def end_run(self, num_tokens: int) -> None:
        for rows in self._rows.values():
            rows.end_run()
        for state in self._states.values():
            state.copy_back()
        self._offset += num_tokens
        self._is_damaged = False

    def state_views(self) -> list[Tensor]:
        """The tensors of all recurrent states, in the order of the layout's parts."""
        return [view for state in self._states.values() for view in state.views()]

    def _adopt_page(self, rows: TorchRowBuffer, page: Page, start: int, end: int) -> None:
        with self._pages.on_device(page) as content:
            rows.write(page, content, start, end)

    def _rows_out(self, rows: TorchRowBuffer, start: int, end: int) -> Page:
        return self._pages.make_page(rows.group, start, end, rows.read(start, end))

    def _copy_state_in(self, target: TorchStateBuffer, state: State) -> None:
        target.write(partial(self._pages.read_state, state))

    def _copy_state_out(self, group: Group, source: TorchStateBuffer) -> State:
        return self._pages.make_state(group, self._offset, source.read())
