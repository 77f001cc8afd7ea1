"""The bookkeeping of one live sequence, without any tensor: what all lanes have in common, and lanes in contiguous buffers.

A run that fails writes only beyond `offset` in row groups, so these still stand where they were; a recurrent state may be
damaged, and then it can only be replaced. In contiguous buffers, adopting copies pages in and publishing copies rows out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from bough.cache.tree.state import Block, Group, Incoming, Kind, Page, Source, Span, State
from bough.engines.shared.errors import as_engine_errors
from bough.engines.shared.row_memory import RowMemory


class StateMemory(Protocol):
    """The memory of one recurrent group on one lane."""

    @property
    def nbytes(self) -> int: ...

    @property
    def full_bytes(self) -> int:
        """What `nbytes` is once it is reserved."""
        ...

    def reserve(self) -> None: ...

    def reset(self) -> None:
        """Reset: the next run is the first one for the model."""
        ...

    def free(self) -> None: ...


class Rows(Protocol):
    """The rows of one group on one lane, wherever they lie."""

    @property
    def nbytes(self) -> int: ...

    @property
    def base(self) -> int:
        """The lowest row that is there."""
        ...

    def free(self) -> None: ...


RowsT = TypeVar("RowsT", bound=Rows)
MemoryT = TypeVar("MemoryT", bound=RowMemory)
StateT = TypeVar("StateT", bound=StateMemory)


class GroupLane(ABC, Generic[RowsT, StateT]):
    """What all lanes of a model with groups share. An engine adds how rows and states are adopted and handed out."""

    def __init__(self, rows: Mapping[Group, RowsT], states: Mapping[Group, StateT]) -> None:
        self._rows = rows
        self._states = states
        self._offset = 0
        self._is_damaged = False

    @property
    def offset(self) -> int:
        return self._offset

    @property
    def nbytes(self) -> int:
        nbytes = 0
        for rows in self._rows.values():
            nbytes += rows.nbytes
        for state in self._states.values():
            nbytes += state.nbytes
        return nbytes

    def first_row(self, group: Group) -> int:
        return self._rows[group].base

    @as_engine_errors("restoring a lane")
    def adopt(self, offset: int, sources: Mapping[Group, Source]) -> None:
        for group, rows in self._rows.items():
            self._adopt_rows(rows, offset, sources.get(group, Source()))
        for group, state in self._states.items():
            self._adopt_state(state, offset, sources.get(group, Source()))
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
        for rows in self._rows.values():
            rows.free()
        for state in self._states.values():
            state.free()
        self._offset = 0
        self._is_damaged = False

    def rows_of(self, group: Group) -> RowsT:
        """The rows of a group that has some."""
        return self._rows[group]

    @property
    def _full_state_bytes(self) -> int:
        """What all states take once they are reserved."""
        return sum(each.full_bytes for each in self._states.values())

    @abstractmethod
    def _adopt_rows(self, rows: RowsT, offset: int, source: Source) -> None:
        """Stand at `offset` with one group of rows."""

    @abstractmethod
    def _rows_out(self, rows: RowsT, start: int, end: int) -> Page:
        """A page with rows [start, end)."""

    @abstractmethod
    def _adopt_page(self, rows: RowsT, page: Page, start: int, end: int) -> None:
        """Append rows [start, end) of a page to those that the lane holds."""

    @abstractmethod
    def _copy_state_in(self, target: StateT, state: State) -> None:
        """Copy a whole state into the lane."""

    @abstractmethod
    def _copy_state_out(self, group: Group, source: StateT) -> State:
        """The whole state as it is now, in memory of its own."""

    def _after_adopt(self) -> None:
        """Called when a lane has adopted something, for engines that must finish their copies."""

    def _adopt_pages(self, rows: RowsT, first: int, end: int, source: Source) -> None:
        """Append rows [first, end); pages may hold more on both sides."""
        for page in source.pages:
            stop = min(page.end, end)
            if stop > first:
                assert page.start <= first, f"rows from {first} on, and a page of [{page.start}, {page.end})"
                self._adopt_page(rows, page, first, stop)
                first = stop
        assert first == end, f"the source reaches {first}, not {end}"

    def _adopt_state(self, state: StateT, offset: int, source: Source) -> None:
        if source.state is not None:
            assert source.state.offset == offset, f"a state at {source.state.offset} is none at {offset}"
            self._copy_state_in(state, source.state)
        elif offset == 0:
            state.reset()
        else:
            assert source.live == offset == self._offset, f"the lane's state stands at {self._offset}, not at {offset}"
            assert not self._is_damaged, "a run failed on this lane: its recurrent state is damaged"


class ContiguousLane(GroupLane[MemoryT, StateT]):
    """Implements `bough.cache.tree.state.Lane` in buffers of its own. An engine adds how rows and states are copied."""

    @property
    def own_bytes(self) -> int:
        return self.nbytes

    @property
    def shares_rows(self) -> bool:
        return False

    def blocks(self) -> Iterable[Block]:
        return ()

    def bytes_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        if not num_tokens:
            return self.nbytes
        return sum(each.bytes_for(num_tokens, self._offset) for each in self._rows.values()) + self._full_state_bytes

    def bytes_after_clear(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        if not num_tokens:
            return 0
        return sum(each.bytes_after_clear(num_tokens) for each in self._rows.values()) + self._full_state_bytes

    def peak_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        """As `bytes_for`, and the old buffers that exist until their rows are moved."""
        return self.bytes_for(num_tokens) + sum(each.moved_bytes(num_tokens, self._offset) for each in self._rows.values())

    @as_engine_errors("taking memory for a lane")
    def reserve(self, num_tokens: int, incoming: Incoming | None = None) -> None:
        if num_tokens:
            for rows in self._rows.values():
                rows.reserve(num_tokens, self._offset)
            for state in self._states.values():
                state.reserve()

    def drop_reserve(self) -> None:
        """Nothing to do: a smaller buffer would mean moving rows."""

    def spans(self, group: Group, start: int, end: int) -> list[Span]:
        return [Span(start, end, None)]

    def _adopt_rows(self, rows: MemoryT, offset: int, source: Source) -> None:
        adopt_rows = self._adopt_window if rows.group.kind is Kind.WINDOW else self._adopt_full
        adopt_rows(rows, offset, source)

    def _adopt_full(self, rows: MemoryT, offset: int, source: Source) -> None:
        held = min(source.live, offset)
        assert held <= self._offset, f"the lane holds {self._offset} rows, not {held}"
        self._adopt_pages(rows, held, offset, source)

    def _adopt_window(self, rows: MemoryT, offset: int, source: Source) -> None:
        first = rows.group.first_needed(offset)
        if source.live and not source.pages:
            assert rows.base <= first and offset <= self._offset, f"[{rows.base}, {self._offset}) lacks [{first}, {offset})"
            return
        rows.base = first
        self._adopt_pages(rows, first, offset, source)
