"""Documents for a query: what a user may say of them, and how each is queued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bough.errors import RequestError
from bough.runner.options import check_count
from bough.runner.texts import Start, Tell
from bough.runtime.encoding import EncoderReranker, Scored


def start_documents(
    reranker: EncoderReranker, query: str, documents: Sequence[str], *, truncate: bool
) -> list[Start[Scored]]:
    """What queues each document. Raises RequestError if these cannot be a query and a list of documents."""
    if not isinstance(query, str):
        raise RequestError(f"query is {type(query).__name__}, and must be a text")
    if isinstance(documents, str):
        raise RequestError("documents is one text, and must be a list of texts")
    wrong = next((number for number, each in enumerate(documents) if not isinstance(each, str)), None)
    if wrong is not None:
        raise RequestError(f"documents[{wrong}] is {type(documents[wrong]).__name__}, and must be a text")
    return [partial(_start, reranker, query, each, truncate) for each in documents]


def _start(
    reranker: EncoderReranker,
    query: str,
    document: str,
    truncate: bool,
    tell: Tell[Scored],
    is_cancelled: Callable[[], bool],
) -> None:
    reranker.start(query, document, tell, truncate=truncate, is_cancelled=is_cancelled)


def check_top_n(top_n: int | None) -> None:
    """Raise RequestError if there cannot be so many best documents."""
    if top_n is not None:
        check_count("top_n", top_n)
