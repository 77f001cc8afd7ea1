"""A lane on MLX: one live sequence in straight buffers, behind the caches that an mlx-lm model asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from bough.cache.state import Group, Page, Source, State
from bough.engine_parts.lane import StraightLane
from bough.engine_parts.pages import content_of
from bough.mlx_engine.buffers import RowBuffer, StateBuffer
from bough.mlx_engine.layers import LayerTuple, RowLayer
from bough.mlx_engine.layout import Branch, Layout
from bough.mlx_engine.library import cache
from bough.mlx_engine.pages import Pages


class MlxLane(StraightLane[RowBuffer, StateBuffer]):
    """`layers` are its caches, numbered as the layout does; `cache` is the list that the model is given."""

    def __init__(self, layout: Layout, pages: Pages, context: int, slack: int) -> None:
        self._pages = pages
        rows = {group: RowBuffer(group, shape, context, slack) for group, shape in layout.rows.items()}
        self.layers = self._make_layers(layout, rows)
        states = {
            group: StateBuffer(state, {part.layer: self.layers[part.layer] for part in state.parts})
            for group, state in layout.states.items()
        }
        super().__init__(rows, states)
        self.ahead: list[list[mx.array | None]] | None = None  # the states after a token that was taken in ahead
        self.cache = arrange(layout.tree, self.layers.__getitem__)

    @property
    def arrays(self) -> list[mx.array]:
        """All that this lane holds, what was taken in ahead included."""
        states = [array for arrays in (*self.states, *(self.ahead or ())) for array in arrays if array is not None]
        return [array for rows in self._rows.values() for array in rows.arrays] + states

    @property
    def states(self) -> list[list[mx.array | None]]:
        """The arrays of each recurrent group, as they are now."""
        return [state.arrays for state in self._states.values()]

    def reserve(self, num_tokens: int) -> None:
        self.ahead = None
        super().reserve(num_tokens)

    def adopt(self, offset: int, sources: Mapping[Group, Source]) -> None:
        self.ahead = None
        super().adopt(offset, sources)

    def clear(self) -> None:
        self.ahead = None
        super().clear()

    def has_room(self) -> bool:
        """Whether one more token finds its place without anything being moved."""
        return all(rows.has_room_for(self._offset, 1) for rows in self._rows.values())

    def step_back(self, offset: int, states: Sequence[Sequence[mx.array | None]]) -> None:
        """Stand at `offset` again, with these states, after one more token was taken in ahead.

        The token's rows lie beyond the offset, where they disturb nobody; its states are put aside. `take_ahead` makes the
        lane stand on it; anything else forgets it.
        """
        self.ahead = self.states if self._offset > offset else None
        self._offset = offset
        self._put_states(states)

    def take_ahead(self) -> None:
        """Stand on the token that was taken in ahead."""
        assert self.ahead is not None, "no token was taken in ahead"
        self._put_states(self.ahead)
        self._offset += 1
        self.ahead = None

    @contextmanager
    def running(self, num_tokens: int) -> Iterator[None]:
        """The model takes a run of so many tokens in. If it fails, the lane is as it was."""
        self.ahead = None
        buffers: list[RowBuffer | StateBuffer] = [*self._rows.values(), *self._states.values()]
        for layer in self.layers.values():
            if isinstance(layer, RowLayer):
                layer.begin_run()
        for buffer in buffers:
            buffer.begin_run(self._offset, num_tokens)
        try:
            yield
        except BaseException:
            for buffer in buffers:
                buffer.undo_run()
            raise
        for buffer in buffers:
            buffer.end_run()
        self._offset += num_tokens

    def _put_states(self, states: Sequence[Sequence[mx.array | None]]) -> None:
        for state, arrays in zip(self._states.values(), states, strict=True):
            state.put(arrays)

    def _settle(self) -> None:
        mx.async_eval(self.arrays)

    def _copy_rows_in(self, rows: RowBuffer, page: Page, start: int, end: int) -> None:
        rows.write(page, page.rows, start, end)

    def _copy_rows_out(self, rows: RowBuffer, start: int, end: int) -> Page:
        return self._pages.make_page(rows.group, start, end, rows.read(start, end))

    def _copy_state_in(self, target: StateBuffer, state: State) -> None:
        target.write(content_of(state))

    def _copy_state_out(self, group: Group, source: StateBuffer) -> State:
        return self._pages.make_state(group, self._offset, source.read())

    def _make_layers(self, layout: Layout, buffers: Mapping[Group, RowBuffer]) -> dict[int, Any]:
        places = {index: (rows, i) for rows in buffers.values() for i, index in enumerate(rows.layout.layers)}
        layers: dict[int, Any] = {index: RowLayer(self, *place) for index, place in places.items()}
        layers |= {index: cache.ArraysCache(size) for index, size in layout.num_slots.items()}
        return layers


def arrange(tree: tuple[Branch, ...], find: Callable[[int], Any]) -> list[Any]:
    """Caches in the order and nesting that the model expects."""
    return [find(each) if isinstance(each, int) else LayerTuple(arrange(each, find)) for each in tree]
