"""Grammars for structured output: which tokens may come next so that the answer is JSON of the wanted form.

llguidance keeps the grammar; this module translates its errors and its masks, and loads it with the first constraint.
Always true: an end-of-sequence token is allowed exactly where the answer so far is complete. Between two JSON tokens there
is at most one line break with its indent, or two blanks, because a weak model under a grammar that lets it would write
blanks until its budget ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bough.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
# `oneOf` whose options overlap is read as `anyOf`. A bounded pattern is kept to by llguidance 1.8 and later.
_OPTIONS: Any = {"whitespace_pattern": r"(\r?\n[ \t]{0,20}| {1,2})", "coerce_one_of": True}


class Constraint:
    """The grammar of one answer and how far the answer has come in it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._mask_bytes = (vocab_size + 7) // 8

    @property
    def is_done(self) -> bool:
        """Whether the answer is complete and nothing but an end-of-sequence token may follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> bytes:
        """The tokens that may come next, as a bit mask over the model's vocabulary (bit i of byte i // 8)."""
        mask = self._matcher.compute_bitmask()
        _raise_if_failed(self._matcher)
        return mask[: self._mask_bytes]

    def accept(self, token_id: int) -> None:
        """Move on by a token that was allowed. Raises RequestError if the grammar cannot follow, now and ever after."""
        self._matcher.consume_token(token_id)
        _raise_if_failed(self._matcher)


class ConstraintFactory:
    """Makes constraints for one model: a fast tokenizer of transformers and the width of the model's logits.

    The first constraint takes the longest, because llguidance then reads the whole vocabulary.
    """

    def __init__(self, hf_tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._hf_tokenizer = hf_tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)

    def make(self, format: str | dict[str, Any] | None) -> Constraint | None:
        """A constraint for "json" (any JSON object) or for a JSON schema; None for None.

        Raises RequestError, with the reason, for another word and for a schema that is wrong, cannot be satisfied or uses
        what llguidance does not know.
        """
        if format is None:
            return None
        if isinstance(format, str) and format != "json":
            raise RequestError(f'format is {format!r}, and must be "json" or a JSON schema')
        schema = _ANY_OBJECT if isinstance(format, str) else format
        return Constraint(_compile(schema, self._tokenizer), self._vocab_size)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer  # imports all of transformers

        # A model may have more logits than its tokenizer has tokens, or, rarely, fewer.
        num_tokens = max(self._vocab_size, len(self._hf_tokenizer))
        return from_tokenizer(self._hf_tokenizer, n_vocab=num_tokens, eos_token=self._eos_ids or None)


def _compile(schema: dict[str, Any], tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the output format is not a JSON schema: {error}") from error
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    _raise_if_failed(matcher)
    return matcher


def _raise_if_failed(matcher: LLMatcher) -> None:
    """Raise what llguidance only notes: a matcher that failed goes on answering that the end has come."""
    if matcher.is_error():
        reason = matcher.get_error().partition("<state>")[0].strip()
        raise RequestError(f"the output format cannot be followed: {reason}")
