"""The shapes of rows and states, without any tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from bough.cache.tree.state import Group, Kind

ALIGNMENT = 64


@dataclass(frozen=True)
class RowShape:
    """The rows of one group: for each of its layers `heads` keys and values a token.

    In memory rows are planes [count, heads, tokens, width]. Where keys and values are equally long there is one plane, all
    layers' keys before all layers' values; otherwise there are two.
    """

    layers: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int
    itemsize: int

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """(count, width) of each plane."""
        num_layers = len(self.layers)
        if self.key_dim == self.value_dim:
            return ((2 * num_layers, self.width(self.key_dim)),)
        return (num_layers, self.width(self.key_dim)), (num_layers, self.width(self.value_dim))

    def width(self, dim: int) -> int:
        """The elements that `dim` numbers of one head take in memory."""
        return dim

    def plane_shapes(self, num_rows: int) -> list[tuple[int, int, int, int]]:
        return [(count, self.heads, num_rows, dim) for count, dim in self.planes]

    @property
    def row_elements(self) -> int:
        return len(self.layers) * self.heads * (self.width(self.key_dim) + self.width(self.value_dim))

    @property
    def row_bytes(self) -> int:
        return self.row_elements * self.itemsize


@dataclass(frozen=True)
class PartShape:
    """One tensor of a recurrent layer, in bytes [start, end) of the group's state."""

    layer: int
    shape: tuple[int, ...]
    itemsize: int
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    @property
    def end(self) -> int:
        return self.start + self.nbytes


ShapeT = TypeVar("ShapeT", bound=RowShape)


@dataclass(frozen=True)
class RowKind:
    """The common properties of the layers of one row group; `dtype` is the library's own type."""

    kind: Kind
    window: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: Any


@dataclass(frozen=True)
class LayerKind:
    """The content of one layer: two layers of one kind are equal. `states` names its recurrent tensors."""

    rows: Kind | None
    window: int = 0
    states: tuple[Hashable, ...] = ()

    @property
    def is_empty(self) -> bool:
        return self.rows is None and not self.states


def group_rows(kinds: Iterable[RowKind | None], make: Callable[[RowKind, tuple[int, ...]], ShapeT]) -> dict[Group, ShapeT]:
    """A group for each kind of rows, in the order of their first layers, with the shape that `make` returns for it.

    `kinds` has one entry for each layer; layers without rows have None.
    """
    layers: dict[RowKind, list[int]] = {}
    for layer, kind in enumerate(kinds):
        if kind is not None:
            layers.setdefault(kind, []).append(layer)
    groups: dict[Group, ShapeT] = {}
    for kind, indices in layers.items():
        shape = make(kind, tuple(indices))
        groups[Group(len(groups), kind.kind, bytes_per_token=shape.row_bytes, window=kind.window)] = shape
    return groups


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
