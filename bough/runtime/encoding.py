"""Embeddings and scores by an encoder: texts are tokenized by the caller, and encoded in batches by the engine's thread."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bough.engines.contract import EncoderEngine, EncoderInput
from bough.errors import BoughError
from bough.models.encoders.tokenizer import EncoderTokenizer
from bough.runtime.embedding import Embedded, OnEmbedded
from bough.scheduling.encoder_scheduler import EncoderJob
from bough.scheduling.worker import Worker


@dataclass(frozen=True)
class Scored:
    """How well a document answers a query, as the model gives it, and how many tokens both have. None is reused."""

    score: float
    num_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class Ranked:
    """A document by its place in the list that was given, and how well it answers the query: higher is better."""

    index: int
    score: float


def rank(scores: Iterable[float], top_n: int | None) -> list[Ranked]:
    """The documents by falling score, the first `top_n` of them; those of equal scores in the order of the list."""
    return sorted(map(Ranked, itertools.count(), scores), key=lambda each: -each.score)[:top_n]


OnScored = Callable[[Scored | BoughError], None]
"""Is told the score of one document, once. The engine's thread calls it, so it must not block or raise."""


class EncoderEmbedder:
    """The Embedder of an encoder: its own pooling, and its own prompt before each text."""

    def __init__(self, engine: EncoderEngine, tokenizer: EncoderTokenizer, find_worker: Callable[[], Worker]) -> None:
        self._tokenizer = tokenizer
        self._find_worker = find_worker
        self.dimensions: int = engine.dimensions
        self.max_tokens: int = tokenizer.max_tokens

    def tokenize(self, text: str, *, truncate: bool) -> list[int]:
        """The token ids of a text, with prompt and special tokens. Raises PromptTooLong if it is too long and not cut."""
        return self._tokenizer.encode(text, truncate=truncate)

    def check_ids(self, ids: Sequence[int], *, truncate: bool) -> list[int]:
        """As `tokenize`, for token ids. Raises RequestError for ids outside the vocabulary."""
        return self._tokenizer.check_ids(ids, truncate=truncate)

    def start(
        self,
        ids: Sequence[int],
        on_embedded: OnEmbedded,
        *,
        is_cancelled: Callable[[], bool],
        salt: str = "",
        tenant: str = "",
    ) -> None:
        """Queue a text. Nothing of it is kept, so that the salt has no effect. Raises Unavailable."""

        def tell(result: Sequence[float] | BoughError) -> None:
            on_embedded(result if isinstance(result, BoughError) else Embedded(array("f", result), len(ids)))

        text = EncoderInput(ids, num_prompt=self._tokenizer.count_prompt(ids))
        self._find_worker().submit(EncoderJob(text, tell, is_cancelled, tenant))


class EncoderReranker:
    """Scores documents by a query, with an encoder that reads both together."""

    def __init__(self, tokenizer: EncoderTokenizer, find_worker: Callable[[], Worker]) -> None:
        self._tokenizer = tokenizer
        self._find_worker = find_worker
        self.max_tokens: int = tokenizer.max_tokens

    def start(
        self,
        query: str,
        document: str,
        on_scored: OnScored,
        *,
        truncate: bool = True,
        is_cancelled: Callable[[], bool] = lambda: False,
        tenant: str = "",
    ) -> None:
        """Tokenize a query and a document, here, and queue them.

        Raises PromptTooLong if they are too long together and not cut, and Unavailable; then nothing is told.
        """
        pair = self._tokenizer.encode_pair(query, document, truncate=truncate)

        def tell(result: Sequence[float] | BoughError) -> None:
            on_scored(result if isinstance(result, BoughError) else Scored(result[0], len(pair.ids)))

        self._find_worker().submit(EncoderJob(EncoderInput(pair.ids, pair.type_ids), tell, is_cancelled, tenant))
