"""A lane on MLX: one live sequence in contiguous buffers, behind the caches that an mlx-lm model expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from bough.cache.tree.state import Group, GroupSource, Incoming, Page, State
from bough.engines.mlx.buffers import MlxRowBuffer, MlxStateBuffer
from bough.engines.mlx.layers import LayerTuple, MlxRowLayer
from bough.engines.mlx.layout import Branch, MlxLayout, MlxPages
from bough.engines.mlx.library import cache
from bough.engines.shared.lane import ContiguousLane
from bough.engines.shared.pages import content_of
from bough.engines.shared.row_memory import LaneSizes
from bough.errors import EngineError

States = list[list[mx.array | None]]
"""The arrays of each recurrent group of a lane."""


@dataclass
class Ahead:
    """The logits and the states after a token that was computed ahead and is not part of the lane yet."""

    logits: mx.array
    states: States
    token_id: int = -1


class MlxLane(ContiguousLane[MlxRowBuffer, MlxStateBuffer]):
    """`layers` are its caches, with the layout's numbers; `cache` is the list that the model is given.

    `latest` are the logits that its next token is chosen from, `ahead` the step computed beyond them. Both are reset
    whenever the lane moves.
    """

    def __init__(self, layout: MlxLayout, pages: MlxPages, sizes: LaneSizes, *, has_spare: bool = False) -> None:
        self._pages = pages
        rows = {group: MlxRowBuffer(group, shape, sizes) for group, shape in layout.rows.items()}
        slots = {index: (buffer, i) for buffer in rows.values() for i, index in enumerate(buffer.layout.layers)}
        self.layers: dict[int, Any] = {index: MlxRowLayer(self, *slot) for index, slot in slots.items()}
        self.layers |= {index: cache.ArraysCache(size) for index, size in layout.num_slots.items()}
        states = {
            group: MlxStateBuffer(state, {part.layer: self.layers[part.layer] for part in state.parts}, has_spare=has_spare)
            for group, state in layout.states.items()
        }
        super().__init__(rows, states)
        self.latest: mx.array | None = None
        self.ahead: Ahead | None = None
        self.cache = arrange(layout.tree, self.layers.__getitem__)
        self._tokens_to_reserve = 0  # at the next `adopt`: the room before the content was discarded

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays that this lane holds, those computed ahead included."""
        states = [*self.states, *(self.ahead.states if self.ahead else ())]
        rows = [array for buffer in self._rows.values() for array in buffer.arrays]
        return rows + [array for arrays in states for array in arrays if array is not None]

    @property
    def states(self) -> States:
        return [state.arrays for state in self._states.values()]

    def reserve(self, num_tokens: int, incoming: Incoming | None = None) -> None:
        self.latest = self.ahead = None
        super().reserve(num_tokens, incoming)

    def adopt(self, offset: int, sources: Mapping[Group, GroupSource]) -> None:
        self.latest = self.ahead = None
        if self._tokens_to_reserve:
            if any(source.live for source in sources.values()):
                raise EngineError(
                    "the lane holds nothing any more: a run failed on the device, and what it wrote is unknown"
                )
            super().reserve(self._tokens_to_reserve)
            self._tokens_to_reserve = 0
        try:
            super().adopt(offset, sources)
        except AssertionError:  # a source that the caller must not pass
            self._after_adopt()
            raise
        except BaseException:
            self.discard()
            raise

    def clear(self) -> None:
        self.latest = self.ahead = None
        self._tokens_to_reserve = 0
        super().clear()

    def discard(self) -> None:
        """Drop all content, because the device may have written anything; `adopt` reserves the room again."""
        room = max([1, *(rows.capacity for rows in self._rows.values())])
        self.clear()
        self._tokens_to_reserve = room

    def has_room(self) -> bool:
        """Whether one more token fits without moving a row."""
        return all(rows.has_room_for(self._offset, 1) for rows in self._rows.values())

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
        self.latest = self.ahead = None
        self._put_states(ahead.states)
        self._offset += 1
        return ahead.logits

    @contextmanager
    def running(self, num_tokens: int) -> Iterator[None]:
        """The model runs `num_tokens` tokens within this context, unevaluated. If it fails, the lane is unchanged."""
        self.latest = self.ahead = None
        for layer in self.layers.values():
            if isinstance(layer, MlxRowLayer):
                layer.begin_run()
        for rows in self._rows.values():
            rows.begin_run(self._offset, num_tokens)
        arrays, states = [list(rows.arrays) for rows in self._rows.values()], self.states
        try:
            yield
        except BaseException:
            for rows, before in zip(self._rows.values(), arrays, strict=True):
                rows.arrays = before
            self._put_states(states)
            raise
        for state in self._states.values():
            state.make_contiguous()
        self._offset += num_tokens

    def _put_states(self, states: States) -> None:
        for state, arrays in zip(self._states.values(), states, strict=True):
            state.put(arrays)

    def _after_adopt(self) -> None:
        mx.async_eval(self.arrays)

    def _adopt_page(self, rows: MlxRowBuffer, page: Page, start: int, end: int) -> None:
        rows.write(page, page.rows, start, end)

    def _rows_out(self, rows: MlxRowBuffer, start: int, end: int) -> Page:
        return self._pages.make_page(rows.group, start, end, rows.read(start, end))

    def _copy_state_in(self, target: MlxStateBuffer, state: State) -> None:
        target.write(content_of(state))

    def _copy_state_out(self, group: Group, source: MlxStateBuffer) -> State:
        return self._pages.make_state(group, self._offset, source.read())


def arrange(tree: tuple[Branch, ...], find: Callable[[int], Any]) -> list[Any]:
    """Caches in the order and nesting that the model expects."""
    return [find(each) if isinstance(each, int) else LayerTuple(arrange(each, find)) for each in tree]


@contextmanager
def computing(lanes: Sequence[MlxLane]) -> Iterator[None]:
    """The device is given the arrays of these lanes. If that fails, the lanes are empty."""
    try:
        yield
    except BaseException:
        for lane in lanes:
            lane.discard()
        raise
