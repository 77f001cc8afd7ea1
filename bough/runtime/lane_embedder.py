"""Embeddings by a language model: the last hidden state after a text, computed like any prompt.

A text is a request that generates nothing. So it takes turns with other requests on the lanes, reuses a prefix that the
tree knows, and is evaluated in chunks if it is long. Nothing of it is kept: thousands of documents do not evict the chats.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from bough.engines.contract import Engine
from bough.errors import BoughError, EngineError, PromptTooLong, RequestCancelled, RequestError
from bough.generate.generation import Generation
from bough.models.encoder import PromptLimit
from bough.models.prompts import Encoded, Prompts
from bough.runtime.embedding import Embedded, OnEmbedded
from bough.scheduling.job import Job
from bough.types import Chunk, Completion, SamplingParams, Usage

_NOTHING = SamplingParams(max_tokens=0)


class Prepare(Protocol):
    """Makes the generation of a request, as `Runtime.prepare` does."""

    def __call__(
        self,
        encoded: Encoded,
        params: SamplingParams,
        *,
        salt: str,
        store: bool,
        wants_state: bool,
        is_cancelled: Callable[[], bool],
    ) -> Generation: ...


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


class LaneEmbedder(TextTokenizer):
    """Implements `bough.runtime.embedding.Embedder` over the lanes of a loaded model."""

    def __init__(self, engine: Engine, prompts: Prompts, prepare: Prepare, submit: Callable[[Job], None]) -> None:
        super().__init__(prompts, engine.context_tokens)
        self._prepare = prepare
        self._submit = submit
        self.dimensions = engine.state_size

    def start(
        self,
        ids: Sequence[int],
        on_embedded: OnEmbedded,
        *,
        is_cancelled: Callable[[], bool],
        salt: str = "",
        tenant: str = "",
    ) -> None:
        """Queue a text. Raises RequestError for ids that cannot be evaluated, and what `Worker.submit` raises."""
        generation = self._prepare(
            Encoded(ids), _NOTHING, salt=salt, store=False, wants_state=True, is_cancelled=is_cancelled
        )
        self._submit(Job(generation, _Listener(on_embedded), tenant=tenant))


def _require_some(ids: list[int]) -> list[int]:
    if not ids:
        raise RequestError("the text has 0 tokens, and an embedding needs at least 1")
    return ids


class _Listener:
    """Passes on the vector of one text, or its error."""

    def __init__(self, on_embedded: OnEmbedded) -> None:
        self._on_embedded = on_embedded

    def on_start(self, usage: Usage, waited_s: float) -> None:
        pass

    def on_loaded(self, usage: Usage) -> None:
        pass

    def on_chunk(self, chunk: Chunk) -> None:
        raise AssertionError("an embedding generates nothing")

    def on_end(self, completion: Completion) -> None:
        self._on_embedded(_read(completion))

    def on_error(self, error: BoughError) -> None:
        self._on_embedded(error)


def _read(completion: Completion) -> Embedded | BoughError:
    if completion.finish_reason == "cancelled":
        return RequestCancelled("the request was cancelled before its embedding was computed")
    if not all(map(math.isfinite, completion.embedding)):
        return EngineError(f"the embedding of {completion.usage.prompt_tokens} tokens has numbers that are not finite")
    usage = completion.usage
    return Embedded(array("f", completion.embedding), usage.prompt_tokens, usage.cached_tokens)
