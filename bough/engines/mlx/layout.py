"""How the state of each group lies in memory: the shapes that lanes, pages and the probe share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx

from bough.cache.tree.state import Group
from bough.engines.shared.shapes import LayerKind, PartShape, RowShape

Branch = int | tuple["Branch", ...]
"""An entry of mlx-lm's list of caches: the number of one cache, or several caches of one layer."""


@dataclass(frozen=True)
class RowLayout(RowShape):
    """The rows of one group, of one type. In a page all layers' keys lie before all values."""

    dtype: mx.Dtype

    def split(self, content: mx.array, num_rows: int) -> list[mx.array]:
        """The bytes of a page as its planes [count, heads, num_rows, dim]."""
        flat, planes, start = content.view(self.dtype), [], 0
        for shape in self.plane_shapes(num_rows):
            end = start + math.prod(shape)
            planes.append(flat[start:end].reshape(shape))
            start = end
        return planes


@dataclass(frozen=True)
class StatePart(PartShape):
    """One array of a recurrent layer: `slot` is its number in mlx-lm's ArraysCache."""

    dtype: mx.Dtype
    slot: int

    def view(self, content: mx.array) -> mx.array:
        """This part, within the bytes of a whole state."""
        return content[self.start : self.end].view(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class StateLayout:
    """The state of one recurrent group in one piece of bytes, each array in its own type."""

    parts: tuple[StatePart, ...]
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Every group of a model with its shapes. A layer is one cache of mlx-lm's, numbered as `tree` lists them.

    `num_slots` tells of each layer that keeps arrays how many. Layers in no group hold nothing. `unknown` says what the
    probe did not recognise; if there is anything, there are no groups.
    """

    groups: tuple[Group, ...]
    rows: dict[Group, RowLayout]
    states: dict[Group, StateLayout]
    tree: tuple[Branch, ...]
    num_slots: dict[int, int]
    vocab_size: int
    kinds: tuple[LayerKind, ...] = ()
    unknown: str = ""

    @property
    def parts(self) -> list[StatePart]:
        """All arrays of all recurrent states."""
        return [part for state in self.states.values() for part in state.parts]
