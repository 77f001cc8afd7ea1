"""A way of running a model on lanes, as the self-check and the engines see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from bough.cache.state import Group, Lane, Page, State

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


class Grouped(Protocol):
    """A layout, as far as the groups in it go."""

    @property
    def groups(self) -> Sequence[Group]: ...


class Releasing(Protocol):
    """What looks after pages, as far as giving them back goes."""

    def release(self, item: Page | State) -> None: ...


class GroupCompute(Compute[Logits], Protocol[Logits]):
    """Runs a model whose groups are known: what a lane of it holds can be published, captured and adopted."""

    @property
    def layout(self) -> Grouped: ...

    @property
    def pages(self) -> Releasing: ...
