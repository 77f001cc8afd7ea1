"""Embeddings of texts, and scores of documents for a query, by loaded models.

All texts to embed are tokenized before the first is computed, in the model's threads for prompts: one that is too long is
refused before any work is done. With a deadline (`request_timeout`) the whole request must end in time.

Of one request at most `WINDOW` texts run at a time, and those of all requests for a model share its places
(`LoadedModel.text_places`): the others wait here, not in the queue of the engine's thread, so that they leave room there
for chats. A request is refused for a full queue only while none of its texts is done; later its other texts wait instead.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from bough.config import Settings
from bough.errors import BoughError, QueueFull, RequestCancelled, RequestError, TimedOut
from bough.prompting.ask import tenant_of
from bough.runtime.embedding import (
    WINDOW,
    ComputedText,
    EncoderTexts,
    OnComputed,
    RankedDocument,
    TextTokens,
    check_dimensions,
    finish_vector,
    rank,
)
from bough.server.serving.loaded import LoadedModel, LoadedModels
from bough.server.serving.loaded.progress import RequestRecord, note_record
from bough.server.serving.metrics import Metrics
from bough.system.tasks import gather, wait_for
from bough.types import Usage

RETRY_S = 0.05  # how long a text waits after a full queue


class TextRun:
    """One request. `load_s` is how long it waited for its model."""

    def __init__(self, loaded: LoadedModel, load_s: float) -> None:
        self.loaded = loaded
        self.load_s = load_s
        self._done: list[ComputedText] = []
        self._began_s = time.perf_counter()

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self._done)

    async def compute(self, texts: Sequence[Callable[[], Awaitable[ComputedText]]]) -> list[ComputedText]:
        """The results of all texts, in their order, `WINDOW` at a time. If one fails, or the caller ends, all end."""
        return await gather([partial(self._compute_one, text) for text in texts], WINDOW)

    async def _compute_one(self, text: Callable[[], Awaitable[ComputedText]]) -> ComputedText:
        """Wait for a place, and for the result of one text. Raises its error."""
        while True:
            try:
                async with self.loaded.text_places:
                    computed = await text()
            except QueueFull:
                if not self._done:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                self._done.append(computed)
                return computed

    def record(self, error: str | None = None) -> RequestRecord:
        cached_tokens = sum(each.cached_tokens for each in self._done)
        usage = Usage(self.num_tokens, cached_tokens, cached_tokens, self.num_tokens - cached_tokens)
        return RequestRecord(
            model=self.loaded.name,
            usage=usage if self._done else None,
            total_s=time.perf_counter() - self._began_s,
            num_texts=len(self._done),
            error=error,
        )


@dataclass(frozen=True)
class EmbedAsk:
    """Texts, or texts as token ids, to embed. `field` is their name in the API, for errors."""

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
    """The vectors of all texts, in their order. Iterating shortens and normalises each when it is reached."""

    raw: Sequence[array[float]]
    dimensions: int | None
    normalizes: bool
    num_tokens: int
    load_s: float

    def __iter__(self) -> Iterator[list[float]]:
        for vector in self.raw:
            yield finish_vector(vector, dimensions=self.dimensions, normalize=self.normalizes)


@dataclass(frozen=True)
class RerankAsk:
    """A query, and documents to sort by how well they answer it. `top_n`: the number of the best, all by default."""

    model: str
    query: str
    documents: Sequence[str]
    top_n: int | None = None
    truncates: bool = True
    salt: str = ""


@dataclass(frozen=True)
class Ranking:
    """The best documents, the best first; of equal ones, the first."""

    ranked: Sequence[RankedDocument]
    num_tokens: int


class EmbeddingService:
    """Embeds and scores texts with loaded models. Cancelling a call cancels its texts."""

    def __init__(self, settings: Settings, models: LoadedModels, metrics: Metrics) -> None:
        self._settings = settings
        self._models = models
        self._metrics = metrics

    async def embed(self, ask: EmbedAsk) -> Vectors:
        """The vectors of all texts. Raises PromptTooLong, or RequestError for a model that makes no embeddings."""
        async with self._running(ask.model, ask.keep_alive_s) as run:
            embedder, num_chars = run.loaded.embedder, sum(map(len, ask.inputs))
            check_dimensions(ask.dimensions, embedder)
            texts = await run.loaded.threads.run(partial(_tokenize, ask, embedder), num_chars)
            tenant = self._tenant_of(ask.salt)
            computed = await run.compute([partial(embedder.compute, ids, ask.salt, tenant) for ids in texts])
            raw = [each.numbers for each in computed]
            return Vectors(raw, ask.dimensions, ask.normalizes, run.num_tokens, run.load_s)

    async def rerank(self, ask: RerankAsk) -> Ranking:
        """The best documents. Raises PromptTooLong, or RequestError for a model that cannot rank."""
        async with self._running(ask.model) as run:
            reranker, tenant = run.loaded.reranker, self._tenant_of(ask.salt)
            numbers = range(len(ask.documents))
            computed = await run.compute([partial(_score, run.loaded, reranker, ask, number, tenant) for number in numbers])
            return Ranking(rank((each.numbers[0] for each in computed), ask.top_n), run.num_tokens)

    def _tenant_of(self, salt: str) -> str:
        return tenant_of(salt) if self._settings.keys_file else ""

    @asynccontextmanager
    async def _running(self, model: str, keep_alive_s: float | None = None) -> AsyncIterator[TextRun]:
        """Run a request on its model, with the deadline of the settings, and record it however it ends."""
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


def _tokenize(ask: EmbedAsk, embedder: TextTokens, is_cancelled: Callable[[], bool]) -> list[list[int]]:
    found = []
    for number, given in enumerate(ask.inputs):
        if is_cancelled():
            raise RequestCancelled("the client disconnected")
        place = ask.field if len(ask.inputs) == 1 else f"{ask.field}[{number}]"
        read = embedder.tokenize if isinstance(given, str) else embedder.check_ids
        try:
            found.append(read(given, truncate=ask.truncates))  # type: ignore[arg-type]
        except RequestError as error:
            raise _at(place, error) from None
    return found


def _at(place: str, error: RequestError) -> RequestError:
    error.args = (f"{place}: {error}",)
    return error


async def _score(loaded: LoadedModel, reranker: EncoderTexts, ask: RerankAsk, number: int, tenant: str) -> ComputedText:
    document = ask.documents[number]

    def start(hear: OnComputed, is_cancelled: Callable[[], bool]) -> None:
        reranker.start_pair(ask.query, document, hear, truncate=ask.truncates, is_cancelled=is_cancelled, tenant=tenant)

    async def call(start: Callable[..., None], *given: Callable[..., Any]) -> None:
        await loaded.threads.run(lambda _: start(*given), len(ask.query) + len(document))

    try:
        return await wait_for(start, call)
    except RequestError as error:
        raise _at(f"documents[{number}]", error) from None
