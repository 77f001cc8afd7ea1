"""A lane of a model that has no groups: it holds the tokens, and the model's own cache if it makes a right one.

Nothing of it can be published or captured. It can only be extended, or started anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from bough.cache.state import Group, Page, Source, State


class PlainLane:
    """Implements `bough.cache.state.Lane` for a model without groups."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cache: Any = None

    @property
    def offset(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in _tensors(self.cache, 3)}.values())

    def bytes_for(self, num_tokens: int) -> int:
        """What the cache takes now: how it grows is the model's secret."""
        return self.nbytes

    def peak_for(self, num_tokens: int) -> int:
        return self.nbytes

    def reserve(self, num_tokens: int) -> None:
        """Nothing to do: the model's cache makes room as it grows."""

    def first_row(self, group: Group) -> NoReturn:
        raise ValueError("a model without groups has no rows")

    def adopt(self, offset: int, sources: Mapping[Group, Source]) -> None:
        """Start anew, or stay: a model without groups can stand nowhere else."""
        if offset == 0:
            self.clear()
        assert offset == self.offset, f"a lane without groups stands at {self.offset}, and cannot move to {offset}"

    def publish(self, group: Group, start: int, end: int) -> Page:
        raise ValueError("a model without groups has no rows")

    def capture(self, group: Group) -> State:
        raise ValueError("a model without groups has no states")

    def clear(self) -> None:
        self.ids = []
        self.cache = None

    def extend(self, ids: Sequence[int], cache: Any) -> None:
        """The model has taken `ids` in, and keeps `cache` for them."""
        self.ids = [*self.ids, *ids]
        self.cache = cache


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each, depth)
    elif depth and isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each, depth)
    elif depth and hasattr(value, "__dict__"):
        yield from _tensors(vars(value), depth - 1)
