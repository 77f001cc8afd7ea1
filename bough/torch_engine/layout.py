"""How the state of each group lies in memory: the shapes that lanes, pages and the probe share."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.cache.state import Group

ALIGNMENT = 64


@dataclass(frozen=True)
class RowLayout:
    """The rows of one group: for each of its layers `heads` keys and values a token.

    In memory rows are planes [count, heads, tokens, dim]. Where keys and values are equally long there is one plane, all
    layers' keys before all layers' values, so that moving rows is one copy; otherwise there are two.
    """

    layers: tuple[int, ...]
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """(count, dim) of each plane."""
        num_layers = len(self.layers)
        if self.key_dim == self.value_dim:
            return ((2 * num_layers, self.key_dim),)
        return (num_layers, self.key_dim), (num_layers, self.value_dim)

    @property
    def row_elements(self) -> int:
        return len(self.layers) * self.heads * (self.key_dim + self.value_dim)

    @property
    def row_bytes(self) -> int:
        return self.row_elements * self.dtype.itemsize

    def empty(self, num_rows: int, device: torch.device) -> Tensor:
        """Memory for that many rows, in one piece."""
        return torch.empty(num_rows * self.row_elements, dtype=self.dtype, device=device)

    def split(self, flat: Tensor, num_rows: int) -> list[Tensor]:
        """One piece of memory as its planes [count, heads, num_rows, dim]."""
        sizes = [count * self.heads * num_rows * dim for count, dim in self.planes]
        shapes = [(count, self.heads, num_rows, dim) for count, dim in self.planes]
        return [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]

    def layer_views(self, planes: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """For each layer of the group its keys and values [1, heads, rows, dim]."""
        tensors = [tensor for plane in planes for tensor in plane.unsqueeze(1).unbind()]
        num_layers = len(self.layers)
        return list(zip(tensors[:num_layers], tensors[num_layers:], strict=True))


@dataclass(frozen=True)
class StatePart:
    """One tensor of a recurrent layer: which it is, and which bytes of the group's state it occupies."""

    layer: int
    name: str  # the attribute of transformers' layer: conv_states or recurrent_states
    state_index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """This part, within the bytes of a whole state."""
        return flat[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class StateLayout:
    """The state of one recurrent group in one piece of bytes, each tensor in its own type.

    `num_states` says how many state indices a layer has, `marks` which of them a model marks as seen after a run.
    """

    parts: tuple[StatePart, ...]
    num_states: dict[int, int]
    marks: dict[int, tuple[bool, ...]]
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """Every group of a model with its shapes. `num_layers` counts the cache's layers, of which some may hold nothing.

    `blank_recurrent` are the recurrent layers that hold nothing. `unknown` says what the probe did not recognise; if there
    is anything, there are no groups.
    """

    groups: tuple[Group, ...]
    rows: dict[Group, RowLayout]
    states: dict[Group, StateLayout]
    num_layers: int
    vocab_size: int
    kinds: tuple[str, ...] = ()
    blank_recurrent: frozenset[int] = frozenset()
    unknown: str = ""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
