"""Pages and states that have left their lane: made, cut, joined, packed, released.

Each is an array of bytes in memory of its own, given to the device when it was made. Memory is unified: there is no host
place, and the bytes can be read where they lie.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from bough.cache.state import Buffer, Group, Page, Place, State
from bough.engine_parts.failures import as_engine_errors
from bough.engine_parts.pages import PageBook, check_cut, check_join, check_page_size, check_state_size, content_of
from bough.mlx_engine.layout import Layout


class Pages(PageBook):
    """Looks after every page and state of one model."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    @as_engine_errors("cutting a page")
    def cut(self, page: Page, at: int) -> tuple[Page, Page]:
        """Rows [start, at) and [at, end) as two new pages. The given page is consumed."""
        check_cut(page, at)
        planes, middle = self._planes(page), at - page.start
        first = _bytes_of([plane[:, :, :middle] for plane in planes])
        second = _bytes_of([plane[:, :, middle:] for plane in planes])
        left = self.make_page(page.group, page.start, at, first)
        right = self.make_page(page.group, at, page.end, second)
        self.release(page)
        return left, right

    @as_engine_errors("joining pages")
    def join(self, left: Page, right: Page) -> Page:
        """Rows [a, b) and [b, c) as one new page [a, c). Both given pages are consumed."""
        check_join(left, right)
        planes = [mx.concatenate(list(pair), axis=2) for pair in zip(self._planes(left), self._planes(right), strict=True)]
        page = self.make_page(left.group, left.start, right.end, _bytes_of(planes))
        self.release(left)
        self.release(right)
        return page

    @as_engine_errors("reading content out")
    def pack(self, item: Page | State) -> memoryview | None:
        """The content as plain bytes; None if it was released. Any thread may call this at any time."""
        content = content_of(item)  # looked at once: another thread may release the item meanwhile
        return None if content is None else memoryview(content).toreadonly()

    def unpack_page(self, group: Group, start: int, end: int, data: Buffer, place: Place = Place.DEVICE) -> Page:
        """A new page from what `pack` gave."""
        check_page_size(group, start, end, data)
        return self.make_page(group, start, end, _array_of(data))

    def unpack_state(self, group: Group, offset: int, data: Buffer, place: Place = Place.DEVICE) -> State:
        """A new state from what `pack` gave."""
        check_state_size(group, offset, data)
        return self.make_state(group, offset, _array_of(data))

    def _planes(self, page: Page) -> list[mx.array]:
        assert page.rows is not None, f"a page of [{page.start}, {page.end}) without rows"
        return self._layout.rows[page.group].split(page.rows, page.end - page.start)


def _bytes_of(planes: list[mx.array]) -> mx.array:
    """The planes one after the other, as bytes in memory of their own."""
    flat = [plane.flatten() for plane in planes]
    content = mx.contiguous(mx.concatenate(flat) if len(flat) > 1 else flat[0]).view(mx.uint8)
    mx.async_eval(content)
    return content


@as_engine_errors("taking content in")
def _array_of(data: Buffer) -> mx.array:
    plain: Any = memoryview(data).cast("B")  # which MLX's types leave out
    return mx.array(plain)
