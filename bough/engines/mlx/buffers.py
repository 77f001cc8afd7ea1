"""The content of a lane for each group: contiguous buffers of rows, and whole states.

MLX's arrays are values: writing makes a new array, which reuses the old one's memory if that has no other reference.
So each layer has its keys and values in arrays of their own, and nothing keeps an old array while a new one is evaluated.

Between two calls every array here was given to the device: another thread could not go on with one that was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import mlx.core as mx

from bough.cache.tree.state import Group, Page
from bough.engines.mlx.device import require_bytes
from bough.engines.mlx.layout import MlxRowLayout, MlxStateLayout
from bough.engines.mlx.library import cache
from bough.engines.shared.row_memory import LaneSizes, RowMemory
from bough.engines.shared.shapes import aligned


class MlxRowBuffer(RowMemory):
    """The rows of one group on one lane: all layers' keys [1, heads, capacity, dim], then all layers' values."""

    def __init__(self, group: Group, layout: MlxRowLayout, sizes: LaneSizes) -> None:
        super().__init__(group, sizes)
        self.layout = layout
        self.arrays: list[mx.array] = []
        self._run = (0, 0)  # the rows [start, end) of the run that is under way

    def begin_run(self, offset: int, num_tokens: int) -> None:
        """Get ready for rows [offset, offset + num_tokens)."""
        self.make_room(offset, num_tokens)
        self._run = (offset, offset + num_tokens)

    def write_run(self, layer_in_group: int, keys: mx.array, values: mx.array) -> None:
        """Write the rows of the run under way, of this layer of the group."""
        for index, rows in ((layer_in_group, keys), (layer_in_group + len(self.layout.layers), values)):
            self._put(index, *self._run, rows)

    def seen(self, layer_in_group: int) -> tuple[mx.array, mx.array]:
        """The keys and values that the run under way may look at, its own included."""
        start, end = self._run
        first = self.group.first_needed(start)
        return self._rows(layer_in_group, first, end), self._rows(layer_in_group + len(self.layout.layers), first, end)

    def write(self, page: Page, content: mx.array, start: int, end: int) -> None:
        """Copy rows [start, end) of a page in."""
        planes = self.layout.split(content, page.end - page.start)
        layers = [layer for plane in planes for layer in plane[:, :, start - page.start : end - page.start]]
        for index, rows in enumerate(layers):
            self._put(index, start, end, rows)

    def read(self, start: int, end: int) -> mx.array:
        """Rows [start, end) as bytes in memory of their own."""
        content = mx.concatenate([rows.flatten() for rows in self._all_rows(start, end)]).view(mx.uint8)
        mx.async_eval(content)
        return content

    def _put(self, index: int, start: int, end: int, rows: mx.array) -> None:
        array = copy(self.arrays[index])  # a new object: assigning to its items leaves the old one as it was
        array[..., start - self.base : end - self.base, :] = rows
        self.arrays[index] = array

    def _rows(self, index: int, start: int, end: int) -> mx.array:
        return self.arrays[index][..., start - self.base : end - self.base, :]

    def _all_rows(self, start: int, end: int) -> list[mx.array]:
        return [self._rows(index, start, end) for index in range(len(self.arrays))]

    def _resize(self, capacity: int, first: int, offset: int) -> None:
        old = self._all_rows(first, offset) if offset > first else []
        require_bytes(capacity * self.group.bytes_per_token)
        layout = self.layout
        dims = [layout.key_dim] * len(layout.layers) + [layout.value_dim] * len(layout.layers)
        arrays = [mx.zeros((1, layout.heads, capacity, dim), dtype=layout.dtype) for dim in dims]
        for array, rows in zip(arrays, old, strict=False):
            array[..., : offset - first, :] = rows
        mx.eval(arrays)
        self.arrays, self.base, self.capacity = arrays, first, capacity

    def _shift(self, first: int, offset: int) -> None:
        for index in range(len(self.arrays)):
            rows = mx.contiguous(self._rows(index, first, offset))
            self._put(index, self.base, self.base + offset - first, rows)
        mx.eval(self.arrays)

    def _drop(self) -> None:
        self.arrays, self._run = [], (0, 0)


class MlxStateBuffer:
    """The state of one recurrent group on one lane: the arrays in the caches that the model is given.

    `has_spare`: there may be a second state beside this one, computed ahead, whose memory counts, too.
    """

    def __init__(self, layout: MlxStateLayout, caches: dict[int, cache.ArraysCache], *, has_spare: bool) -> None:
        self.layout = layout
        self.full_bytes = (2 if has_spare else 1) * layout.nbytes
        self._caches = caches
        self._is_reserved = False

    @property
    def nbytes(self) -> int:
        return self.full_bytes if self._is_reserved else 0

    @property
    def arrays(self) -> list[mx.array | None]:
        """The arrays of the state, in the order of the layout's parts; None before the first run."""
        return [self._caches[part.layer][part.slot] for part in self.layout.parts]

    def reserve(self) -> None:
        """Count the memory as taken: the model makes the arrays themselves in its first run."""
        self._is_reserved = True

    def make_contiguous(self) -> None:
        """Copy the arrays after a run: a model may leave slices of something larger."""
        self.put([None if each is None else mx.contiguous(each) for each in self.arrays])

    def put(self, arrays: Sequence[mx.array | None]) -> None:
        """Set the arrays of the state, in the order of the layout's parts."""
        for part, array in zip(self.layout.parts, arrays, strict=True):
            self._caches[part.layer][part.slot] = array

    def reset(self) -> None:
        self.put([None] * len(self.layout.parts))

    def write(self, content: mx.array) -> None:
        self.put([mx.contiguous(part.view(content)) for part in self.layout.parts])

    def read(self) -> mx.array:
        """The whole state as bytes in memory of its own."""
        pieces: list[mx.array] = []
        for part, array in zip(self.layout.parts, self.arrays, strict=True):
            assert array is not None, "capture of a lane that holds nothing"
            pieces += [array.flatten().view(mx.uint8), mx.zeros(aligned(part.nbytes) - part.nbytes, dtype=mx.uint8)]
        content = mx.concatenate(pieces)
        mx.async_eval(content)
        return content

    def free(self) -> None:
        self.reset()
        self._is_reserved = False
