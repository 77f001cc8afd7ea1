"""Embeddings of texts, and scores of documents for a query, by loaded models.

All texts to embed are tokenized before the first is computed, in the model's threads for prompts: one that is too long is
refused before any work is done. With a deadline (`request_timeout`) the whole request must end in time.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

from bough.config import Settings
from bough.errors import BoughError, EngineError, RequestCancelled, RequestError, TimedOut
from bough.runtime.embedding import Embedded, Embedder, check_dimensions, finish_vector
from bough.runtime.encoding import EncoderReranker, Ranked, Scored, rank
from bough.server.serving.ask import tenant_of
from bough.server.serving.embedding.text_run import TextRun
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.metrics import Metrics
from bough.server.serving.record import note_record


@dataclass(frozen=True)
class EmbedAsk:
    """Texts, or texts as token ids, to embed. `field` is what the API calls them, for errors."""

    model: str
    inputs: Sequence[str | Sequence[int]]
    truncates: bool = True  # cut texts that are too long, instead of refusing them
    dimensions: int | None = None
    normalizes: bool = True
    keep_alive_s: float | None = None
    salt: str = ""
    field: str = "input"


@dataclass(frozen=True)
class Vectors:
    """The vectors of all texts, in their order. Iterate for them: each is shortened and normalised when it is reached."""

    raw: Sequence[array[float]]  # as the model gives them, in 4 bytes a number
    dimensions: int | None
    normalizes: bool
    num_tokens: int
    load_s: float

    def __iter__(self) -> Iterator[list[float]]:
        for vector in self.raw:
            yield finish_vector(vector, dimensions=self.dimensions, normalize=self.normalizes)


@dataclass(frozen=True)
class RerankAsk:
    """A query, and documents to sort by how well they answer it. `top_n`: only so many of the best."""

    model: str
    query: str
    documents: Sequence[str]
    top_n: int | None = None
    truncates: bool = True
    salt: str = ""


@dataclass(frozen=True)
class Ranking:
    """The best documents, the best first; of equal ones, the first."""

    ranked: Sequence[Ranked]
    num_tokens: int


class EmbeddingService:
    """Embeds and scores texts with loaded models. Cancelling a call ends what it has begun."""

    def __init__(self, settings: Settings, models: LoadedModels, metrics: Metrics) -> None:
        self._settings = settings
        self._models = models
        self._metrics = metrics

    async def embed(self, ask: EmbedAsk) -> Vectors:
        """The vectors of all texts. Raises PromptTooLong, or RequestError for a model that makes no embeddings."""
        async with self._running(ask.model, ask.keep_alive_s) as run:
            embedder = run.loaded.embedder
            check_dimensions(ask.dimensions, embedder)
            texts = await run.loaded.threads.run(
                lambda is_cancelled: _tokenize(ask, embedder, is_cancelled), sum(map(len, ask.inputs))
            )
            tenant = self._tenant_of(ask.salt)
            raw = await run.run_all([partial(_embed, run, embedder, ids, ask.salt, tenant) for ids in texts])
            return Vectors(raw, ask.dimensions, ask.normalizes, run.num_tokens, run.load_s)

    async def rerank(self, ask: RerankAsk) -> Ranking:
        """The best documents. Raises PromptTooLong, or RequestError for a model that cannot rank."""
        async with self._running(ask.model) as run:
            reranker, tenant = run.loaded.reranker, self._tenant_of(ask.salt)
            numbers = range(len(ask.documents))
            scores = await run.run_all([partial(_score, run, reranker, ask, number, tenant) for number in numbers])
            return Ranking(rank(scores, ask.top_n), run.num_tokens)

    def _tenant_of(self, salt: str) -> str:
        return tenant_of(salt) if self._settings.keys_file else ""

    @asynccontextmanager
    async def _running(self, model: str, keep_alive_s: float | None = None) -> AsyncIterator[TextRun]:
        """A run of a request on its model, with the deadline of the settings; however it ends, it is recorded."""
        began_s, timeout_s = time.perf_counter(), self._settings.request_timeout
        async with self._models.using(model, keep_alive_s) as loaded:
            run, failure = TextRun(loaded, time.perf_counter() - began_s), None
            try:
                async with asyncio.timeout(timeout_s):
                    yield run
            except TimeoutError as error:
                failure = f"the request took longer than the {timeout_s:.0f} s it may"
                raise TimedOut(failure) from error
            except BoughError as error:
                failure = str(error)
                raise
            finally:
                record = run.record(failure)
                self._metrics.request_done(record)
                note_record(record)


def _tokenize(ask: EmbedAsk, embedder: Embedder, is_cancelled: Callable[[], bool]) -> list[list[int]]:
    """The ids of every text. An error says which text it is about."""
    found = []
    for number, given in enumerate(ask.inputs):
        if is_cancelled():
            raise RequestCancelled("the client disconnected")
        place = ask.field if len(ask.inputs) == 1 else f"{ask.field}[{number}]"
        read = embedder.tokenize if isinstance(given, str) else embedder.check_ids
        try:
            ids = read(given, truncate=ask.truncates)  # type: ignore[arg-type]
        except RequestError as error:
            raise _at(place, error) from None
        if not ids:
            raise RequestError(f"{place} has 0 tokens, and needs at least 1")
        found.append(ids)
    return found


def _at(place: str, error: RequestError) -> RequestError:
    """The same error with the place where it is in its text."""
    error.args = (f"{place}: {error}",)
    return error


async def _embed(run: TextRun, embedder: Embedder, ids: Sequence[int], salt: str, tenant: str) -> array[float]:
    """The vector of one text."""

    async def start(tell: Callable[[Embedded | BoughError], None], is_cancelled: Callable[[], bool]) -> None:
        embedder.start(ids, tell, is_cancelled=is_cancelled, salt=salt, tenant=tenant)

    embedded: Embedded = await run.run_one(start)
    if not all(map(math.isfinite, embedded.vector)):
        raise EngineError(f"the model {run.loaded.name} gave a vector with a number that is not finite")
    return embedded.vector


async def _score(run: TextRun, reranker: EncoderReranker, ask: RerankAsk, number: int, tenant: str) -> float:
    """The score of one document. It is tokenized together with the query, in a thread."""
    document = ask.documents[number]

    async def start(tell: Callable[[Scored | BoughError], None], is_cancelled: Callable[[], bool]) -> None:
        def begin(_: object) -> None:
            reranker.start(ask.query, document, tell, truncate=ask.truncates, is_cancelled=is_cancelled, tenant=tenant)

        await run.loaded.threads.run(begin, len(ask.query) + len(document))

    try:
        scored: Scored = await run.run_one(start)
    except RequestError as error:
        raise _at(f"documents[{number}]", error) from None
    if not math.isfinite(scored.score):
        raise EngineError(f"the model {run.loaded.name} gave a score that is not finite")
    return scored.score
