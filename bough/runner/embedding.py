"""Texts as vectors: what a user may say, how each text is queued, and what becomes of its vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bough.errors import RequestError
from bough.runner.options import EmbedOptions, check_options
from bough.runner.texts import Start, Tell
from bough.runtime.embedding import Embedded, Embedder, check_dimensions, finish_vector

Vector = list[float]


def start_texts(embedder: Embedder, inputs: str | Sequence[str], options: Mapping[str, Any]) -> list[Start[Embedded]]:
    """What queues each text. Raises RequestError if texts or options are wrong."""
    check_options(options, EmbedOptions.__annotations__)
    check_dimensions(options.get("dimensions"), embedder)
    return [partial(_start, embedder, text, options) for text in _listed(inputs)]


def _start(
    embedder: Embedder,
    text: str,
    options: Mapping[str, Any],
    tell: Tell[Embedded],
    is_cancelled: Callable[[], bool],
) -> None:
    ids = embedder.tokenize(text, truncate=options.get("truncate", True))
    embedder.start(ids, tell, is_cancelled=is_cancelled, salt=options.get("salt", ""))


def _listed(inputs: str | Sequence[str]) -> list[str]:
    """One or several texts as a list. Raises RequestError for anything else."""
    if isinstance(inputs, str):
        return [inputs]
    if not isinstance(inputs, Sequence):
        raise RequestError(f"the input is a {type(inputs).__name__}, and must be a text or a list of texts")
    wrong = next((number for number, text in enumerate(inputs) if not isinstance(text, str)), None)
    if wrong is not None:
        raise RequestError(f"input {wrong} is a {type(inputs[wrong]).__name__}, and must be a text")
    return list(inputs)


def finish(found: Sequence[Embedded], options: Mapping[str, Any]) -> list[Vector]:
    """The vectors as they were asked for."""
    dimensions, normalize = options.get("dimensions"), options.get("normalize", True)
    return [finish_vector(each.vector, dimensions=dimensions, normalize=normalize) for each in found]
