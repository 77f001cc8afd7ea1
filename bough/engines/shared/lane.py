"""The bookkeeping of one live sequence, without any tensor: the base of all lanes, and lanes in contiguous buffers.

A run that fails writes only beyond `offset` in row groups, so the rows before it stay valid; a recurrent state may be
damaged, and then it can only be replaced. In contiguous buffers, adopting copies pages in and publishing copies rows out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from bough.cache.tree.state import Block, Group, GroupSource, Incoming, Kind, Page, RowSpan, State
from bough.engines.shared.errors import as_engine_errors
from bough.engines.shared.row_memory import RowMemory


class HasOffset(Protocol):
    """The part of a lane that its layers need."""

    @property
    def offset(self) -> int: ...


class GroupMemory(Protocol):
    """The memory of one group on one lane."""

    @property
    def nbytes(self) -> int: ...

    def free(self) -> None: ...


class StateMemory(GroupMemory, Protocol):
    """The state of a recurrent group: `full_bytes` is `nbytes` once it is reserved."""

    @property
    def full_bytes(self) -> int: ...

    def reserve(self) -> None: ...

    def reset(self) -> None:
        """Reset: the next run is the first one for the model."""
        ...


class Rows(GroupMemory, Protocol):
    """The rows of a group on a lane at `offset`, wherever they are; `base` is the lowest of them."""

    @property
    def base(self) -> int: ...

    def bytes_for(self, num_tokens: int, offset: int, incoming: Incoming | None) -> int:
        """`nbytes` after making room for rows [0, num_tokens)."""
        ...

    def bytes_after_clear(self, num_tokens: int, incoming: Incoming | None) -> int:
        """`nbytes` after making room for rows [0, num_tokens) in a lane without any."""
        ...

    def reserve(self, num_tokens: int, offset: int, incoming: Incoming | None) -> None:
        """Make room for rows [0, num_tokens), keeping the live ones up to the offset."""
        ...


RowsT = TypeVar("RowsT", bound=Rows)
MemoryT = TypeVar("MemoryT", bound=RowMemory)
StateT = TypeVar("StateT", bound=StateMemory)


class UnsharedLane(ABC):
    """A lane that shares no memory with others, and gives back no part of it."""

    @property
    @abstractmethod
    def nbytes(self) -> int: ...

    @property
    def own_bytes(self) -> int:
        return self.nbytes

    @property
    def shares_rows(self) -> bool:
        return False

    def blocks(self) -> Iterable[Block]:
        return ()

    def drop_reserve(self) -> None:
        """Nothing to do: a smaller buffer would mean moving rows."""
        return


class GroupLane(ABC, Generic[RowsT, StateT]):
    """A lane of a model with groups. An engine adds how rows and states are adopted and handed out."""

    def __init__(self, rows: Mapping[Group, RowsT], states: Mapping[Group, StateT]) -> None:
        self._rows = rows
        self._states = states
        self._memories: list[GroupMemory] = [*rows.values(), *states.values()]
        self._offset = 0
        self._is_damaged = False

    @property
    def offset(self) -> int:
        return self._offset

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memories)

    def bytes_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        if not num_tokens:
            return self.nbytes
        return self._with_states(each.bytes_for(num_tokens, self._offset, incoming) for each in self._rows.values())

    def bytes_after_clear(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        if not num_tokens:
            return 0
        return self._with_states(each.bytes_after_clear(num_tokens, incoming) for each in self._rows.values())

    def _with_states(self, row_bytes: Iterable[int]) -> int:
        return sum(row_bytes) + sum(each.full_bytes for each in self._states.values())

    @as_engine_errors("taking memory for a lane")
    def reserve(self, num_tokens: int, incoming: Incoming | None = None) -> None:
        if num_tokens:
            for rows in self._rows.values():
                rows.reserve(num_tokens, self._offset, incoming)
            for state in self._states.values():
                state.reserve()

    def first_row(self, group: Group) -> int:
        return self._rows[group].base

    @as_engine_errors("restoring a lane")
    def adopt(self, offset: int, sources: Mapping[Group, GroupSource]) -> None:
        for group, rows in self._rows.items():
            self._adopt_rows(rows, offset, sources.get(group, GroupSource()))
        for group, state in self._states.items():
            self._adopt_state(state, offset, sources.get(group, GroupSource()))
        self._offset = offset
        self._is_damaged = False
        self._after_adopt()

    @as_engine_errors("copying rows out")
    def publish(self, group: Group, start: int, end: int) -> Page:
        rows = self._rows[group]
        assert rows.base <= start < end <= self._offset, f"[{start}, {end}) of [{rows.base}, {self._offset})"
        return self._rows_out(rows, start, end)

    @as_engine_errors("copying a state out")
    def capture(self, group: Group) -> State:
        assert not self._is_damaged, "a run failed on this lane: its recurrent state is damaged"
        return self._copy_state_out(group, self._states[group])

    def clear(self) -> None:
        for memory in self._memories:
            memory.free()
        self._offset = 0
        self._is_damaged = False

    def rows_of(self, group: Group) -> RowsT:
        return self._rows[group]

    @abstractmethod
    def _adopt_rows(self, rows: RowsT, offset: int, source: GroupSource) -> None:
        """Restore one group of rows at `offset`."""

    @abstractmethod
    def _rows_out(self, rows: RowsT, start: int, end: int) -> Page:
        """A page with rows [start, end)."""

    @abstractmethod
    def _adopt_page(self, rows: RowsT, page: Page, start: int, end: int) -> None:
        """Append rows [start, end) of a page."""

    @abstractmethod
    def _copy_state_in(self, target: StateT, state: State) -> None:
        """Copy a whole state into the lane."""

    @abstractmethod
    def _copy_state_out(self, group: Group, source: StateT) -> State:
        """The whole state as it is now, in memory of its own."""

    def _after_adopt(self) -> None:
        """Finish the copies of `adopt`, in engines that must."""

    def _adopt_pages(self, rows: RowsT, first: int, end: int, source: GroupSource) -> None:
        """Append rows [first, end); pages may hold more on both sides."""
        for page in source.pages:
            stop = min(page.end, end)
            if stop > first:
                assert page.start <= first, f"rows from {first} on, and a page of [{page.start}, {page.end})"
                self._adopt_page(rows, page, first, stop)
                first = stop
        assert first == end, f"the source reaches {first}, not {end}"

    def _adopt_state(self, state: StateT, offset: int, source: GroupSource) -> None:
        if source.state is not None:
            assert source.state.offset == offset, f"a state at {source.state.offset} is none at {offset}"
            self._copy_state_in(state, source.state)
        elif offset == 0:
            state.reset()
        else:
            assert source.live == offset == self._offset, f"the lane's state stands at {self._offset}, not at {offset}"
            assert not self._is_damaged, "a run failed on this lane: its recurrent state is damaged"


class ContiguousLane(GroupLane[MemoryT, StateT], UnsharedLane):
    """Implements `bough.cache.tree.state.Lane` in buffers of its own. An engine adds how rows and states are copied."""

    def peak_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        """As `bytes_for`, and the old buffers that exist until their rows are moved."""
        return self.bytes_for(num_tokens) + sum(each.moved_bytes(num_tokens, self._offset) for each in self._rows.values())

    def spans(self, group: Group, start: int, end: int) -> list[RowSpan]:
        return [RowSpan(start, end, None)]

    def _adopt_rows(self, rows: MemoryT, offset: int, source: GroupSource) -> None:
        first = rows.group.first_needed(offset)
        if rows.group.kind is not Kind.WINDOW:
            held = min(source.live, offset)
            assert held <= self._offset, f"the lane holds {self._offset} rows, not {held}"
            self._adopt_pages(rows, held, offset, source)
            return
        if source.live and not source.pages:
            assert rows.base <= first and offset <= self._offset, f"[{rows.base}, {self._offset}) lacks [{first}, {offset})"
            return
        rows.base = first
        self._adopt_pages(rows, first, offset, source)
