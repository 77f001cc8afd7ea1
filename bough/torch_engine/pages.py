"""Pages and states that have left their lane: made, cut, joined, moved, packed, released.

Each holds one piece of memory that belongs to it alone. `held_bytes` counts what was made and not yet given back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bough.cache.state import PAGE_TOKENS, Group, Page, State
from bough.torch_engine.failures import as_engine_errors
from bough.torch_engine.layout import Layout


class Pages:
    """Looks after every page and state of one model."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.held_bytes = 0
        self._layout = layout
        self._device = device

    def make_page(self, group: Group, start: int, end: int, rows: Tensor) -> Page:
        """A page over `rows`, which nobody else refers to."""
        assert start < end and start // PAGE_TOKENS == (end - 1) // PAGE_TOKENS, f"rows [{start}, {end}) are no page"
        self.held_bytes += rows.nbytes
        return Page(group, start, end, rows, rows.nbytes)

    def make_state(self, group: Group, offset: int, data: Tensor) -> State:
        """A state over `data`, which nobody else refers to."""
        self.held_bytes += data.nbytes
        return State(group, offset, data, data.nbytes)

    @as_engine_errors("cutting a page")
    def cut(self, page: Page, at: int) -> tuple[Page, Page]:
        """Rows [start, at) and [at, end) as two new pages. The given page is consumed."""
        assert page.start < at < page.end, f"{at} is not inside [{page.start}, {page.end})"
        left = self.make_page(page.group, page.start, at, self._slice(page, page.start, at))
        right = self.make_page(page.group, at, page.end, self._slice(page, at, page.end))
        self.release(page)
        return left, right

    @as_engine_errors("joining pages")
    def join(self, left: Page, right: Page) -> Page:
        """Rows [a, b) and [b, c) as one new page [a, c). Both given pages are consumed."""
        assert left.group == right.group and left.end == right.start, (
            f"[.., {left.end}) and [{right.start}, ..) do not meet"
        )
        layout = self._layout.rows[left.group]
        rows = layout.empty(right.end - left.start, left.rows.device)
        at = left.end - left.start
        parts = [layout.split(each.rows, each.end - each.start) for each in (left, right)]
        for whole, first, second in zip(layout.split(rows, right.end - left.start), *parts, strict=True):
            whole[:, :, :at].copy_(first)
            whole[:, :, at:].copy_(second)
        page = self.make_page(left.group, left.start, right.end, rows)
        self.release(left)
        self.release(right)
        return page

    def release(self, item: Page | State) -> None:
        """Give the memory back."""
        assert _content(item) is not None, f"{type(item).__name__} of group {item.group.index} was released before"
        self.held_bytes -= item.nbytes
        _set_content(item, None)

    def pack(self, item: Page | State) -> bytes:
        """The content as plain bytes, bit for bit."""
        content = _content(item)
        assert content is not None, "a released item has no content"
        return bytes(content.cpu().view(torch.uint8).numpy().data)

    def unpack_page(self, group: Group, start: int, end: int, data: bytes) -> Page:
        """A new page from what `pack` gave."""
        _check_size(f"a page of rows [{start}, {end})", len(data), (end - start) * group.bytes_per_token)
        rows = _tensor(data).view(self._layout.rows[group].dtype).to(self._device)
        return self.make_page(group, start, end, rows)

    def unpack_state(self, group: Group, offset: int, data: bytes) -> State:
        """A new state from what `pack` gave."""
        _check_size(f"a state at {offset}", len(data), group.state_bytes)
        return self.make_state(group, offset, _tensor(data).to(self._device))

    def to_host(self, item: Page | State) -> None:
        """Move the content to pinned host memory; nothing happens on a CPU."""
        content = _content(item)
        if self._device.type == "cpu" or content.device.type == "cpu":
            return
        host = torch.empty(content.shape, dtype=content.dtype, pin_memory=self._device.type == "cuda")
        _set_content(item, host.copy_(content))

    def to_device(self, item: Page | State) -> None:
        """Move the content back to the device."""
        _set_content(item, _content(item).to(self._device))

    def _slice(self, page: Page, start: int, end: int) -> Tensor:
        layout = self._layout.rows[page.group]
        rows = layout.empty(end - start, page.rows.device)
        pieces = zip(layout.split(rows, end - start), layout.split(page.rows, page.end - page.start), strict=True)
        for piece, whole in pieces:
            piece.copy_(whole[:, :, start - page.start : end - page.start])
        return rows


def _content(item: Page | State) -> Tensor:
    content: Tensor = item.rows if isinstance(item, Page) else item.data
    return content


def _set_content(item: Page | State, content: Tensor | None) -> None:
    if isinstance(item, Page):
        item.rows = content
    else:
        item.data = content


def _check_size(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise ValueError(f"{what} has {wanted:,} bytes, and {found:,} were given")


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
