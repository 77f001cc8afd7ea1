"""An answer's text as its tokens come: whole characters, nothing that may still become a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bough.generate.detokenizer import Detokenizer, TokenBytes
from bough.generate.stop import StopFinder
from bough.types import Sampled, TokenLogprob


class Vocabulary(TokenBytes, Protocol):
    """What generation needs to know of a tokenizer."""

    @property
    def eos_ids(self) -> frozenset[int]: ...


class AnswerText:
    """Detokenizer and stop strings in a row. `all` is what was emitted so far."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str], *, strip_leading_space: bool = False) -> None:
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary, strip_leading_space=strip_leading_space)
        self._stops = StopFinder(stops)
        self._pieces: list[str] = []

    @property
    def all(self) -> str:
        return "".join(self._pieces)

    @property
    def stop(self) -> str | None:
        """The stop string that was found, if one was."""
        return self._stops.found

    def add(self, token_id: int) -> str:
        """The text that is safe to emit now."""
        return self._emit(self._stops.add(self._detokenizer.add(token_id)))

    def flush(self) -> str:
        """What was held back, when no more tokens come."""
        return self._emit(self._stops.add(self._detokenizer.flush()) + self._stops.flush())

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def logprob(self, sampled: Sampled) -> TokenLogprob:
        assert sampled.logprob is not None
        text = self._vocabulary.token_bytes(sampled.token_id).decode("utf-8", "replace")
        return TokenLogprob(sampled.token_id, text, sampled.logprob, sampled.top)
