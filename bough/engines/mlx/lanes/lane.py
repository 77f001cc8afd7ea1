"""A lane on MLX: one live sequence in contiguous buffers, behind the caches that an mlx-lm model asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from bough.cache.tree.state import Group, Incoming, Page, Source, State
from bough.engines.mlx.lanes.buffers import RowBuffer, StateBuffer
from bough.engines.mlx.lanes.layers import LayerTuple, RowLayer
from bough.engines.mlx.lanes.pages import Pages
from bough.engines.mlx.layout import Branch, Layout
from bough.engines.mlx.library import cache
from bough.engines.shared.lane import ContiguousLane
from bough.engines.shared.pages import content_of
from bough.engines.shared.row_memory import LaneSizes
from bough.errors import EngineError

States = list[list[mx.array | None]]
"""The arrays of each recurrent group of a lane."""


@dataclass
class Ahead:
    """A token that was computed ahead and is not part of the lane yet: the logits and the states after it."""

    logits: mx.array
    states: States
    token_id: int = -1


class MlxLane(ContiguousLane[RowBuffer, StateBuffer]):
    """`layers` are its caches, numbered as the layout does; `cache` is the list that the model is given.

    `latest` are the logits that its next token is chosen from, `ahead` what was computed beyond them; whatever moves the
    lane forgets both.
    """

    def __init__(self, layout: Layout, pages: Pages, sizes: LaneSizes) -> None:
        self._pages = pages
        rows = {group: RowBuffer(group, shape, sizes) for group, shape in layout.rows.items()}
        self.layers = self._make_layers(layout, rows)
        states = {
            group: StateBuffer(state, {part.layer: self.layers[part.layer] for part in state.parts})
            for group, state in layout.states.items()
        }
        super().__init__(rows, states)
        self.latest: mx.array | None = None
        self.ahead: Ahead | None = None
        self.cache = arrange(layout.tree, self.layers.__getitem__)
        self._tokens_to_reserve = 0  # at the next `adopt`: what there was room for before the content was discarded

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that this lane holds, those computed ahead included."""
        states = [*self.states, *(self.ahead.states if self.ahead else ())]
        rows = [array for buffer in self._rows.values() for array in buffer.arrays]
        return rows + [array for arrays in states for array in arrays if array is not None]

    @property
    def states(self) -> States:
        """The arrays of each recurrent group, as they are now."""
        return [state.arrays for state in self._states.values()]

    def reserve(self, num_tokens: int, incoming: Incoming | None = None) -> None:
        self._forget()
        super().reserve(num_tokens, incoming)

    def adopt(self, offset: int, sources: Mapping[Group, Source]) -> None:
        self._forget()
        if self._tokens_to_reserve:
            if any(source.live for source in sources.values()):
                raise EngineError(
                    "the lane holds nothing any more: a run failed on the device, and what it wrote is unknown"
                )
            super().reserve(self._tokens_to_reserve)
            self._tokens_to_reserve = 0
        try:
            super().adopt(offset, sources)
        except AssertionError:  # a source that the caller must not give
            self._after_adopt()
            raise
        except BaseException:
            self.discard()
            raise

    def clear(self) -> None:
        self._forget()
        self._tokens_to_reserve = 0
        super().clear()

    def discard(self) -> None:
        """Drop all content, because it is unknown what the device has written; `adopt` reserves the room again."""
        room = max([1, *(rows.capacity for rows in self._rows.values())])
        self.clear()
        self._tokens_to_reserve = room

    def has_room(self) -> bool:
        """Whether one more token fits without anything being moved."""
        return all(rows.has_room_for(self._offset, 1) for rows in self._rows.values())

    def keep_spare_states(self) -> None:
        """Count the memory of states twice: from now on there may be a second one, computed ahead."""
        for state in self._states.values():
            state.has_spare = True

    def step_back(self, offset: int, states: States, logits: mx.array | None) -> None:
        """Go back to `offset` and these states after one more token was computed ahead; without logits it was not.

        The token's rows lie beyond the offset, where they do no harm. `take_ahead` makes the token part of the lane.
        """
        self.ahead = None if logits is None else Ahead(logits, self.states)
        self._offset = offset
        self._put_states(states)

    def take_ahead(self) -> mx.array:
        """Append the token that was computed ahead; returns the logits after it."""
        ahead = self.ahead
        assert ahead is not None, "no token was computed ahead"
        self._forget()
        self._put_states(ahead.states)
        self._offset += 1
        return ahead.logits

    @contextmanager
    def running(self, num_tokens: int) -> Iterator[None]:
        """The model runs so many tokens within this context. If it fails, the lane is unchanged."""
        self._forget()
        buffers: list[RowBuffer | StateBuffer] = [*self._rows.values(), *self._states.values()]
        try:
            for layer in self.layers.values():
                if isinstance(layer, RowLayer):
                    layer.begin_run()
            for buffer in buffers:
                buffer.begin_run(self._offset, num_tokens)
            yield
        except BaseException:
            for buffer in buffers:
                buffer.undo_run()
            raise
        for buffer in buffers:
            buffer.end_run()
        self._offset += num_tokens

    def _forget(self) -> None:
        self.latest = self.ahead = None

    def _put_states(self, states: States) -> None:
        for state, arrays in zip(self._states.values(), states, strict=True):
            state.put(arrays)

    def _after_adopt(self) -> None:
        mx.async_eval(self.arrays)

    def _adopt_page(self, rows: RowBuffer, page: Page, start: int, end: int) -> None:
        rows.write(page, page.rows, start, end)

    def _rows_out(self, rows: RowBuffer, start: int, end: int) -> Page:
        return self._pages.make_page(rows.group, start, end, rows.read(start, end))

    def _copy_state_in(self, target: StateBuffer, state: State) -> None:
        target.write(content_of(state))

    def _copy_state_out(self, group: Group, source: StateBuffer) -> State:
        return self._pages.make_state(group, self._offset, source.read())

    def _make_layers(self, layout: Layout, buffers: Mapping[Group, RowBuffer]) -> dict[int, Any]:
        row_slots = {index: (rows, i) for rows in buffers.values() for i, index in enumerate(rows.layout.layers)}
        layers: dict[int, Any] = {index: RowLayer(self, *slot) for index, slot in row_slots.items()}
        layers |= {index: cache.ArraysCache(size) for index, size in layout.num_slots.items()}
        return layers


def arrange(tree: tuple[Branch, ...], find: Callable[[int], Any]) -> list[Any]:
    """Caches in the order and nesting that the model expects."""
    return [find(each) if isinstance(each, int) else LayerTuple(arrange(each, find)) for each in tree]


@contextmanager
def computing(lanes: Sequence[MlxLane]) -> Iterator[None]:
    """The device is given what these lanes hold. If that fails, they hold nothing any more."""
    try:
        yield
    except BaseException:
        for lane in lanes:
            lane.discard()
        raise
