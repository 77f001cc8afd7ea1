"""How the rows and states of each group are laid out in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bough.cache.tree.state import Group
from bough.engines.shared.shapes import LayerKind, PartShape, RowShape
from bough.engines.torch.row_types import ROW_TYPES, ClippedNumbers, decode, encode, kept_width, name_of


@dataclass(frozen=True)
class TorchRowLayout(RowShape):
    """The rows of one group, of one type. All layers' keys come before all values, so that moving rows is one copy.

    `dtype` is the element in memory, `computed` the type that the model computes with: usually the same (see row_types.py).
    """

    dtype: torch.dtype
    computed: torch.dtype

    def keep_as(self, kv: str) -> TorchRowLayout:
        """The same rows, kept in another type."""
        return replace(self, dtype=ROW_TYPES[kv], itemsize=ROW_TYPES[kv].itemsize)

    @property
    def is_rounded(self) -> bool:
        return self.dtype != self.computed

    def width(self, dim: int) -> int:
        return kept_width(self.dtype, dim)

    def write(self, rows: tuple[Tensor, Tensor], memory: tuple[Tensor, Tensor], clipped: ClippedNumbers) -> None:
        """Write keys and values [1, heads, rows, dim] of one layer into views of the memory."""
        for each, kept in zip(rows, memory, strict=True):
            if self.is_rounded:
                encode(each, kept, clipped)
            else:
                kept.copy_(each)

    def read(self, memory: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as the model computes with them: the memory itself, unless they are rounded."""
        keys, values = memory
        return decode(keys, self.key_dim, self.computed), decode(values, self.value_dim, self.computed)

    def empty(self, num_rows: int, device: torch.device) -> Tensor:
        """Memory for `num_rows` rows, in one piece."""
        return torch.empty(num_rows * self.row_elements, dtype=self.dtype, device=device)

    def split(self, flat: Tensor, num_rows: int) -> list[Tensor]:
        """One piece of memory as its planes [count, heads, num_rows, width]."""
        shapes = self.plane_shapes(num_rows)
        parts = torch.split(flat, [math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def layer_views(self, planes: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """For each layer of the group its keys and values [1, heads, rows, width]."""
        tensors = [tensor for plane in planes for tensor in plane.unsqueeze(1).unbind()]
        num_layers = len(self.layers)
        return list(zip(tensors[:num_layers], tensors[num_layers:], strict=True))


@dataclass(frozen=True)
class TorchStatePart(PartShape):
    """One tensor of a recurrent layer: `name` is the attribute of transformers' layer, conv_states or recurrent_states."""

    dtype: torch.dtype
    name: str
    state_index: int

    def view(self, flat: Tensor) -> Tensor:
        """This part, within the bytes of a whole state."""
        return flat[self.start : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class TorchStateLayout:
    """The state of one recurrent group in one piece of bytes, each tensor in its own type.

    For each layer `num_states` is the number of state indices, `marks` which of them a model marks as seen after a run.
    """

    parts: tuple[TorchStatePart, ...]
    num_states: dict[int, int]
    marks: dict[int, tuple[bool, ...]]
    nbytes: int


@dataclass(frozen=True)
class TorchLayout:
    """Every group of a model with its shapes. `num_layers` counts the cache's layers, of which some may hold nothing.

    `empty` are the layers that hold nothing, each with the class that transformers makes for it. `unknown` is what the
    probe did not recognise; then there are no groups.
    """

    groups: tuple[Group, ...]
    rows: dict[Group, TorchRowLayout]
    states: dict[Group, TorchStateLayout]
    num_layers: int
    vocab_size: int
    kinds: tuple[LayerKind, ...] = ()
    empty: Mapping[int, type[Any]] = field(default_factory=dict)
    unknown: str = ""

    @property
    def kv(self) -> str:
        """The type in which rows are kept; empty if there are none."""
        return name_of(next(iter(self.rows.values())).dtype) if self.rows else ""

    def keep_as(self, kv: str) -> TorchLayout:
        """The same model with its rows kept in another type; with "" in its own."""
        if not kv or not self.rows:
            return self
        kept = {group: rows.keep_as(kv) for group, rows in self.rows.items()}
        rows = {replace(group, bytes_per_token=shape.row_bytes): shape for group, shape in kept.items()}
        return replace(self, groups=(*rows, *self.states), rows=rows)
