"""A loaded model that turns texts into vectors, as the service uses it, wherever its engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bough.runtime.embedding import ComputedText, Embedder, TextTokens
from bough.system.tasks import wait_for


class ServedEmbedder(TextTokens, Protocol):
    """As `Embedder`, for tasks of an event loop."""

    async def compute(self, ids: Sequence[int], salt: str, tenant: str) -> ComputedText:
        """The vector of a text. Cancelling the caller cancels the work. Raises Unavailable, or why there is no vector."""
        ...


class InProcessEmbedder:
    """Implements `ServedEmbedder` by an embedder whose engine runs in this process."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.dimensions = embedder.dimensions
        self.max_tokens = embedder.max_tokens
        self.tokenize = embedder.tokenize
        self.check_ids = embedder.check_ids

    async def compute(self, ids: Sequence[int], salt: str, tenant: str) -> ComputedText:
        return await wait_for(
            lambda hear, is_cancelled: self._embedder.start(ids, hear, is_cancelled=is_cancelled, salt=salt, tenant=tenant)
        )
