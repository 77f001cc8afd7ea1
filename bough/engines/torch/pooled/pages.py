"""Pages and states of a pool: on the device they are ranges of slots, on the host pieces of pinned memory.

Cutting and joining on the device only change ranges. A slot that another thread reads for the disk is not reused meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bough.cache.tree.state import PAGE_TOKENS, Buffer, Group, Page, Range, State, Tier
from bough.engines.shared.errors import as_engine_errors
from bough.engines.shared.pages import content_of, set_content
from bough.engines.shared.pool.arena import ArenaSlot
from bough.engines.shared.pool.slot_rows import SlotRows
from bough.engines.torch.host.pool import Piece
from bough.engines.torch.lanes.pages import TorchPages, as_tensor
from bough.engines.torch.layout import TorchLayout
from bough.engines.torch.pooled.memory import PoolMemory


@dataclass(frozen=True)
class SlotState:
    """A state in a slot of its own, which was taken for the `use`-th time."""

    slot: ArenaSlot
    use: int


OnDevice = SlotRows | SlotState


class PooledPages(TorchPages):
    """Allocates every page and state of one model whose rows are in a pool."""

    def __init__(self, layout: TorchLayout, memory: PoolMemory) -> None:
        super().__init__(layout, memory.device)
        self.memory = memory
        memory.arena.on_take = self._wait_for_copies

    def page_of(self, group: Group, rows: SlotRows) -> Page:
        """A page over rows that were written."""
        return self.make_page(group, rows.start, rows.end, SlotRows(rows.slot, rows.start, rows.end, rows.slot.use))

    def take_state(self, group: Group, offset: int) -> tuple[State, Tensor]:
        """A new state, and its bytes on the device, which the caller fills."""
        slot = self.memory.arena.take(group)
        state = self.make_state(group, offset, SlotState(slot, slot.use))
        return state, self.memory.slot_bytes(slot, group.state_bytes)

    def release(self, item: Page | State) -> None:
        content = content_of(item)
        super().release(item)
        if isinstance(content, OnDevice):
            self.memory.arena.drop_page(content.slot)

    def device_bytes(self, item: Page | State) -> int:
        return self.memory.arena.slot_bytes(item.group) if isinstance(item, Page) else item.group.state_bytes

    def can_join(self, left: Page, right: Page) -> bool:
        if isinstance(left.rows, SlotRows) and isinstance(right.rows, SlotRows):
            return left.rows.slot is right.rows.slot
        return super().can_join(left, right)

    @as_engine_errors("moving content to the host")
    def to_host(self, item: Page | State) -> None:
        """Move the content to pinned host memory; does not wait for the copy, but the next use of its slot does."""
        content = content_of(item)
        assert self.transfers is not None, "this device has no host tier"
        assert isinstance(content, OnDevice), f"{type(item).__name__} of group {item.group.index} is not on the device"
        piece = self.transfers.to_host(self._contiguous(item.group, content))
        content.slot.after = (*content.slot.after, *piece.last_copies)
        self._put(item, piece)
        self.memory.arena.drop_page(content.slot)

    @as_engine_errors("moving content to the device")
    def to_device(self, item: Page | State) -> None:
        content = content_of(item)
        assert isinstance(content, Piece), f"{type(item).__name__} of group {item.group.index} is not on the host"
        self._put(item, self._take(item.group, item.span, content))

    @contextmanager
    def on_device(self, page: Page) -> Iterator[Tensor]:
        """The plane of a page's rows on the device, from either tier, for computation within the context."""
        if isinstance(page.rows, SlotRows):
            yield self.memory.view(page.rows)
            return
        with super().on_device(page) as content:
            yield self._layout.rows[page.group].split(content, page.end - page.start)[0]

    def copy_in(self, page: Page, target: SlotRows) -> None:
        """Copy rows of a page on the host to a slot: a whole slot directly, else through a buffer on the device."""
        content = page.rows
        if isinstance(content, Piece) and self.transfers and page.span == (target.start, target.end) and _is_whole(target):
            self.transfers.copy_to(content, self.memory.slot_bytes(target.slot))
            return
        with self.on_device(page) as plane:
            first = target.start - page.start
            self.memory.view(target).copy_(plane[:, :, first : first + target.end - target.start])

    def read_state(self, state: State, target: Tensor) -> None:
        if isinstance(state.data, SlotState):
            target.copy_(self.memory.slot_bytes(state.data.slot, target.nbytes))
        else:
            super().read_state(state, target)

    def _slice(self, page: Page, start: int, end: int) -> Any:
        if not isinstance(page.rows, SlotRows):
            return super()._slice(page, start, end)
        return page.rows._replace(start=start, end=end)

    def _joined(self, left: Page, right: Page) -> Any:
        if not isinstance(left.rows, SlotRows):
            return super()._joined(left, right)
        return left.rows._replace(end=right.end)

    @as_engine_errors("reading content out")
    def pack(self, item: Page | State) -> memoryview | None:
        content = content_of(item)  # read once: another thread may move or release the item meanwhile
        if not isinstance(content, OnDevice):
            return None if content is None else self._to_bytes(content)
        arena = self.memory.arena
        if not arena.begin_read(content.slot, content.use):
            return None
        try:
            data = self._contiguous(item.group, content)
            return self._to_bytes(data if self.transfers is not None else data.clone())  # a CPU would get the slot itself
        finally:
            arena.end_read(content.slot)

    @as_engine_errors("taking content in")
    def _from_bytes(self, group: Group, span: Range, data: Buffer, tier: Tier) -> Any:
        if tier is Tier.HOST and self.transfers is not None:
            return super()._from_bytes(group, span, data, tier)
        return self._take(group, span, as_tensor(data))

    def _take(self, group: Group, span: Range, content: Tensor | Piece) -> OnDevice:
        arena = self.memory.arena
        slot = arena.take(group, span[0])
        slot.mark = span[1]
        try:
            if span[0] == span[1]:
                self._copy_to(content, self.memory.slot_bytes(slot, group.state_bytes))
                return SlotState(slot, slot.use)
            rows = SlotRows(slot, *span, slot.use)
            if _is_whole(rows):
                self._copy_to(content, self.memory.slot_bytes(slot))
            else:
                nbytes = (rows.end - rows.start) * group.bytes_per_token
                staged, view = torch.empty(nbytes, dtype=torch.uint8, device=self._device), self.memory.view(rows)
                self._copy_to(content, staged)
                view.copy_(staged.view(view.dtype).view(view.shape))
        except BaseException:
            arena.add_page(slot)
            arena.drop_page(slot)
            raise
        return rows

    def _put(self, item: Page | State, content: Any) -> None:
        if isinstance(content, OnDevice):
            self.memory.arena.add_page(content.slot)
            set_content(item, content)
            self._count(item, item.content_bytes, Tier.DEVICE)
        else:
            super()._put(item, content)
        if isinstance(item, Page):
            item.block = content.slot if isinstance(content, SlotRows) else None

    def _contiguous(self, group: Group, content: OnDevice) -> Tensor:
        """The content as contiguous bytes: the slot itself, or a copy of a part of it."""
        if isinstance(content, SlotState):
            return self.memory.slot_bytes(content.slot, group.state_bytes)
        if _is_whole(content):
            return self.memory.slot_bytes(content.slot)
        return self.memory.view(content).contiguous().view(-1).view(torch.uint8)

    def _wait_for_copies(self, slot: ArenaSlot) -> None:
        assert self.transfers is not None, "nothing is copied where there is no host tier"
        self.transfers.streams.hold_compute(slot.after)


def _is_whole(rows: SlotRows) -> bool:
    return rows.end - rows.start == PAGE_TOKENS
