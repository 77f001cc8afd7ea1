"""One request for generation, in token ids, as every API and the library hand it down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bough.types import Boundary, SamplingParams


def _never() -> bool:
    return False


def _ignore(done_tokens: int, total_tokens: int) -> None:
    pass


@dataclass(frozen=True)
class Request:
    """What to generate from. `seed` is settled already; `choice` tells several answers to one prompt apart.

    `strip_leading_space` drops the space that some vocabularies put before an answer's first word. `is_cancelled` is asked
    between chunks and steps. `on_progress` hears how many prompt tokens are done.
    """

    ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    boundaries: Sequence[Boundary] = ()
    salt: str = ""
    seed: int = 0
    choice: int = 0
    store: bool = True
    keep: bool = False
    strip_leading_space: bool = False
    is_cancelled: Callable[[], bool] = _never
    on_progress: Callable[[int, int], None] = _ignore
