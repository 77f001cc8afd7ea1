"""Grammars for structured output: the tokens that may come next in JSON that fits a schema.

llguidance does the work; this module translates its errors and masks. Always true: an end-of-sequence token is allowed
exactly where the answer so far is complete; no key is written twice in one object, unless at that place the grammar allows
nothing else. Between two JSON tokens there is at most one line break with its indent (16 blanks or 4 tabs), or one blank:
without this limit, weak models write blanks until they reach their token limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bough.errors import RequestError
from bough.generate.keys import QuoteTokens, WrittenKeys, forbid
from bough.generate.schemas import close_objects

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
# `oneOf` with overlapping options is read as `anyOf`. llguidance honours a bounded pattern since 1.8.
_OPTIONS: Any = {"whitespace_pattern": r"(\r?\n( {0,16}|\t{1,4})| )", "coerce_one_of": True}


class Constraint:
    """The grammar of one answer, and the position of the answer in it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, vocabulary: TokenTexts) -> None:
        self._matcher = matcher
        self._mask_bytes = (vocab_size + 7) // 8
        self._vocabulary = vocabulary
        self._keys = WrittenKeys()

    @property
    def is_done(self) -> bool:
        """Whether the answer is complete, and only an end-of-sequence token may follow."""
        return self._matcher.is_stopped()

    def allowed(self) -> bytes:
        """The tokens that may come next, as a bit mask over the model's vocabulary (bit i of byte i // 8)."""
        mask = self._matcher.compute_bitmask()
        _raise_if_failed(self._matcher)
        return forbid(mask[: self._mask_bytes], self._vocabulary.with_quote, self._keys)

    def accept(self, token_id: int) -> None:
        """Advance by a token that was allowed. Raises RequestError, now and on every later call, if it does not fit."""
        self._matcher.consume_token(token_id)
        _raise_if_failed(self._matcher)
        self._keys.add(self._vocabulary.texts[token_id])


@dataclass(frozen=True)
class TokenTexts:
    """The tokens of a model as bytes, by their ids; special tokens are empty."""

    texts: Sequence[bytes]
    with_quote: QuoteTokens


class ConstraintFactory:
    """Makes constraints for one model. The first takes longest, because llguidance then reads the whole vocabulary."""

    def __init__(self, hf_tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._hf_tokenizer = hf_tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)

    def make(self, format: str | dict[str, Any]) -> Constraint:
        """A constraint for "json" (any JSON object) or for a JSON schema.

        Raises RequestError, with the reason, for any other word, and for a schema that is wrong, cannot be satisfied or
        uses a keyword that llguidance does not support.
        """
        if isinstance(format, str) and format != "json":
            raise RequestError(f'format is {format!r}, and must be "json" or a JSON schema')
        schema = _ANY_OBJECT if isinstance(format, str) else format
        return Constraint(_compile(schema, self._tokenizer), self._vocab_size, self._vocabulary)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer  # imports all of transformers

        # A model may have more logits than its tokenizer has tokens, or, rarely, fewer.
        num_tokens = max(self._vocab_size, len(self._hf_tokenizer))
        return from_tokenizer(self._hf_tokenizer, n_vocab=num_tokens, eos_token=self._eos_ids or None)

    @cached_property
    def _vocabulary(self) -> TokenTexts:
        tokenizer = self._tokenizer
        special = tokenizer.is_special_token
        texts = [b"" if special(each) else tokenizer.decode_bytes([each]) for each in range(tokenizer.vocab_size)]
        return TokenTexts(texts, QuoteTokens(texts))


def _compile(schema: dict[str, Any], tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher

    try:
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(close_objects(schema)), overrides=_OPTIONS)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the output format is not a JSON schema: {error}") from error
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    _raise_if_failed(matcher)
    return matcher


def _raise_if_failed(matcher: LLMatcher) -> None:
    """Raise the error of a matcher. llguidance itself only records it, and then reports that the answer is complete."""
    if matcher.is_error():
        reason = matcher.get_error().partition("<state>")[0].strip()
        raise RequestError(f"the output format cannot be followed: {reason}")
