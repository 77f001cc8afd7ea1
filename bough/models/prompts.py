"""Prompts: text, messages or token ids become the tokens for a model, with the boundaries of the messages."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bough.errors import RequestError
from bough.models.encoder import UNLIMITED, PromptLimit
from bough.models.tokenizer import Tokenizer
from bough.tokens import Tokens
from bough.types import Boundary, Prompt

_THINK = "<think>"
_TAG_TOKENS = 8  # the most tokens of the tag and the blanks behind it


@dataclass(frozen=True)
class LeftOut:
    """What a prompt that was too long lacks: whole messages, and the beginning of a text or of the last message."""

    num_messages: int = 0
    is_text_cut: bool = False


NOTHING_LEFT_OUT = LeftOut()


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as tokens, with the boundaries of a chat's messages. `end_ids` end its answer besides the usual ones."""

    tokens: Tokens
    boundaries: Sequence[Boundary] = ()
    is_chat: bool = False
    end_ids: frozenset[int] = frozenset()
    left_out: LeftOut = NOTHING_LEFT_OUT


class Prompts:
    """Encodes prompts for one model, with its tokenizer and the size of its vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return self.tokenizer.has_text and self.tokenizer.template.is_present

    def with_template(self, source: str) -> Prompts:
        return Prompts(self.tokenizer.with_template(source), self._vocab_size)

    def encode(
        self, prompt: Prompt, *, tools: Any = None, limit: PromptLimit = UNLIMITED, **template_kwargs: Any
    ) -> EncodedPrompt:
        """The tokens of a prompt: messages through the chat template, a text as it is, ids checked."""
        if isinstance(prompt, str):
            return EncodedPrompt(Tokens.of(self.tokenizer.encode(prompt, limit)))
        if len(prompt) > 0 and isinstance(prompt[0], Mapping):
            messages: Any = prompt
            rendered = self.tokenizer.template.render(messages, tools=tools, limit=limit, **template_kwargs)
            return EncodedPrompt(Tokens.of(rendered.ids), rendered.boundaries, is_chat=True)
        limit.check(len(prompt))
        return EncodedPrompt(Tokens.of(self.check_ids(prompt)))

    def encode_infill(self, prefix: str, suffix: str, limit: PromptLimit = UNLIMITED) -> EncodedPrompt:
        """The prompt for the text between two others. Raises RequestError if the model was not trained for that."""
        infill = self.tokenizer.infill
        if infill is None:
            raise RequestError("the model does not support insert: its vocabulary has no tokens for it")
        return EncodedPrompt(Tokens.of(infill.encode(prefix, suffix, limit)), end_ids=infill.end_ids)

    def count(
        self, messages: Sequence[Any], *, tools: Any = None, limit: PromptLimit = UNLIMITED, **template_kwargs: Any
    ) -> int:
        """The number of a chat's tokens, in less time than `encode` takes."""
        return self.tokenizer.template.count(messages, tools=tools, limit=limit, **template_kwargs)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def starts_thinking(self, prompt: Tokens) -> bool:
        """Whether a prompt ends with the tag that opens the thinking, so that the answer begins inside."""
        return self.decode(prompt[-_TAG_TOKENS:]).rstrip().endswith(_THINK)

    def check_ids(self, prompt: Sequence[Any]) -> list[int]:
        """The ids as integers. Raises RequestError if one of them is not in the vocabulary."""
        try:
            ids = [operator.index(each) for each in prompt]
        except TypeError as error:
            raise RequestError(f"a prompt is a text, messages, or a flat list of token ids: {error}") from error
        wrong = next((each for each in ids if not 0 <= each < self._vocab_size), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is outside the vocabulary of {self._vocab_size}")
        return ids
