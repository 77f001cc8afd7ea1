"""A lane on PyTorch: one live sequence in straight buffers.

Adopting copies pages in, from the device or page by page from the host, and publishing copies rows out. Nothing here waits
for a copy. A run that fails writes only beyond `offset` in row groups, so these
still stand where they were; a recurrent state may be damaged, and then it can only be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bough.cache.state import Group, Kind, Page, Source, State
from bough.torch_engine.buffers import RowBuffer, StateBuffer
from bough.torch_engine.failures import as_engine_errors
from bough.torch_engine.layers import LaneCache, RowLayer, StateAndRowLayer, StateLayer, empty_layer
from bough.torch_engine.layout import Layout
from bough.torch_engine.pages import Pages


class TorchLane:
    """Implements `bough.cache.state.Lane`. `cache` is what the model is given."""

    def __init__(self, layout: Layout, pages: Pages, device: torch.device, context: int, slack: int) -> None:
        self._pages = pages
        self._offset = 0
        self._is_torn = False
        self._rows = {group: RowBuffer(group, rows, device, context, slack) for group, rows in layout.rows.items()}
        layers = self._make_layers(layout)
        self._states = {
            group: StateBuffer(state, {index: layers[index] for index in state.num_states}, device)
            for group, state in layout.states.items()
        }
        self.cache = LaneCache(self, layers)

    @property
    def offset(self) -> int:
        return self._offset

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._rows.values()) + sum(each.nbytes for each in self._states.values())

    def bytes_for(self, num_tokens: int) -> int:
        if not num_tokens:
            return self.nbytes
        rows = sum(each.capacity_for(num_tokens, self._offset) * each.layout.row_bytes for each in self._rows.values())
        return rows + sum(each.layout.nbytes for each in self._states.values())

    def peak_for(self, num_tokens: int) -> int:
        """While a buffer grows, the old one lives until its rows are moved."""
        return self.bytes_for(num_tokens) + sum(each.moved_bytes(num_tokens, self._offset) for each in self._rows.values())

    @as_engine_errors("taking memory for a lane")
    def reserve(self, num_tokens: int) -> None:
        if num_tokens:
            for rows in self._rows.values():
                rows.reserve(num_tokens, self._offset)
            for state in self._states.values():
                state.reserve()

    def first_row(self, group: Group) -> int:
        return self._rows[group].base

    @as_engine_errors("restoring a lane")
    def adopt(self, offset: int, sources: Mapping[Group, Source]) -> None:
        for group, rows in self._rows.items():
            adopt_rows = self._adopt_window if group.kind is Kind.WINDOW else self._adopt_full
            adopt_rows(rows, offset, sources.get(group, Source()))
        for group, state in self._states.items():
            self._adopt_state(state, offset, sources.get(group, Source()))
        self._offset = offset
        self._is_torn = False

    @as_engine_errors("copying rows out")
    def publish(self, group: Group, start: int, end: int) -> Page:
        buffer = self._rows[group]
        assert buffer.base <= start < end <= self._offset, f"[{start}, {end}) of [{buffer.base}, {self._offset})"
        return self._pages.make_page(group, start, end, buffer.read(start, end))

    @as_engine_errors("copying a state out")
    def capture(self, group: Group) -> State:
        assert not self._is_torn, "a run failed on this lane: its state stands nowhere"
        return self._pages.make_state(group, self._offset, self._states[group].read())

    def clear(self) -> None:
        for rows in self._rows.values():
            rows.free()
        for state in self._states.values():
            state.free()
        self._offset = 0
        self._is_torn = False

    def begin_run(self, num_tokens: int) -> None:
        """Get ready for a run of that many tokens. Until `end_run` the recurrent state counts as damaged."""
        assert not self._is_torn, "a run failed on this lane: adopt or clear first"
        for rows in self._rows.values():
            rows.begin_run(self._offset, num_tokens)
        self._is_torn = bool(self._states)

    def end_run(self, num_tokens: int) -> None:
        """The model has taken the run in."""
        for rows in self._rows.values():
            rows.end_run()
        for state in self._states.values():
            state.settle()
        self._offset += num_tokens
        self._is_torn = False

    def rows_of(self, group: Group) -> RowBuffer:
        """The buffer of a group that has rows."""
        return self._rows[group]

    def state_views(self) -> list[Tensor]:
        """The tensors of all recurrent states, in the order of the layout's parts."""
        return [view for state in self._states.values() for view in state.views()]

    def _adopt_full(self, rows: RowBuffer, offset: int, source: Source) -> None:
        held = min(source.live, offset)
        assert held <= self._offset, f"the lane holds {self._offset} rows, not {held}"
        self._copy_pages(rows, held, offset, source)

    def _adopt_window(self, rows: RowBuffer, offset: int, source: Source) -> None:
        first = rows.group.first_needed(offset)
        if source.live and not source.pages:
            assert rows.base <= first and offset <= self._offset, f"[{rows.base}, {self._offset}) lacks [{first}, {offset})"
            return
        rows.base = first
        self._copy_pages(rows, first, offset, source)

    def _copy_pages(self, rows: RowBuffer, first: int, end: int, source: Source) -> None:
        """Copy rows [first, end) in; pages may hold more on both sides."""
        for page in source.pages:
            stop = min(page.end, end)
            if stop > first:
                assert page.start <= first, f"rows from {first} on, and a page of [{page.start}, {page.end})"
                with self._pages.on_device(page) as content:
                    rows.write(page, content, first, stop)
                first = stop
        assert first == end, f"the source reaches {first}, not {end}"

    def _adopt_state(self, state: StateBuffer, offset: int, source: Source) -> None:
        if source.state is not None:
            assert source.state.offset == offset, f"a state at {source.state.offset} is none at {offset}"
            state.write(partial(self._pages.read_state, source.state))
        elif offset == 0:
            state.reset()
        else:
            assert source.live == offset == self._offset, f"the lane's state stands at {self._offset}, not at {offset}"
            assert not self._is_torn, "a run failed on this lane: its state stands nowhere"

    def _make_layers(self, layout: Layout) -> list[Any]:
        places = {index: (group, i) for group, rows in layout.rows.items() for i, index in enumerate(rows.layers)}
        num_states = {index: num for state in layout.states.values() for index, num in state.num_states.items()}
        return [self._make_layer(i, places.get(i), num_states.get(i), layout) for i in range(layout.num_layers)]

    def _make_layer(self, index: int, place: tuple[Group, int] | None, num_states: int | None, layout: Layout) -> Any:
        if place is None:
            return empty_layer(index in layout.blank_recurrent) if num_states is None else StateLayer(num_states)
        group, position = place
        if num_states is None:
            return RowLayer(self, self._rows[group], position)
        return StateAndRowLayer(num_states, self, self._rows[group], position)


def has_started(lanes: Sequence[TorchLane]) -> bool:
    """Whether each of these lanes holds at least one token."""
    return all(lane.offset for lane in lanes)
