"""A lane in slots that it shares with pages and with other lanes: adopting and publishing pass references.

Rows of pages on the host are copied into slots of the lane. A run writes into slots that the lane has for itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from bough.cache.tree.state import Block, Group, Incoming, Kind, Page, Source, Span
from bough.engines.shared.errors import as_engine_errors
from bough.engines.shared.lane import GroupLane, StateT
from bough.engines.shared.pool.rows import PooledRows, SlotRows


class PooledLane(GroupLane[PooledRows, StateT]):
    """Implements `bough.cache.tree.state.Lane` in slots. An engine adds how rows come from the host, and states."""

    @property
    def own_bytes(self) -> int:
        states = sum(each.nbytes for each in self._states.values())
        return states + sum(each.promised_bytes for each in self._rows.values())

    @property
    def shares_rows(self) -> bool:
        return True

    def blocks(self) -> Iterable[Block]:
        return (slot for rows in self._rows.values() for slot in rows.blocks())

    def bytes_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        if not num_tokens:
            return self.nbytes
        rows = sum(each.bytes_for(num_tokens, self._offset, incoming) for each in self._rows.values())
        return rows + self._full_state_bytes

    def bytes_after_clear(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        if not num_tokens:
            return 0
        return sum(each.bytes_after_clear(num_tokens, incoming) for each in self._rows.values()) + self._full_state_bytes

    def peak_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        return self.bytes_for(num_tokens, incoming)

    @as_engine_errors("taking memory for a lane")
    def reserve(self, num_tokens: int, incoming: Incoming | None = None) -> None:
        if num_tokens:
            for rows in self._rows.values():
                rows.reserve(num_tokens, self._offset, incoming)
            for state in self._states.values():
                state.reserve()

    def drop_reserve(self) -> None:
        for rows in self._rows.values():
            rows.drop_reserve()

    def spans(self, group: Group, start: int, end: int) -> list[Span]:
        return [Span(rows.start, rows.end, rows.slot) for rows in self._rows[group].covering(start, end)]

    def begin_run(self, num_tokens: int) -> None:
        """Have a place for the rows of a run at the lane's offset. Raises ArenaFull if there is none."""
        for rows in self._rows.values():
            rows.make_room(self._offset, num_tokens)

    def end_run(self, num_tokens: int) -> None:
        """The model has evaluated the run."""
        for rows in self._rows.values():
            rows.written(self._offset, num_tokens)
        self._offset += num_tokens

    @abstractmethod
    def _copy_rows_in(self, rows: PooledRows, page: Page, start: int, end: int) -> None:
        """Copy rows [start, end) of a page on the host to where the lane has them."""

    @abstractmethod
    def _make_page(self, group: Group, rows: SlotRows) -> Page:
        """A page over rows of this lane."""

    def _rows_out(self, rows: PooledRows, start: int, end: int) -> Page:
        found = rows.covering(start, end)
        assert len(found) == 1, f"rows [{start}, {end}) lie in {len(found)} slots"
        page = self._make_page(rows.group, found[0])
        rows.published(found[0].slot)
        return page

    def _adopt_rows(self, rows: PooledRows, offset: int, source: Source) -> None:
        if rows.group.kind is Kind.WINDOW and not (source.live and not source.pages):
            rows.start_at(rows.group.first_needed(offset))
            self._adopt_pages(rows, rows.base, offset, source)
        else:
            held = offset if rows.group.kind is Kind.WINDOW else min(source.live, offset)
            assert rows.base <= rows.group.first_needed(offset) and held <= self._offset, (
                f"the lane holds [{rows.base}, {self._offset}), not {held}"
            )
            rows.cut(held)
            self._adopt_pages(rows, held, offset, source)
        rows.settle(offset)

    def _adopt_page(self, rows: PooledRows, page: Page, start: int, end: int) -> None:
        if isinstance(page.rows, SlotRows):
            rows.refer(SlotRows(page.rows.slot, start, end))
            return
        rows.make_room(start, end - start)
        self._copy_rows_in(rows, page, start, end)
        rows.written(start, end - start)
