"""How the rows and states of each group are laid out in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bough.cache.tree.state import Group
from bough.engines.shared.shapes import LayerKind, PartShape, RowShape


@dataclass(frozen=True)
class TorchRowLayout(RowShape):
    """The rows of one group, of one type. All layers' keys come before all values, so that moving rows is one copy."""

    dtype: torch.dtype

    def empty(self, num_rows: int, device: torch.device) -> Tensor:
        """Memory for `num_rows` rows, in one piece."""
        return torch.empty(num_rows * self.row_elements, dtype=self.dtype, device=device)

    def split(self, flat: Tensor, num_rows: int) -> list[Tensor]:
        """One piece of memory as its planes [count, heads, num_rows, dim]."""
        shapes = self.plane_shapes(num_rows)
        parts = torch.split(flat, [math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def layer_views(self, planes: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """For each layer of the group its keys and values [1, heads, rows, dim]."""
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
