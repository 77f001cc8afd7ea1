"""A lane on PyTorch whose rows are in slots of the pool. No method waits for a copy.

A recurrent state has two slots. A step reads one and writes the other, so that a step whose result is dropped leaves the
lane as it was; a longer run works in place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from bough.cache.tree.state import Group, GroupSource, Page, State
from bough.engines.shared.pool.arena import ArenaSlot
from bough.engines.shared.pool.lane import PooledLane
from bough.engines.shared.pool.slot_rows import PooledRows, SlotRows
from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch.lanes.layers import LaneCache, StateLayer, make_layers
from bough.engines.torch.layout import TorchLayout, TorchStateLayout
from bough.engines.torch.pooled.memory import PoolMemory
from bough.engines.torch.pooled.pages import PooledPages


class PassingLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The cache of an attention layer: passes keys and values on to the attention, which writes them to the pool."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass  # the pool exists before the model runs

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1


class StateAndPassingLayer(StateLayer, PassingLayer):  # type: ignore[no-untyped-call, override]
    def __init__(self, num_states: int) -> None:
        PassingLayer.__init__(self)
        StateLayer.__init__(self, num_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass  # states are bound before the model runs


def make_pooled_layers(layout: TorchLayout) -> list[Any]:
    """The layers of a cache for a model whose attention rows are in the pool."""
    return make_layers(layout, lambda group, place, num: PassingLayer() if num is None else StateAndPassingLayer(num))


class StatePair:
    """The state of one recurrent group on one lane: it is in `slots[side]`, the other slot is for the next step."""

    def __init__(self, group: Group, layout: TorchStateLayout, memory: PoolMemory) -> None:
        self.group = group
        self.layout = layout
        self.carried = 0
        self.slots: list[ArenaSlot] = []
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
        if self.slots:
            self.bytes.zero_()
        self.has_started = False

    def free(self) -> None:
        for slot in self.slots:
            self._memory.arena.drop(slot, self)
        self.slots, self.has_started = [], False

    @property
    def bytes(self) -> Tensor:
        assert self.slots, "a state before memory was reserved for it"
        return self._memory.slot_bytes(self.slots[self.side], self.layout.nbytes)

    def bind(self, layers: list[Any]) -> None:
        """Make the layers of a cache use this state in place."""
        state = self.bytes
        for part in self.layout.parts:
            layers[part.layer].bind(part.name, part.state_index, part.view(state))
        for layer, marks in self.layout.marks.items():
            layers[layer].mark(marks if self.has_started else (False,) * self.layout.num_states[layer])

    def copy_back(self, layers: list[Any]) -> None:
        """Copy back the states that a model assigned to its cache layers instead of writing in place."""
        state = self.bytes
        for part in self.layout.parts:
            view, current = part.view(state), getattr(layers[part.layer], part.name)[part.state_index]
            if current.data_ptr() != view.data_ptr():
                view.copy_(current)
        self.has_started = True


class PooledTorchLane(PooledLane[StatePair]):
    """One live sequence. `latest` are the logits after its last token.

    `epoch` grows with every change of its content, and when a run begins, which may write beyond the offset and fail.
    """

    def __init__(self, layout: TorchLayout, pages: PooledPages, sizes: LaneSizes) -> None:
        memory = pages.memory
        rows = {group: PooledRows(group, memory.arena, sizes.slack) for group in layout.rows}
        states = {group: StatePair(group, state, memory) for group, state in layout.states.items()}
        super().__init__(rows, states)
        self.latest: Tensor | None = None
        self.epoch = 0
        self._pages = pages
        self._layers = make_pooled_layers(layout) if states else []
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
        """As `PooledLane` says. Rows beyond the offset may be written even if the run fails."""
        assert not self._is_damaged, "a run failed on this lane: adopt or clear first"
        self.epoch += 1
        super().begin_run(num_tokens)

    def begin_long_run(self, num_tokens: int) -> None:
        """Prepare a run that changes states in place: until `end_long_run` they count as damaged."""
        self.begin_run(num_tokens)
        self.latest = None  # nothing is computed ahead from here if the run fails
        for state in self._states.values():
            state.bind(self._layers)
        self._is_damaged = bool(self._states)

    def end_long_run(self, num_tokens: int) -> None:
        for state in self._states.values():
            state.copy_back(self._layers)
        self._is_damaged = False
        self.end_run(num_tokens)

    def end_short_run(self, num_tokens: int) -> None:
        """Append the tokens of a short run; the lane has no states."""
        assert not self._states, "a run of entries cannot follow states"
        self.end_run(num_tokens)

    def end_step(self) -> None:
        """Append the token of a step, and switch to the states that the step has written."""
        for state in self._states.values():
            state.side = 1 - state.side
        self.end_run(1)

    def clear(self) -> None:
        super().clear()
        for layer in self._layers:
            if isinstance(layer, StateLayer):
                layer.unbind()
        self.latest = None
        self.epoch += 1

    def end_run(self, num_tokens: int) -> None:
        super().end_run(num_tokens)
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

    def _adopt_state(self, state: StatePair, offset: int, source: GroupSource) -> None:
        super()._adopt_state(state, offset, source)
        state.has_started = offset > 0
