"""Pages and states that have left their lane.

Each is an array of bytes in memory of its own, given to the device when it was made. Memory is unified: there is no host
place, and the bytes can be read where they lie.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from bough.cache.tree.state import Buffer, Group, Page, Range, Tier
from bough.engines.mlx.layout import Layout
from bough.engines.shared.errors import as_engine_errors
from bough.engines.shared.pages import PageAllocator


class Pages(PageAllocator):
    """Looks after every page and state of one model."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout

    def _slice(self, page: Page, start: int, end: int) -> mx.array:
        return _bytes_of([plane[:, :, start - page.start : end - page.start] for plane in self._planes(page)])

    def _joined(self, left: Page, right: Page) -> mx.array:
        pairs = zip(self._planes(left), self._planes(right), strict=True)
        return _bytes_of([mx.concatenate(list(pair), axis=2) for pair in pairs])

    def _to_bytes(self, content: Any) -> memoryview:
        return memoryview(content).toreadonly()

    @as_engine_errors("taking content in")
    def _from_bytes(self, group: Group, span: Range, data: Buffer, tier: Tier) -> mx.array:
        plain: Any = memoryview(data).cast("B")  # which MLX's types leave out
        return mx.array(plain)

    def _planes(self, page: Page) -> list[mx.array]:
        assert page.rows is not None, f"a page of [{page.start}, {page.end}) without rows"
        return self._layout.rows[page.group].split(page.rows, page.end - page.start)


def _bytes_of(planes: list[mx.array]) -> mx.array:
    """The planes one after the other, as bytes in memory of their own."""
    flat = [plane.flatten() for plane in planes]
    content = mx.contiguous(mx.concatenate(flat) if len(flat) > 1 else flat[0]).view(mx.uint8)
    mx.async_eval(content)
    return content
