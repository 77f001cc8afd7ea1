"""Text to token ids, without blocking other threads. Texts that are certainly too long are refused before any work.

`tokenizers` holds the GIL in `encode` and releases it in `encode_batch`. With `encode`, a prompt of 2.6 MB would stop every
other thread for two seconds. A long text is encoded in parts, and a cancelled request ends between two of them. Each part
begins with a special token, and tokens never merge across one: the ids are those of the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from bough.errors import PromptTooLong, RequestCancelled, RequestError

PART_CHARS = 2**15

_LONGEST_STRETCH_BYTES = 256
"""The most bytes of text that one token is assumed to stand for, if the vocabulary does not bound them."""

_NEVER = re.compile("(?!)")
_CUT_FACTOR = 2  # more is encoded than is kept, because the end of a text changes the tokens before it
_COUNT_FACTOR = 4  # a prompt is encoded up to four times its limit, so that the error has its length


@dataclass(frozen=True)
class EncodedText:
    """Token ids, and for each the offset in the text at which it ends."""

    ids: list[int]
    ends: list[int]


@dataclass(frozen=True)
class PromptLimit:
    """The most tokens of a prompt (None: any number), and whether its request was cancelled.

    Functions that take a limit raise PromptTooLong and RequestCancelled.
    """

    max_tokens: int | None = None
    is_cancelled: Callable[[], bool] = lambda: False

    def check_cancelled(self) -> None:
        if self.is_cancelled():
            raise RequestCancelled("the request was cancelled while its prompt was encoded")

    def check(self, num_tokens: int, *, is_part: bool = False) -> None:
        """Raise PromptTooLong if there are more tokens; for a part of the prompt, only if there are many more."""
        allowed = self.max_tokens
        if allowed is not None and num_tokens > (_COUNT_FACTOR * allowed if is_part else allowed):
            raise PromptTooLong(num_tokens, allowed, is_least=is_part)


UNLIMITED = PromptLimit()


class Encoder:
    """Encodes with one `tokenizers` object. Any thread may call it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    @cached_property
    def token_bytes(self) -> int:
        """The most bytes of text that a token stands for.

        In a byte-level vocabulary this is the longest token. In others one token may stand for any length of unknown or
        blank text, so a generous number is assumed.
        """
        added = {token.content for token in self._added}
        longest = max((len(token) for token in self._backend.get_vocab() if token not in added), default=1)
        longest = max([longest, *(len(content.encode()) for content in added)])
        swallows_blanks = any(token.lstrip or token.rstrip for token in self._added)
        is_exact = self._is_byte_level and self._backend.normalizer is None and not swallows_blanks
        return longest if is_exact else max(4 * longest, _LONGEST_STRETCH_BYTES)

    @cached_property
    def start_ids(self) -> list[int]:
        """The tokens that the tokenizer puts before every raw prompt, usually one or none."""
        (encoding,) = self._backend.encode_batch(["a"])
        marked = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [token_id for token_id, _ in takewhile(lambda each: each[1], marked)]

    def require_fits(self, num_bytes: int, limit: PromptLimit) -> None:
        """Raise PromptTooLong if every text of `num_bytes` has more tokens than allowed."""
        least = -(-num_bytes // self.token_bytes)
        if limit.max_tokens is not None and least > limit.max_tokens:
            raise PromptTooLong(least, limit.max_tokens, is_least=True)

    def encode(self, text: str, limit: PromptLimit = UNLIMITED) -> EncodedText:
        """The tokens of text inside a chat, without a start token."""
        ids: list[int] = []
        ends: list[int] = []
        for start, encoding in self._encodings(text, limit, self._backend.encode_batch):
            ids += encoding.ids
            limit.check(len(ids), is_part=True)
            ends += [start + end for _, end in encoding.offsets]
        limit.check(len(ids))
        return EncodedText(ids, ends)

    def count(self, text: str, limit: PromptLimit = UNLIMITED) -> int:
        """The number of tokens of text inside a chat."""
        number = 0
        for _, encoding in self._encodings(text, limit, self._backend.encode_batch_fast):
            number += len(encoding)
            limit.check(number, is_part=True)
        limit.check(number)
        return number

    def encode_whole(self, text: str, limit: PromptLimit = UNLIMITED) -> list[int]:
        """The ids of a raw prompt, with a start token if the tokenizer adds one."""
        self.require_fits(_num_bytes(text), limit)
        limit.check_cancelled()
        encoding = _encode_one(self._backend.encode_batch_fast, text)
        limit.check(len(encoding))
        return list(encoding.ids)

    def encode_cut(self, text: str, max_tokens: int) -> list[int]:
        """As `encode_whole`; a longer text is cut, and special tokens stay. Text far behind the cut is not read."""
        begin = text[: _CUT_FACTOR * max_tokens * self.token_bytes]
        encoding = _encode_one(self._backend.encode_batch_fast, begin, add_special_tokens=False)
        encoding.truncate(max(0, max_tokens - self._backend.num_special_tokens_to_add(False)))
        return list(self._backend.post_process(encoding).ids)

    def find_starts(self, text: str) -> list[int]:
        """The offset in a raw prompt at which each token of `encode_whole` begins. All tokens of a character begin there.

        Some tokenizers count the space before a word to no token: here it belongs to the token of the word.
        """
        encoding = _encode_one(self._backend.encode_batch, text)
        starts: list[int] = []
        end = 0
        for token_start, token_end in encoding.offsets:
            starts.append(max(min(token_start, end), starts[-1] if starts else 0))
            end = max(end, token_end)
        return starts

    def _encodings(self, text: str, limit: PromptLimit, encode: Callable[..., list[Any]]) -> Iterator[tuple[int, Any]]:
        self.require_fits(_num_bytes(text), limit)
        for start, end in self._parts(text):
            limit.check_cancelled()
            yield start, _encode_one(encode, text[start:end], add_special_tokens=False)

    def _parts(self, text: str) -> Iterator[tuple[int, int]]:
        """Ranges [start, end) that can be encoded separately. Each but the first begins with a special token."""
        start = 0
        if len(text) > PART_CHARS:
            for found in self._special.finditer(text):
                if found.start() - start >= PART_CHARS and found[0] in self._borders:
                    yield start, found.start()
                    start = found.start()
        if start < len(text):
            yield start, len(text)

    @cached_property
    def _added(self) -> list[Any]:
        return list(self._backend.get_added_tokens_decoder().values())

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Matches added tokens as the tokenizer does, before all others: leftmost, longest."""
        return any_of(token.content for token in self._added if not token.normalized)

    @cached_property
    def _borders(self) -> frozenset[str]:
        """Tokens before which a text can be cut, because they do not absorb blanks before them.

        If some token only matches a whole word, the text around it matters, and the text is never cut.
        """
        if any(token.single_word for token in self._added):
            return frozenset()
        return frozenset(token.content for token in self._added if not (token.normalized or token.lstrip))

    @property
    def _is_byte_level(self) -> bool:
        decoder = self._backend.decoder
        return decoder is not None and b"ByteLevel" in bytes(decoder.__getstate__())


def _encode_one(encode: Callable[..., list[Any]], text: str, **options: bool) -> Any:
    """The encoding of one text. Raises RequestError if the text is not valid Unicode."""
    try:
        return encode([text], **options)[0]
    except TypeError as error:  # what `tokenizers` raises for surrogates
        raise RequestError(f"a text of {len(text):,} characters has surrogates: it must be valid Unicode") from error


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for any of the texts, the longest first. The lookahead keeps thousands of texts fast."""
    ordered = sorted(filter(None, texts), key=len, reverse=True)
    if not ordered:
        return _NEVER
    firsts = "".join(sorted({re.escape(text[0]) for text in ordered}))
    return re.compile(f"(?=[{firsts}])(?:{'|'.join(map(re.escape, ordered))})")
