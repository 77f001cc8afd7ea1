"""Models that embed and rank without weights: a byte is a token, and what comes out can be computed by hand."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from types import SimpleNamespace
from typing import Any

from bough.engines.contract import EngineInfo
from bough.errors import BoughError, PromptTooLong, RequestError
from bough.runtime.embedding import ComputedText, OnComputed
from tests.gates import Notes
from tests.waiting import BOUND_S

DIMENSIONS = 8
MAX_TOKENS = 64
VOCAB_SIZE = 256
NOTHING: Any = lambda: False  # noqa: E731


def vector_of(ids: Sequence[int]) -> list[float]:
    """Numbers that depend on every id and its place, and are not of length 1."""
    return [
        sum(math.sin((number + 1) * (token_id + 1) + place) for place, token_id in enumerate(ids))
        for number in range(DIMENSIONS)
    ]


def score_of(query: str, document: str) -> float:
    """The share of the query's words that the document has."""
    words = query.split()
    return sum(word in document for word in words) / max(1, len(words))


@dataclass(frozen=True)
class Started:
    """A text that was queued."""

    ids: Sequence[int]
    is_cancelled: Callable[[], bool]
    salt: str
    tenant: str


@dataclass
class FakeEmbedder:
    """Embeds on a thread of its own, one text after the other, once `may_run` is set."""

    may_run: Event = field(default_factory=Event)  # which tests clear and set
    started: Notes[Started] = field(default_factory=Notes)
    errors: dict[int, BoughError] = field(default_factory=dict)  # that `start` raises, by the number of the call
    outcomes: dict[int, ComputedText | BoughError] = field(default_factory=dict)  # by the first id of a text
    dimensions: int = DIMENSIONS
    max_tokens: int = MAX_TOKENS
    num_calls: int = 0
    num_running: int = 0
    most_running: int = 0

    def __post_init__(self) -> None:
        self.may_run.set()
        self._thread = ThreadPoolExecutor(1, "fake-embedder")

    def tokenize(self, text: str, *, truncate: bool) -> list[int]:
        return self._bound(list(text.encode()), truncate)

    def check_ids(self, ids: Sequence[int], *, truncate: bool) -> list[int]:
        wrong = next((each for each in ids if not 0 <= each < VOCAB_SIZE), None)
        if wrong is not None:
            raise RequestError(f"the token id {wrong} is outside the vocabulary of {VOCAB_SIZE}")
        return self._bound(list(ids), truncate)

    def _bound(self, ids: list[int], truncate: bool) -> list[int]:
        if not ids:
            raise RequestError("the text has 0 tokens, and needs at least 1")
        if len(ids) > self.max_tokens and not truncate:
            raise PromptTooLong(len(ids), self.max_tokens)
        return ids[: self.max_tokens]

    def start(
        self,
        ids: Sequence[int],
        on_computed: OnComputed,
        *,
        is_cancelled: Callable[[], bool],
        salt: str = "",
        tenant: str = "",
    ) -> None:
        self.num_calls += 1
        if error := self.errors.get(self.num_calls):
            raise error
        self.started.append(Started(ids, is_cancelled, salt, tenant))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self._thread.submit(self._run, ids, on_computed)

    def _run(self, ids: Sequence[int], on_computed: OnComputed) -> None:
        assert self.may_run.wait(BOUND_S)
        self.num_running -= 1
        outcome = self.outcomes.pop(ids[0], None) or ComputedText(array("f", vector_of(ids)), len(ids), cached_tokens=1)
        on_computed(outcome)


class FakeReranker:
    """Scores at once, on the calling thread."""

    def start_pair(
        self,
        query: str,
        document: str,
        on_computed: OnComputed,
        *,
        truncate: bool = True,
        is_cancelled: Callable[[], bool] = NOTHING,
        tenant: str = "",
    ) -> None:
        num_tokens = len(query) + len(document)
        if num_tokens > MAX_TOKENS and not truncate:
            raise PromptTooLong(num_tokens, MAX_TOKENS)
        on_computed(ComputedText(array("f", [score_of(query, document)]), min(num_tokens, MAX_TOKENS)))


class FakeEncoderRuntime:
    """A loaded encoder. It has no tree, and generates nothing."""

    def __init__(self, name: str, embedder: FakeEmbedder | None = None, reranker: FakeReranker | None = None) -> None:
        self.name = name
        self._embedder = embedder
        self._reranker = reranker
        info = EngineInfo("fake", "encoder", "cpu", "float32")
        self.engine: Any = SimpleNamespace(info=info, has_host=False, context_tokens=MAX_TOKENS, describe=dict)
        self.worker: Any = SimpleNamespace(is_stuck=False, snapshot=lambda: {"queue": 0, "running": 0})

    @property
    def embedder(self) -> FakeEmbedder:
        if self._embedder is None:
            raise RequestError(f"the model {self.name} makes no embeddings")
        return self._embedder

    @property
    def reranker(self) -> FakeReranker:
        if self._reranker is None:
            raise RequestError(f"the model {self.name} ranks no documents")
        return self._reranker

    def close(self) -> None:
        pass
