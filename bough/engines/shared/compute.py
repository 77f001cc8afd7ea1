"""The ways of running a model on lanes, as the self-check and the engines see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from bough.cache.tree.state import Group, Lane
from bough.engines.shared.pages import PageAllocator

Logits = TypeVar("Logits")


class Compute(Protocol[Logits]):
    """Makes lanes and runs tokens on them. `Logits` are tensors of the engine's library."""

    def make_lane(self) -> Lane: ...

    def evaluate(self, lane: Any, ids: Sequence[int]) -> Logits:
        """Append a run to the lane; returns the logits after its last token."""
        ...

    def evaluate_all(self, lane: Any, ids: Sequence[int]) -> Logits:
        """Append a run to the lane; returns the logits after each of its tokens, [run, vocabulary]."""
        ...

    def evaluate_state(self, lane: Any, ids: Sequence[int]) -> Logits:
        """Append a run to the lane; returns what the head reads after its last token, [hidden], in float32."""
        ...

    def step(self, lanes: Sequence[Any], ids: Sequence[int]) -> list[Logits]:
        """Append one token to each lane."""
        ...


class Shapes(Protocol):
    """The part of a layout that needs no tensor library."""

    @property
    def groups(self) -> Sequence[Group]: ...

    @property
    def vocab_size(self) -> int: ...


class GroupCompute(Compute[Logits], Protocol[Logits]):
    """Runs a model whose groups are known: what a lane of it holds can be published, captured and adopted."""

    @property
    def layout(self) -> Shapes: ...

    @property
    def pages(self) -> PageAllocator: ...


class Way(StrEnum):
    """Where the state of a sequence is kept while a model runs."""

    LANES = "lanes"
    """In Bough's own lanes: it can be reused."""
    LIBRARY = "library"
    """In the cache that the model's library makes."""
    RECOMPUTE = "recompute"
    """Nowhere: every step starts from the first token."""


@dataclass(frozen=True)
class Verdict:
    """How to run a model, and what it can do that way.

    `whole_step`: a step is one call of our own kernels, not of the model's modules; else `why_no_whole_step` says why.
    `is_pooled`: lanes and pages share the slots of one pool; else `why_not_pooled` says why not, where that was tried.
    The self-check finds it. Verdicts are kept as JSON files, so the names of these fields must not change.
    """

    attention: str
    way: Way = Way.LANES
    can_chunk: bool = True
    can_reuse: bool = True
    can_batch: bool = False
    reason: str = ""
    differences: dict[str, float] = field(default_factory=dict)
    whole_step: bool = False
    why_no_whole_step: str = ""
    is_pooled: bool = False
    why_not_pooled: str = ""

    @property
    def worth(self) -> tuple[bool, bool, bool]:
        """The better of two verdicts has the larger worth."""
        return self.can_reuse, self.can_chunk, self.way is Way.LANES
