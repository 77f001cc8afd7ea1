"""Control tokens that users type: they reach the model as plain text, never as the tokens that the template writes.

Before a chat is rendered, every control token in the client's messages is put between two marks: private-use characters
that occur nowhere in them. Templates keep the marks as they trim, split and join. Then the rendered text is encoded
piece by piece. Text between marks is encoded without added tokens, the rest as usual, and the marks are dropped. Tokens
never merge across the borders of pieces: the text is the same, but its tokens may differ from those of the whole.

Control tokens are the special tokens. In messages of others than the assistant they are also the other added tokens
that the template writes itself (`<tool_response>`). An assistant's `<think>` was a token when it was generated, and
stays one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bough.errors import RequestError
from bough.models.encoder import UNLIMITED, EncodedText, Encoder, PromptLimit, any_of
from bough.types import Message

_PRIVATE_USE = range(0x100000, 0x10FFFD)
_WINDOW_CHARS = 2**20


@dataclass(frozen=True)
class Marks:
    """Two characters that enclose a control token to be encoded as plain text."""

    start: str
    end: str

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(f"{self.start}([^{self.start}{self.end}]*){self.end}|[{self.start}{self.end}]")

    def drop(self, text: str) -> str:
        return text.replace(self.start, "").replace(self.end, "")


@dataclass(frozen=True)
class MarkedChat:
    """A chat with its control tokens enclosed in marks."""

    messages: list[Message]
    tools: Any
    marks: Marks


class ControlTokens:
    """The control tokens of one tokenizer. `backend` is its `tokenizers` object."""

    def __init__(self, backend: Any, template_text: str, encoder: Encoder) -> None:
        self._backend = backend
        self._encoder = encoder
        added = backend.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        spoken = {
            token.content for token in added.values() if token.content in template_text and not token.content.isspace()
        }
        self._ids = {index for index, token in added.items() if token.content in special | spoken}
        self._special = any_of(special)
        self._control = any_of(special | spoken)
        self._longest = max(map(len, special | spoken), default=0)
        needs_normalizing = backend.normalizer is not None and any(token.normalized for token in added.values())
        self._normalizer = backend.normalizer if needs_normalizing else None

    def mark(self, messages: list[Message], tools: Any) -> MarkedChat | None:
        """The messages and tools with every control token enclosed in marks; None if there is none to enclose."""
        patterns = [self._special if each["role"] == "assistant" else self._control for each in messages]
        pairs = [*zip(messages, patterns, strict=True), (tools, self._control)]
        if not any(self._is_found(text, pattern) for value, pattern in pairs for text in _strings(value)):
            return None
        used = set(json.dumps([messages, tools], ensure_ascii=False, default=str))
        free = (char for char in map(chr, _PRIVATE_USE) if char not in used)
        marks = Marks(next(free), next(free))
        *marked, marked_tools = [self._enclose(value, marks, pattern) for value, pattern in pairs]
        return MarkedChat(marked, marked_tools, marks)

    def encode(
        self, text: str, marks: Marks | None, limit: PromptLimit = UNLIMITED, *, is_inside: bool = False
    ) -> EncodedText:
        """The tokens of rendered text. `ends` count in the text with its marks; `is_inside`: other text comes before."""
        if marks is None:
            return self._encode_piece(text, 0, limit, is_inside=True) if is_inside else self._encoder.encode(text, limit)
        ids: list[int] = []
        ends: list[int] = []
        position = 0
        plain: dict[str, list[int]] = {}  # texts that occur often are encoded once
        for found in marks.pattern.finditer(text):
            limit.check_cancelled()
            before = self._encode_piece(text[position : found.start()], position, limit, is_inside=is_inside)
            said = found[1] or ""
            if said not in plain:
                plain[said] = self._encode_plain(said)
            ids += before.ids + plain[said]
            ends += before.ends + [found.end()] * len(plain[said])
            limit.check(len(ids), is_part=True)
            position = found.end()
        rest = self._encode_piece(text[position:], position, limit, is_inside=is_inside)
        limit.check(len(ids) + len(rest.ids))
        return EncodedText(ids + rest.ids, ends + rest.ends)

    def encode_inside(self, text: str) -> list[int]:
        """The tokens of an assistant's text in the middle of a chat, with special tokens as plain text."""
        return self.encode_typed(text, is_inside=True, role="assistant")

    def encode_typed(
        self, text: str, limit: PromptLimit = UNLIMITED, *, is_inside: bool = False, role: str = "user"
    ) -> list[int]:
        """The tokens of a text outside of a chat, with control tokens as plain text."""
        marked = self.mark([{"role": role, "content": text}], None)
        if marked is None:
            return self.encode(text, None, limit, is_inside=is_inside).ids
        return self.encode(marked.messages[0]["content"], marked.marks, limit, is_inside=is_inside).ids

    def _encode_plain(self, text: str) -> list[int]:
        """The tokens of text inside a chat, none of them a control token. Raises RequestError if that is impossible."""
        for pieces in ([text], list(text)):
            ids = [index for piece in pieces if piece for index in self._encode_without_added(piece)]
            if not self._ids.intersection(ids):
                return ids
        raise RequestError(f"{text!r} cannot be sent as plain text: the tokenizer always makes a special token of it")

    def _encode_piece(self, text: str, position: int, limit: PromptLimit, *, is_inside: bool) -> EncodedText:
        """Encode text that begins at `position` of the chat.

        Except at the start, a newline is put in front and removed again: some tokenizers add a space before the first word.
        """
        if not text:
            return EncodedText([], [])
        if position or is_inside:
            lead = self._newline_ids
            found = self._encoder.encode("\n" + text, limit)
            if found.ids[: len(lead)] == lead:
                ends = [position + end - 1 for end in found.ends[len(lead) :]]
                return EncodedText(found.ids[len(lead) :], ends)
        found = self._encoder.encode(text, limit)
        return EncodedText(found.ids, [position + end for end in found.ends])

    @cached_property
    def _newline_ids(self) -> list[int]:
        return self._encoder.encode("\n").ids

    def _encode_without_added(self, text: str) -> list[int]:
        """Encode with the same newline, by the parts of the tokenizer that follow its search for added tokens.

        The tokenizer has a switch for this, but all threads share it, and it covers special tokens only.
        """
        lead = self._run_model("\n")
        ids = self._run_model("\n" + text)
        return ids[len(lead) :] if ids[: len(lead)] == lead else self._run_model(text)

    def _run_model(self, text: str) -> list[int]:
        if self._backend.normalizer is not None:
            text = self._backend.normalizer.normalize_str(text)
        splits = [text]
        if self._backend.pre_tokenizer is not None:
            splits = [split for split, _ in self._backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for split in splits for token in self._backend.model.tokenize(split)]

    def _is_found(self, text: str, pattern: re.Pattern[str]) -> bool:
        """Whether the tokenizer would find a match in the text. A search holds the GIL, so it is made in windows."""
        texts = [text] if self._normalizer is None else [text, self._normalizer.normalize_str(text)]
        return any(
            pattern.search(each, start, start + _WINDOW_CHARS + self._longest)
            for each in texts
            for start in range(0, len(each) or 1, _WINDOW_CHARS)
        )

    def _enclose(self, value: Any, marks: Marks, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            if pattern.search(value):
                return pattern.sub(lambda found: f"{marks.start}{found[0]}{marks.end}", value)
            return f"{marks.start}{value}{marks.end}" if self._is_found(value, pattern) else value
        if isinstance(value, dict):
            return {self._enclose(key, marks, pattern): self._enclose(each, marks, pattern) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._enclose(each, marks, pattern) for each in value]
        return value


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)
