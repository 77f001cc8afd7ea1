"""Vectors for texts, and scores of documents for a query.

An encoder has its own pooling; of a language model the last hidden state is the vector. Texts are tokenized by the caller,
and computed on the engine's thread. A text for a language model is a request that generates nothing: it takes turns with
others on the lanes and reuses a known prefix, but nothing of it is kept, so that thousands of documents evict no chats.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bough.config import Settings
from bough.engines.contract import EncoderEngine, Engine
from bough.errors import BoughError, EngineError, PromptTooLong, RequestCancelled, RequestError
from bough.generate.request import Request
from bough.models.encoder import PromptLimit
from bough.models.encoders.files import ModelKind
from bough.models.encoders.tokenizer import EncoderTokenizer
from bough.models.files import ModelFiles
from bough.models.prompts import Prompts
from bough.runtime.engine_thread import EngineOwner
from bough.scheduling.encoder_scheduler import EncoderJob, EncoderScheduler
from bough.scheduling.job import Job, Listener, RequestNews
from bough.scheduling.worker import Limits, Worker
from bough.tokens import Tokens
from bough.types import Completion, EncoderInput, SamplingParams

WINDOW = 512  # the most texts of one caller that are queued at a time


@dataclass(frozen=True)
class ComputedText:
    """The numbers of one text or pair of texts, and how many tokens it had and reused.

    They are a vector, as an array because thousands of them wait, or for a pair its one score, as the model gives it.
    """

    numbers: array[float]
    num_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True)
class RankedDocument:
    """A document by its place in the list that was given, and how well it answers the query: higher is better."""

    index: int
    score: float


IsCancelled = Callable[[], bool]
OnComputed = Callable[[ComputedText | BoughError], None]
"""The engine's thread calls it once; it must not block or raise."""


class TextTokens(Protocol):
    """The texts that a model can turn into vectors, as token ids. Any thread may call it."""

    @property
    def dimensions(self) -> int: ...

    @property
    def max_tokens(self) -> int:
        """The most tokens of one text, special tokens included."""

    def tokenize(self, text: str, *, truncate: bool) -> list[int]:
        """The ids of a text with special tokens. A long text is cut if `truncate`, or else raises PromptTooLong."""

    def check_ids(self, ids: Sequence[int], *, truncate: bool) -> list[int]:
        """As `tokenize`, for a text that is given as token ids. Raises RequestError for ids outside the vocabulary."""


class Embedder(TextTokens, Protocol):
    """A model that turns texts into vectors. Any thread may call it."""

    def start(
        self, ids: Sequence[int], on_computed: OnComputed, *, is_cancelled: IsCancelled, salt: str = "", tenant: str = ""
    ) -> None:
        """Queue a text. Raises Unavailable (ShuttingDown, EngineStuck, QueueFull); then `on_computed` is not called."""


def finish_vector(vector: Sequence[float], *, dimensions: int | None, normalize: bool) -> list[float]:
    """The first `dimensions` numbers of a vector, scaled to length 1 if asked. A vector of zeros stays as it is."""
    kept = list(vector if dimensions is None else vector[:dimensions])
    if not normalize:
        return kept
    length = math.sqrt(math.fsum(number * number for number in kept))
    return [number / length for number in kept] if length > 0 else kept


def check_dimensions(dimensions: int | None, embedder: TextTokens) -> None:
    """Raise RequestError if a vector cannot be shortened to this length."""
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= embedder.dimensions):
        raise RequestError(f"dimensions is {dimensions!r}, and must be from 1 to {embedder.dimensions}")


def rank(scores: Iterable[float], top_n: int | None) -> list[RankedDocument]:
    """The documents by falling score, the first `top_n` of them; those of equal scores in the order of the list."""
    return sorted(map(RankedDocument, itertools.count(), scores), key=lambda each: -each.score)[:top_n]


class EncoderTexts:
    """The texts of an encoder on their way to the engine's thread: an Embedder, and of a reranker the pairs that it scores.

    Nothing of a text is kept, so a salt has no effect.
    """

    def __init__(self, engine: EncoderEngine, tokenizer: EncoderTokenizer, find_worker: Callable[[], Worker]) -> None:
        self._tokenizer = tokenizer
        self._find_worker = find_worker
        self.dimensions: int = engine.dimensions
        self.max_tokens: int = tokenizer.max_tokens
        self.tokenize = tokenizer.encode
        self.check_ids = tokenizer.check_ids

    def start(
        self, ids: Sequence[int], on_computed: OnComputed, *, is_cancelled: IsCancelled, salt: str = "", tenant: str = ""
    ) -> None:
        """Queue a text. Raises Unavailable."""
        self._submit(EncoderInput(ids, num_prompt=self._tokenizer.count_prompt(ids)), on_computed, is_cancelled, tenant)

    def start_pair(
        self,
        query: str,
        document: str,
        on_computed: OnComputed,
        *,
        truncate: bool = True,
        is_cancelled: IsCancelled = lambda: False,
        tenant: str = "",
    ) -> None:
        """Tokenize a pair on this thread, and queue it. Raises PromptTooLong or Unavailable, and then calls nothing."""
        pair = self._tokenizer.encode_pair(query, document, truncate=truncate)
        self._submit(pair, on_computed, is_cancelled, tenant)

    def _submit(self, text: EncoderInput, on_computed: OnComputed, is_cancelled: IsCancelled, tenant: str) -> None:
        def hear(result: Sequence[float] | BoughError) -> None:
            on_computed(result if isinstance(result, BoughError) else ComputedText(array("f", result), len(text.ids)))

        self._find_worker().submit(EncoderJob(text, hear, is_cancelled, tenant))


