"""Turns texts and pairs of texts into an encoder's token ids: with its special tokens, and cut to its length.

A text that is too long loses tokens at its end (or at its beginning, if the tokenizer says so); special tokens stay. Of a
pair, the longer text is cut first. Any thread may call it: nothing changes after loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import normalizers

from bough.errors import PromptTooLong, RequestError, UnsupportedModel
from bough.models.encoders.files import TokenizerOptions
from bough.models.files import ModelFiles
from bough.models.tokenizer import Tokenizer, load_tokenizer
from bough.types import EncoderInput

_NO_LIMIT = 10**9  # transformers writes a much larger number where there is none


class EncoderTokenizer:
    """The tokenizer of an encoder of `context_tokens` at most, with the options of its files."""

    def __init__(self, tokenizer: Tokenizer, options: TokenizerOptions, context_tokens: int, vocab_size: int) -> None:
        hf = tokenizer.hf
        self._backend: Any = hf.backend_tokenizer
        self._side = str(hf.truncation_side)
        self._has_types = "token_type_ids" in hf.model_input_names
        self._special_ids = tokenizer.special_ids
        self._vocab_size = vocab_size
        self._prompt = options.prompt
        if options.lowercases:  # before everything else; special tokens in the text stay as they are
            own = [] if self._backend.normalizer is None else [self._backend.normalizer]
            self._backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
        limit = options.max_tokens or hf.model_max_length
        self.max_tokens: int = min(context_tokens, limit if limit < _NO_LIMIT else context_tokens)
        self._prompt_ids = self._find_prompt_ids()

    def _find_prompt_ids(self) -> list[int]:
        """The ids of the model's own prompt, with the special tokens before it."""
        if not self._prompt:
            return []
        ids = list(self._backend.post_process(self._encode(self._prompt)).ids)
        return ids[:-1] if ids and ids[-1] in self._special_ids else ids

    def encode(self, text: str, *, truncate: bool) -> list[int]:
        """The ids of a text behind the model's own prompt. Raises PromptTooLong unless it fits or `truncate` is set."""
        encoding = self._encode(self._prompt + text)
        num_special = self._backend.num_special_tokens_to_add(False)
        self._check_length(len(encoding.ids) + num_special, truncate)
        encoding.truncate(max(0, self.max_tokens - num_special), direction=self._side)
        ids = list(self._backend.post_process(encoding).ids)
        if not ids:
            raise RequestError("the text has 0 tokens, and needs at least 1")
        return ids

    def encode_pair(self, text: str, other: str, *, truncate: bool) -> EncoderInput:
        """The ids of two texts in one sequence. Raises PromptTooLong unless they fit or `truncate` is set."""
        first, second = self._encode(text), self._encode(other)
        num_special = self._backend.num_special_tokens_to_add(True)
        self._check_length(len(first.ids) + len(second.ids) + num_special, truncate)
        lengths = _split_limit(len(first.ids), len(second.ids), max(0, self.max_tokens - num_special))
        for encoding, length in zip((first, second), lengths, strict=True):
            encoding.truncate(length, direction=self._side)
        both = self._backend.post_process(first, second)
        return EncoderInput(list(both.ids), list(both.type_ids) if self._has_types else ())

    def check_ids(self, ids: Sequence[int], *, truncate: bool) -> list[int]:
        """The same ids, cut as `encode` does: a special token at the end stays. Raises RequestError for unknown ones."""
        if not ids:
            raise RequestError("the text has 0 tokens, and needs at least 1")
        wrong = next((each for each in ids if not 0 <= each < self._vocab_size), None)
        if wrong is not None:
            raise RequestError(f"the token id {wrong} is outside the vocabulary of {self._vocab_size}")
        self._check_length(len(ids), truncate)
        if len(ids) <= self.max_tokens:
            return list(ids)
        end = [ids[-1]] if ids[-1] in self._special_ids else []
        return [*ids[: self.max_tokens - len(end)], *end]

    def count_prompt(self, ids: Sequence[int]) -> int:
        """How many of the first ids are the model's own prompt. Its last token may have merged with the text."""
        prompt = self._prompt_ids
        has_prompt = bool(prompt) and list(ids[: len(prompt) - 1]) == prompt[:-1]
        return min(len(prompt), len(ids)) if has_prompt else 0

    def _encode(self, text: str) -> Any:
        """The encoding without special tokens. A batch of one, since that lets other threads run meanwhile."""
        try:
            return self._backend.encode_batch([text], add_special_tokens=False)[0]
        except TypeError as error:  # no text, or surrogates that are not Unicode
            raise RequestError(f"the input is {type(text).__name__}, and must be valid Unicode text") from error

    def _check_length(self, num_tokens: int, truncate: bool) -> None:
        if num_tokens > self.max_tokens and not truncate:
            raise PromptTooLong(num_tokens, self.max_tokens)


def load_encoder_tokenizer(
    files: ModelFiles, options: TokenizerOptions, context_tokens: int, vocab_size: int, trust_remote_code: bool
) -> EncoderTokenizer:
    """The tokenizer of an encoder. Raises UnsupportedModel if there is none, or if it cannot be read."""
    if not files.has_tokenizer:
        raise UnsupportedModel(files.tokenizer_problem)
    return EncoderTokenizer(load_tokenizer(files, trust_remote_code), options, context_tokens, vocab_size)


def _split_limit(length: int, other: int, most: int) -> tuple[int, int]:
    """The lengths of two texts cut to `most` tokens together: the longer one is cut, or both to a half."""
    if length + other <= most:
        return length, other
    short = min(length, other, most // 2)
    long = most - short
    return (short, long) if length <= other else (long, short)
