"""Texts to embed and documents to score, for a thread or a task: some are queued, and the next when one is done.

However a call ends, the texts that it has queued are cancelled if they are not done.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from bough.errors import BoughError, RequestError, ShuttingDown
from bough.runner.delivery import Cancellation, noting_number
from bough.runner.options import EmbedOptions, check_options
from bough.runtime.embedding import (
    WINDOW,
    ComputedText,
    Embedder,
    EncoderTexts,
    OnComputed,
    check_dimensions,
    finish_vector,
)
from bough.system.inbox import Inbox, Mailbox
from bough.system.tasks import Start

Result = TypeVar("Result")
Vector = list[float]
_Numbered = tuple[int, Result | BoughError]


def embed_texts(embedder: Embedder, inputs: str | Sequence[str], options: Mapping[str, Any]) -> list[Start[ComputedText]]:
    """A function for each text that queues it. Raises RequestError if texts or options are wrong."""
    check_options(options, EmbedOptions.__annotations__)
    check_dimensions(options.get("dimensions"), embedder)
    if not isinstance(inputs, str | Sequence):
        raise RequestError(f"the input is a {type(inputs).__name__}, and must be a text or a list of texts")
    texts = [inputs] if isinstance(inputs, str) else list(inputs)
    wrong = next((number for number, text in enumerate(texts) if not isinstance(text, str)), None)
    if wrong is not None:
        raise RequestError(f"input {wrong} is a {type(texts[wrong]).__name__}, and must be a text")

    def start(text: str, hear: OnComputed, is_cancelled: Callable[[], bool]) -> None:
        ids = embedder.tokenize(text, truncate=options.get("truncate", True))
        embedder.start(ids, hear, is_cancelled=is_cancelled, salt=options.get("salt", ""))

    return [partial(start, text) for text in texts]


def finish_vectors(found: Sequence[ComputedText], options: Mapping[str, Any]) -> list[Vector]:
    dimensions, normalize = options.get("dimensions"), options.get("normalize", True)
    return [finish_vector(each.numbers, dimensions=dimensions, normalize=normalize) for each in found]


def score_documents(
    reranker: EncoderTexts, query: str, documents: Sequence[str], *, truncate: bool
) -> list[Start[ComputedText]]:
    """A function for each document that queues it. Raises RequestError if these are not a query and a list of documents."""
    if not isinstance(query, str):
        raise RequestError(f"query is {type(query).__name__}, and must be a text")
    if isinstance(documents, str):
        raise RequestError("documents is one text, and must be a list of texts")
    wrong = next((number for number, each in enumerate(documents) if not isinstance(each, str)), None)
    if wrong is not None:
        raise RequestError(f"documents[{wrong}] is {type(documents[wrong]).__name__}, and must be a text")

    def start(document: str, hear: OnComputed, is_cancelled: Callable[[], bool]) -> None:
        reranker.start_pair(query, document, hear, truncate=truncate, is_cancelled=is_cancelled)

    return [partial(start, each) for each in documents]


def run_texts(starts: Sequence[Start[Result]]) -> list[Result]:
    """The results of all texts, in their order. If one fails, the others are cancelled, and its error is raised."""
    arrived: queue.SimpleQueue[_Numbered[Result]] = queue.SimpleQueue()
    texts = _Texts(starts, arrived.put)
    try:
        texts.advance([])
        while not texts.are_done:
            texts.advance([arrived.get()])
        return texts.results()
    finally:
        texts.cancellation.request()


async def run_texts_async(starts: Sequence[Start[Result]]) -> list[Result]:
    """As `run_texts`, for a task. Texts are tokenized in a thread, so that the event loop goes on meanwhile."""
    inbox: Inbox[_Numbered[Result]] = Inbox(asyncio.get_running_loop())
    mailbox: Mailbox[_Numbered[Result]] = Mailbox()

    def put(numbered: _Numbered[Result]) -> None:
        if not inbox.put(mailbox, numbered):  # the event loop has ended
            texts.cancellation.request()

    texts = _Texts(starts, put)
    try:
        await asyncio.to_thread(texts.advance, [])
        while not texts.are_done:
            await asyncio.to_thread(texts.advance, await mailbox.take())
        return texts.results()
    finally:
        texts.cancellation.request()


class _Texts(Generic[Result]):
    """The texts of one call: which are next, which run, and the results of the others."""

    def __init__(self, starts: Sequence[Start[Result]], put: Callable[[_Numbered[Result]], None]) -> None:
        """The engine's thread calls `put` with each result."""
        self.cancellation = Cancellation()
        self._starts = starts
        self._put = put
        self._num_started = 0
        self._results: dict[int, Result] = {}

    @property
    def are_done(self) -> bool:
        return len(self._results) == len(self._starts)

    def results(self) -> list[Result]:
        return [self._results[number] for number in range(len(self._starts))]

    def advance(self, arrived: Iterable[_Numbered[Result]]) -> None:
        """Add results, and queue as many texts as then may be queued. Raises the error of a text, or of a result."""
        try:
            for number, result in arrived:
                if isinstance(result, BoughError):
                    with noting_number(number, len(self._starts)):
                        raise result
                self._results[number] = result
            until = min(len(self._starts), len(self._results) + WINDOW)
            while self._num_started < until and not self.cancellation.is_requested:
                self._start(self._num_started)
                self._num_started += 1
        except ShuttingDown as error:
            raise RequestError("the runner is closed") from error

    def _start(self, number: int) -> None:
        with noting_number(number, len(self._starts)):
            self._starts[number](lambda result: self._put((number, result)), self.cancellation.check)
