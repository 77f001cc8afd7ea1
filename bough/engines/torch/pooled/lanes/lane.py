"""A lane on PyTorch whose rows lie in slots of the pool. Nothing here waits for a copy.

A recurrent state has two slots. A step reads one and writes the other, so that a step whose result nobody wants leaves the
lane as it was; a longer run works in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from bough.cache.tree.state import Group, Page, Source, State
from bough.engines.shared.pool.arena import Slot
from bough.engines.shared.pool.lane import PooledLane
from bough.engines.shared.pool.rows import PooledRows, SlotRows
from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch.lanes.layers import LaneCache, StateLayer
from bough.engines.torch.layout import Layout, StateLayout
from bough.engines.torch.pooled.lanes.memory import PoolMemory
from bough.engines.torch.pooled.lanes.pages import PooledPages


class PassingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The cache of an attention layer: keys and values go straight on to the attention, which keeps them in the pool."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the pool exists before the model runs."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class StateAndPassingLayer(StateLayer, PassingLayer):  # type: ignore[no-untyped-call, override]
    """A layer that has both attention and a recurrent state."""

    def __init__(self, num_states: int) -> None:
        PassingLayer.__init__(self)
        StateLayer.__init__(self, num_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: states are bound before the model runs."""


def make_layers(layout: Layout) -> list[Any]:
    """The layers of a cache for a model whose attention rows lie in the pool."""
    with_rows = {layer for rows in layout.rows.values() for layer in rows.layers}
    num_states = {layer: num for state in layout.states.values() for layer, num in state.num_states.items()}
    return [_make_layer(layer, layer in with_rows, num_states.get(layer), layout) for layer in range(layout.num_layers)]


def _make_layer(layer: int, has_rows: bool, num_states: int | None, layout: Layout) -> Any:
    if num_states is not None:
        return StateAndPassingLayer(num_states) if has_rows else StateLayer(num_states)
    return PassingLayer() if has_rows else layout.empty[layer]()


class StatePair:
    """The state of one recurrent group on one lane: `slots[side]` holds it, the other one is for the next step."""

    def __init__(self, group: Group, layout: StateLayout, memory: PoolMemory) -> None:
        self.group = group
        self.layout = layout
        self.carried = 0
        self.slots: list[Slot] = []
        self.side = 0
        self.has_started = False
        self._memory = memory

    @property
    def nbytes(self) -> int:
        return self.carried * self._memory.arena.slot_bytes(self.group)

    @property
    def full_bytes(self) -> int:
        return 2 * self._memory.arena.slot_bytes(self.group)

    def reserve(self) -> None:
        arena = self._memory.arena
        while len(self.slots) < 2:
            slot = arena.take(self.group)
            arena.hold(slot, self)
            self.slots.append(slot)

    def reset(self) -> None:
        """Reset: the next run is the first one for the model."""
        if self.slots:
            self.bytes.zero_()
        self.has_started = False

    def free(self) -> None:
        for slot in self.slots:
            self._memory.arena.drop(slot, self)
        self.slots, self.has_started = [], False

    @property
    def bytes(self) -> Tensor:
        """The state as it is now."""
        assert self.slots, "a state before memory was reserved for it"
        return self._memory.slot_bytes(self.slots[self.side], self.layout.nbytes)

    def bind(self, layers: list[Any]) -> None:
        """Let the layers of a cache work on this state in place."""
        state = self.bytes
        for part in self.layout.parts:
            layers[part.layer].bind(part.name, part.state_index, part.view(state))
        for layer, marks in self.layout.marks.items():
            layers[layer].mark(marks if self.has_started else (False,) * self.layout.num_states[layer])

    def copy_back(self, layers: list[Any]) -> None:
        """Copy back what a model put into its cache layers by assigning instead of writing in place."""
        state = self.bytes
        for part in self.layout.parts:
            view, current = part.view(state), getattr(layers[part.layer], part.name)[part.state_index]
            if current.data_ptr() != view.data_ptr():
                view.copy_(current)
        self.has_started = True


class PooledTorchLane(PooledLane[StatePair]):
    """One live sequence. `latest` are the logits after its last token.

    `epoch` grows with every change of what it holds, and whenever a run begins: that may write beyond the offset and fail.
    """

    def __init__(self, layout: Layout, pages: PooledPages, sizes: LaneSizes) -> None:
        memory = pages.memory
        rows = {group: PooledRows(group, memory.arena, sizes.slack) for group in layout.rows}
        states = {group: StatePair(group, state, memory) for group, state in layout.states.items()}
        super().__init__(rows, states)
        self.latest: Tensor | None = None
        self.epoch = 0
        self._pages = pages
        self._layers = make_layers(layout) if states else []
        self.cache = LaneCache(self, self._layers) if states else None

    @property
    def states(self) -> list[StatePair]:
        return list(self._states.values())

    def row_groups(self) -> list[PooledRows]:
        return list(self._rows.values())

    def has_room(self) -> bool:
        """Whether one more token fits into what was reserved."""
        return all(rows.has_room_for(self._offset, 1) for rows in self._rows.values())

    def begin_run(self, num_tokens: int) -> None:
        """As `PooledLane` says. Rows beyond the offset may be written from now on, even if the run fails."""
        assert not self._is_damaged, "a run failed on this lane: adopt or clear first"
        self.epoch += 1
        super().begin_run(num_tokens)

    def begin_long_run(self, num_tokens: int) -> None:
        """Get ready for a run that changes states in place: until `end_long_run` they count as damaged."""
        self.begin_run(num_tokens)
        self.latest = None  # nothing is computed ahead from here if the run fails
        for state in self._states.values():
            state.bind(self._layers)
        self._is_damaged = bool(self._states)

    def end_long_run(self, num_tokens: int) -> None:
        for state in self._states.values():
            state.copy_back(self._layers)
        self._is_damaged = False
        self._move_on(num_tokens)

    def end_short_run(self, num_tokens: int) -> None:
        """The tokens of a run are part of the sequence from now on; the lane has no states."""
        assert not self._states, "a run of entries cannot follow states"
        self._move_on(num_tokens)

    def end_step(self) -> None:
        """The token of a step is part of the sequence from now on, with the states that the step has left."""
        for state in self._states.values():
            state.side = 1 - state.side
        self._move_on(1)

    def clear(self) -> None:
        super().clear()
        for layer in self._layers:
            if isinstance(layer, StateLayer):
                layer.unbind()
        self.latest = None
        self.epoch += 1

    def _move_on(self, num_tokens: int) -> None:
        self.end_run(num_tokens)
        self.epoch += 1

    def _after_adopt(self) -> None:
        self.latest = None
        self.epoch += 1

    def _copy_rows_in(self, rows: PooledRows, page: Page, start: int, end: int) -> None:
        for target in rows.covering(start, end):
            self._pages.copy_in(page, target)

    def _make_page(self, group: Group, rows: SlotRows) -> Page:
        return self._pages.page_of(group, rows)

    def _copy_state_in(self, target: StatePair, state: State) -> None:
        self._pages.read_state(state, target.bytes)
        target.has_started = True

    def _copy_state_out(self, group: Group, source: StatePair) -> State:
        state, content = self._pages.take_state(group, self._offset)
        content.copy_(source.bytes)
        return state

    def _adopt_state(self, state: StatePair, offset: int, source: Source) -> None:
        super()._adopt_state(state, offset, source)
        state.has_started = offset > 0
