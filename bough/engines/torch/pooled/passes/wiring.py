"""Which module of a transformers model attends in which layer, and the rows that each looks at.

Found by running one token: the attention function is given its module.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bough.cache.tree.state import Group
from bough.engines.torch.forward import Forward
from bough.engines.torch.layout import Layout
from bough.engines.torch.pooled.attention import operator
from bough.engines.torch.pooled.attention.bucket import Scores
from bough.engines.torch.pooled.lanes.memory import PoolMemory


class NotWired(Exception):
    """The model's attention cannot be led to a pool; the text says why."""


@dataclass(frozen=True)
class GroupShape:
    """What attention over one row group needs to know: `shared` query heads look at each of the `heads` key heads."""

    index: int
    heads: int
    shared: int
    dim: int
    dtype: torch.dtype


class _Probe:
    """A pass that notes which modules attend, each with its number of query heads. The group stands for the module."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def attend(self, group: int, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scores: Scores) -> Tensor:
        self.seen.append((group, query.shape[1]))
        return torch.zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]).to(query)


class Wiring:
    """The attention modules of a model, each with its row group and its place in that."""

    def __init__(self, forward: Forward, layout: Layout) -> None:
        self._layout = layout
        places = {layer: (group, place) for group, rows in layout.rows.items() for place, layer in enumerate(rows.layers)}
        self._modules: list[tuple[nn.Module, Group, int]] = []
        queries: dict[Group, set[int]] = {}
        for module, num_queries in _find_modules(forward):
            layer = getattr(module, "layer_idx", None)
            if layer not in places:
                raise NotWired(f"{type(module).__name__} of layer {layer} has no rows of its own")
            group, place = places.pop(layer)
            self._modules.append((module, group, place))
            queries.setdefault(group, set()).add(num_queries)
        if places:
            raise NotWired(f"layers {sorted(places)} keep rows and were not seen to attend")
        self.shapes = {group: self._shape(group, found) for group, found in queries.items()}

    @property
    def modules(self) -> list[nn.Module]:
        return [module for module, _, _ in self._modules]

    def connect(self, memory: PoolMemory) -> None:
        """Let every module look at its layer's rows."""
        for module, group, place in self._modules:
            operator.give_rows(module, memory.layer_rows(group, place), group.index, group.window)

    def disconnect(self) -> None:
        for module, _, _ in self._modules:
            operator.take_rows(module)

    def _shape(self, group: Group, queries: set[int]) -> GroupShape:
        rows = self._layout.rows[group]
        if len(queries) != 1 or min(queries) % rows.heads:
            raise NotWired(f"{sorted(queries)} query heads look at {rows.heads} key heads")
        return GroupShape(group.index, rows.heads, min(queries) // rows.heads, rows.key_dim, rows.dtype)


def _find_modules(forward: Forward) -> list[tuple[nn.Module, int]]:
    """The modules that attend when one token is run, in their order, each with its number of query heads."""
    candidates = [module for module in forward.model.modules() if hasattr(module, "layer_idx")]
    probe, ids = _Probe(), torch.zeros(1, 1, dtype=torch.long, device=forward.device)
    for number, module in enumerate(candidates):
        operator.give_rows(module, torch.empty(0), number, 0)
    try:
        with operator.attending(probe), torch.no_grad():
            forward.call(ids, ids, None, use_cache=False)
    finally:
        for module in candidates:
            operator.take_rows(module)
    return [(candidates[number], num_queries) for number, num_queries in probe.seen]
