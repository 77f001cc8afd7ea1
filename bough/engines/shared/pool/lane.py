"""A lane in slots that it shares with pages and with other lanes: adopting and publishing pass references.

Rows of pages on the host are copied into slots of the lane. A run writes into slots that only this lane writes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from bough.cache.tree.state import Block, Group, GroupSource, Incoming, Kind, Page, RowSpan
from bough.engines.shared.lane import GroupLane, StateT
from bough.engines.shared.pool.slot_rows import PooledRows, SlotRows


class PooledLane(GroupLane[PooledRows, StateT]):
    """Implements `bough.cache.tree.state.Lane` in slots. An engine adds copies from the host, and states."""

    @property
    def own_bytes(self) -> int:
        states = sum(each.nbytes for each in self._states.values())
        return states + sum(each.promised_bytes for each in self._rows.values())

    @property
    def shares_rows(self) -> bool:
        return True

    def blocks(self) -> Iterable[Block]:
        return (slot for rows in self._rows.values() for slot in rows.blocks())

    def peak_for(self, num_tokens: int, incoming: Incoming | None = None) -> int:
        return self.bytes_for(num_tokens, incoming)

    def drop_reserve(self) -> None:
        for rows in self._rows.values():
            rows.drop_reserve()

    def spans(self, group: Group, start: int, end: int) -> list[RowSpan]:
        return [RowSpan(rows.start, rows.end, rows.slot) for rows in self._rows[group].covering(start, end)]

    def begin_run(self, num_tokens: int) -> None:
        """Take slots for the rows of a run at the lane's offset. Raise ArenaFull if there are none."""
        for rows in self._rows.values():
            rows.make_room(self._offset, num_tokens)

    def end_run(self, num_tokens: int) -> None:
        """Append the tokens of a run that the model has evaluated."""
        for rows in self._rows.values():
            rows.mark_written(self._offset, num_tokens)
        self._offset += num_tokens

    @abstractmethod
    def _copy_rows_in(self, rows: PooledRows, page: Page, start: int, end: int) -> None:
        """Copy rows [start, end) of a page on the host to the lane's slots."""

    @abstractmethod
    def _make_page(self, group: Group, rows: SlotRows) -> Page:
        """A page over rows of this lane."""

    def _rows_out(self, rows: PooledRows, start: int, end: int) -> Page:
        found = rows.covering(start, end)
        assert len(found) == 1, f"rows [{start}, {end}) lie in {len(found)} slots"
        page = self._make_page(rows.group, found[0])
        rows.mark_published(found[0].slot)
        return page

    def _adopt_rows(self, rows: PooledRows, offset: int, source: GroupSource) -> None:
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
        rows.continue_at(offset)

    def _adopt_page(self, rows: PooledRows, page: Page, start: int, end: int) -> None:
        if isinstance(page.rows, SlotRows):
            rows.append(SlotRows(page.rows.slot, start, end))
            return
        rows.make_room(start, end - start)
        self._copy_rows_in(rows, page, start, end)
        rows.mark_written(start, end - start)
