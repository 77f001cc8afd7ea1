"""The prompt as a client gets it back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from bough.models.tokenizer import Tokenizer
from bough.prompting.ask import Ask


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt as the client gets it back: its text and, if it is scored, each token's bytes and start in the text."""

    text: str
    tokens: tuple[bytes, ...] = ()
    offsets: tuple[int, ...] = ()


def make_echo(ask: Ask, ids: Sequence[int], tokenizer: Tokenizer) -> EchoedPrompt:
    """The prompt of an ask: a text as it came, ids as the text of their bytes; with tokens if it is scored."""
    if ask.text is not None and not ask.scores_prompt:
        return EchoedPrompt(ask.text)
    tokens = tuple(map(tokenizer.token_bytes, ids))
    if ask.text is not None:
        return EchoedPrompt(ask.text, tokens, tuple(tokenizer.encoder.find_starts(ask.text)))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(each) for each in tokens]
    text = "".join(pieces) + decoder.decode(b"", final=True)
    if not ask.scores_prompt:
        return EchoedPrompt(text)
    return EchoedPrompt(text, tokens, tuple(accumulate(map(len, pieces[:-1]), initial=0)))
