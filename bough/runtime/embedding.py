"""Embeddings: a vector for a text, by an encoder's own pooling or by the last hidden state of a language model.

An embedder tokenizes texts and computes their vectors on the engine's thread. What is the same for all of them is here:
how vectors are shortened and normalised, and how many texts are under way at a time.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bough.errors import BoughError, RequestError

WINDOW = 512
"""The most texts of one caller that are queued at a time."""


@dataclass(frozen=True)
class Embedded:
    """The vector of one text, as the model gives it, how many tokens the text had, and how many of them were reused.

    Thousands of them wait for the last text of a call: 4 bytes hold a number, and an object of Python takes 32.
    """

    vector: array[float]
    num_tokens: int
    cached_tokens: int = 0


OnEmbedded = Callable[[Embedded | BoughError], None]
"""Is told the result of one text, once. The engine's thread calls it, so it must not block or raise."""


class Embedder(Protocol):
    """A model that turns texts into vectors. Any thread may call it."""

    @property
    def dimensions(self) -> int:
        """How many numbers a vector has."""
        ...

    @property
    def max_tokens(self) -> int:
        """The most tokens of one text, special tokens included."""
        ...

    def tokenize(self, text: str, *, truncate: bool) -> list[int]:
        """The token ids of a text, with the special tokens that the model was trained with.

        A text that is too long is cut if `truncate` says so, or else raises PromptTooLong.
        """
        ...

    def check_ids(self, ids: Sequence[int], *, truncate: bool) -> list[int]:
        """As `tokenize`, for a text that is given as token ids. Raises RequestError for ids outside the vocabulary."""
        ...

    def start(
        self,
        ids: Sequence[int],
        on_embedded: OnEmbedded,
        *,
        is_cancelled: Callable[[], bool],
        salt: str = "",
        tenant: str = "",
    ) -> None:
        """Queue a text. Raises Unavailable (ShuttingDown, EngineStuck, QueueFull), and then nothing is told."""
        ...


def finish_vector(vector: Sequence[float], *, dimensions: int | None, normalize: bool) -> list[float]:
    """The first `dimensions` numbers of a vector, scaled to length 1 if asked. A vector of zeros stays as it is."""
    kept = list(vector if dimensions is None else vector[:dimensions])
    if not normalize:
        return kept
    length = math.sqrt(math.fsum(number * number for number in kept))
    return [number / length for number in kept] if length > 0 else kept


def check_dimensions(dimensions: int | None, embedder: Embedder) -> None:
    """Raise RequestError if a vector cannot be shortened to so many numbers."""
    if dimensions is None:
        return
    if type(dimensions) is not int or not 1 <= dimensions <= embedder.dimensions:
        raise RequestError(f"dimensions is {dimensions!r}, and must be from 1 to {embedder.dimensions}")
