"""A lane's memory for each group: contiguous buffers of rows, and whole states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bough.cache.tree.state import Group, Page
from bough.engines.shared.row_memory import LaneSizes, RowMemory
from bough.engines.torch.layout import TorchRowLayout, TorchStateLayout
from bough.engines.torch.row_types import ClippedNumbers

Views = list[tuple[Tensor, Tensor]]
"""Keys and values [1, heads, rows, width] of each layer of a group."""


class TorchRowBuffer(RowMemory):
    """The rows of one group on one lane, in one piece of memory for each plane."""

    def __init__(
        self, group: Group, layout: TorchRowLayout, device: torch.device, sizes: LaneSizes, clipped: ClippedNumbers
    ) -> None:
        super().__init__(group, sizes)
        self.layout = layout
        self.clipped = clipped
        self._run = (0, 0)  # the rows [start, end) of the current run
        self._written: Views | None = None
        self._seen: Views | None = None
        self._planes: list[Tensor] = []
        self._device = device

    def begin_run(self, offset: int, num_tokens: int) -> None:
        """Make room for rows [offset, offset + num_tokens)."""
        self.make_room(offset, num_tokens)
        self._run = (offset, offset + num_tokens)
        self._written = self._seen = None

    def end_run(self) -> None:
        self._run = (0, 0)
        self._written = self._seen = None

    @property
    def written(self) -> Views:
        """The rows of the current run, for each layer: it is cheaper to make the views of all layers together."""
        if self._written is None:
            self._written = self._views(*self._run)
        return self._written

    @property
    def seen(self) -> Views:
        """The rows that the queries of this run may see, its own included."""
        if self._seen is None:
            start, end = self._run
            self._seen = self._views(self.group.first_needed(start), end)
        return self._seen

    def addresses(self) -> tuple[int, int, int, int, int]:
        """The rows that the current run may see: addresses of the first layer's first key and first value, bytes to the
        next layer, elements to the next head, and the number of rows. Keys and values must be equally long.
        """
        plane, (start, end) = self._planes[0], self._run
        first, size = self.group.first_needed(start), plane.element_size()
        layer_bytes = plane.stride(0) * size
        keys = plane.data_ptr() + (first - self.base) * plane.stride(2) * size
        return keys, keys + len(self.layout.layers) * layer_bytes, layer_bytes, plane.stride(1), end - first

    def write(self, page: Page, content: Tensor, start: int, end: int) -> None:
        """Copy rows [start, end) from a page's content on the device: one copy for each plane."""
        pieces = self.layout.split(content, page.end - page.start)
        for plane, piece in zip(self._planes, pieces, strict=True):
            plane[:, :, start - self.base : end - self.base].copy_(piece[:, :, start - page.start : end - page.start])

    def read(self, start: int, end: int) -> Tensor:
        flat = self.layout.empty(end - start, self._device)
        for plane, piece in zip(self._planes, self.layout.split(flat, end - start), strict=True):
            piece.copy_(plane[:, :, start - self.base : end - self.base])
        return flat

    def _drop(self) -> None:
        self.end_run()
        self._planes = []

    def _resize(self, capacity: int, first: int, offset: int) -> None:
        flat = self.layout.empty(capacity, self._device)
        planes = self.layout.split(flat, capacity)
        if offset > first:
            self._move(planes, first, offset)
        self._planes, self.base, self.capacity = planes, first, capacity

    def _shift(self, first: int, offset: int) -> None:
        self._move(self._planes, first, offset)

    def _views(self, start: int, end: int) -> Views:
        return self.layout.layer_views([plane[:, :, start - self.base : end - self.base] for plane in self._planes])

    def _move(self, targets: list[Tensor], first: int, offset: int) -> None:
        """Copy the live rows [first, offset) to the start of `targets`, which may be these planes themselves."""
        start, stop = first - self.base, offset - self.base
        for target, plane in zip(targets, self._planes, strict=True):
            rows = plane[:, :, start:stop]
            overlaps = target is plane and stop - start > start
            target[:, :, : stop - start].copy_(rows.clone() if overlaps else rows)


class TorchStateBuffer:
    """The state of one recurrent group on one lane: one piece of bytes, of which the model's cache layers have views."""

    def __init__(self, layout: TorchStateLayout, layers: dict[int, Any], device: torch.device) -> None:
        self.layout = layout
        self._layers = layers
        self._device = device
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        return 0 if self._flat is None else self.layout.nbytes

    @property
    def full_bytes(self) -> int:
        return self.layout.nbytes

    def reserve(self) -> None:
        if self._flat is None:
            self._flat = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=self._device)
            self._views = [part.view(self._flat) for part in self.layout.parts]
            for part, view in zip(self.layout.parts, self._views, strict=True):
                self._layers[part.layer].bind(part.name, part.state_index, view)

    def reset(self) -> None:
        if self._flat is not None:
            self._flat.zero_()
        self._mark(False)

    def write(self, fill: Callable[[Tensor], None]) -> None:
        """Let `fill` write a whole state into these bytes."""
        assert self._flat is not None, "adopt before reserve"
        fill(self._flat)
        self._mark(True)

    def read(self) -> Tensor:
        assert self._flat is not None, "capture before reserve"
        return self._flat.clone()

    def copy_back(self) -> None:
        """Copy back the states that a model assigned to its cache layers instead of writing in place."""
        for part, view in zip(self.layout.parts, self._views, strict=True):
            current = getattr(self._layers[part.layer], part.name)[part.state_index]
            if current is not view:
                view.copy_(current)
                getattr(self._layers[part.layer], part.name)[part.state_index] = view

    def views(self) -> list[Tensor]:
        return self._views

    def free(self) -> None:
        self._flat = None
        self._views = []
        self._mark(False)
        for layer in self._layers.values():
            layer.unbind()

    def _mark(self, has_state: bool) -> None:
        for index, layer in self._layers.items():
            layer.mark(self.layout.marks[index] if has_state else (False,) * self.layout.num_states[index])
