"""How the rows and states of each group are laid out in memory, and the pages that have left their lane."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx

from bough.cache.tree.state import Buffer, Group, Page, Range, Tier
from bough.engines.shared.errors import as_engine_errors
from bough.engines.shared.pages import PageAllocator
from bough.engines.shared.shapes import LayerKind, PartShape, RowShape

Branch = int | tuple["Branch", ...]
"""An entry of mlx-lm's list of caches: the number of one cache, or several caches of one layer."""


@dataclass(frozen=True)
class MlxRowLayout(RowShape):
    """The rows of one group, of one type. In a page all layers' keys come before all values."""

    dtype: mx.Dtype

    def split(self, content: mx.array, num_rows: int) -> list[mx.array]:
        """The bytes of a page as its planes [count, heads, num_rows, dim]."""
        shapes = self.plane_shapes(num_rows)
        ends = list(accumulate(map(math.prod, shapes)))
        parts = mx.split(content.view(self.dtype), ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclass(frozen=True)
class MlxStatePart(PartShape):
    """One array of a recurrent layer: `slot` is its number in mlx-lm's ArraysCache."""

    dtype: mx.Dtype
    slot: int

    def view(self, content: mx.array) -> mx.array:
        """This part, within the bytes of a whole state."""
        return content[self.start : self.end].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class MlxStateLayout:
    """The state of one recurrent group in one piece of bytes, each array in its own type."""

    parts: tuple[MlxStatePart, ...]
    nbytes: int


@dataclass(frozen=True)
class MlxLayout:
    """Every group of a model with its shapes. A layer is one cache of mlx-lm's, numbered as `tree` lists them.

    `num_slots` is the number of arrays of each layer that keeps some. Layers in no group hold nothing. `unknown` is what
    the probe did not recognise; then there are no groups.
    """

    groups: tuple[Group, ...]
    rows: dict[Group, MlxRowLayout]
    states: dict[Group, MlxStateLayout]
    tree: tuple[Branch, ...]
    num_slots: dict[int, int]
    vocab_size: int
    kinds: tuple[LayerKind, ...] = ()
    unknown: str = ""

    @property
    def parts(self) -> list[MlxStatePart]:
        return [part for state in self.states.values() for part in state.parts]


class MlxPages(PageAllocator):
    """Makes and releases every page and state of one model.

    Each is an array of bytes in memory of its own, given to the device when it was made. Memory is unified: there is no
    host tier, and the bytes can be read where they are.
    """

    def __init__(self, layout: MlxLayout) -> None:
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
