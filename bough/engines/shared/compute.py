"""A way of running a model on lanes, as the self-check and the engines see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from bough.cache.tree.state import Group, Lane
from bough.engines.shared.pages import PageBook

Logits = TypeVar("Logits")


class Compute(Protocol[Logits]):
    """Makes lanes and runs tokens on them. `Logits` are tensors of the engine's library."""

    def make_lane(self) -> Lane: ...

    def evaluate(self, lane: Any, ids: Sequence[int]) -> Logits:
        """Append a run to the lane; returns the logits after its last token."""
        ...

    def step(self, lanes: Sequence[Any], ids: Sequence[int]) -> list[Logits]:
        """Append one token to each lane."""
        ...


class Shapes(Protocol):
    """A layout, as far as it is looked at without the tensor library."""

    @property
    def groups(self) -> Sequence[Group]: ...

    @property
    def vocab_size(self) -> int: ...


class GroupCompute(Compute[Logits], Protocol[Logits]):
    """Runs a model whose groups are known: what a lane of it holds can be published, captured and adopted."""

    @property
    def layout(self) -> Shapes: ...

    @property
    def pages(self) -> PageBook: ...