class TextTokenizer:
    """Turns texts to embed into ids, as a language model takes them. Any thread may call it."""

    def __init__(self, prompts: Prompts, max_tokens: int) -> None:
        self._prompts = prompts
        self.max_tokens = max_tokens

    def tokenize(self, text: str, *, truncate: bool) -> list[int]:
        """The ids of a text without a chat template, with the special tokens that the tokenizer adds."""
        encoder = self._prompts.tokenizer.encoder
        if truncate:
            return _require_some(encoder.encode_cut(text, self.max_tokens))
        return _require_some(encoder.encode_whole(text, PromptLimit(self.max_tokens)))

    def check_ids(self, ids: Sequence[int], *, truncate: bool) -> list[int]:
        """The ids as they are, checked. No special tokens are added."""
        checked = self._prompts.check_ids(ids)
        if len(checked) > self.max_tokens and not truncate:
            raise PromptTooLong(len(checked), self.max_tokens)
        return _require_some(checked[: self.max_tokens])


def _require_some(ids: list[int]) -> list[int]:
    if not ids:
        raise RequestError("the text has 0 tokens, and an embedding needs at least 1")
    return ids


class LaneEmbedder(TextTokenizer):
    """Implements `Embedder` over the lanes of a loaded language model."""

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        prepare: Callable[[Request, Listener, IsCancelled], Job],
        submit: Callable[[Job], None],
    ) -> None:
        super().__init__(prompts, engine.context_tokens)
        self._prepare = prepare
        self._submit = submit
        self.dimensions = engine.state_size

    def start(
        self, ids: Sequence[int], on_computed: OnComputed, *, is_cancelled: IsCancelled, salt: str = "", tenant: str = ""
    ) -> None:
        """Queue a text. Raises RequestError for ids that cannot be evaluated, and what `Worker.submit` raises."""
        params = SamplingParams(max_tokens=0)
        request = Request(Tokens.of(ids), params, salt=salt, tenant=tenant, keep_state=False, wants_state=True)

        def hear(news: RequestNews) -> None:
            if isinstance(news, Completion | BoughError):
                on_computed(_read_vector(news))

        self._submit(self._prepare(request, hear, is_cancelled))


def _read_vector(end: Completion | BoughError) -> ComputedText | BoughError:
    if isinstance(end, BoughError):
        return end
    if end.finish_reason == "cancelled":
        return RequestCancelled("the request was cancelled before its embedding was computed")
    usage = end.usage
    if not all(map(math.isfinite, end.embedding)):
        return EngineError(f"the embedding of {usage.prompt_tokens} tokens has numbers that are not finite")
    return ComputedText(array("f", end.embedding), usage.prompt_tokens, usage.cached_tokens)


class EncoderRuntime(EngineOwner):
    """A loaded encoder, which makes embeddings or scores pairs of texts. It has no tree."""

    def __init__(
        self,
        kind: ModelKind,
        engine: EncoderEngine,
        tokenizer: EncoderTokenizer,
        settings: Settings,
        files: ModelFiles,
        limits: Limits | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        self.engine = engine
        self.settings = settings
        self.files = files
        self.name = files.name
        limits = limits or Limits()  # of requests, of which each has up to `WINDOW` texts in the queue
        self.limits = replace(limits, queue=limits.queue * WINDOW)
        self._texts = EncoderTexts(engine, tokenizer, lambda: self.worker)

    @property
    def embedder(self) -> EncoderTexts:
        """Raises RequestError if the model makes no embeddings."""
        return self._require_kind(ModelKind.EMBEDDER)

    @property
    def reranker(self) -> EncoderTexts:
        """Raises RequestError if the model does not score documents by a query."""
        return self._require_kind(ModelKind.RERANKER)

    def _require_kind(self, wanted: ModelKind) -> EncoderTexts:
        if self.kind is not wanted:
            raise RequestError(f"the model {self.name} {self.kind.value}: this needs one that {wanted.value}")
        return self._texts

    def _make_worker(self) -> Worker:
        scheduler = EncoderScheduler(self.engine)
        return Worker(
            scheduler,
            self.limits,
            take_stats=lambda: {"batches": scheduler.num_turns, "texts": scheduler.num_encoded},
            on_idle=lambda: False,
            on_close=self._release,
        )

    def _release(self) -> None:
        self.engine.close()
