"""The prompt that an answer repeats: its text, and where in the text each token begins.

A text is repeated as it came, whatever the tokenizer made of it. Token ids are repeated as the text of their bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import accumulate

from bough.models.tokenizer import Tokenizer
from bough.server.serving.ask import Ask, EchoedPrompt


def make_echo(ask: Ask, ids: Sequence[int], tokenizer: Tokenizer) -> EchoedPrompt:
    """The prompt of an ask that has a text or ids; with its tokens only if they are scored."""
    if ask.text is not None and not ask.scores_prompt:
        return EchoedPrompt(ask.text)
    tokens = tuple(map(tokenizer.token_bytes, ids))
    if ask.text is not None:
        return EchoedPrompt(ask.text, tokens, tuple(tokenizer.encoder.find_starts(ask.text)))
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces = [decoder.decode(each) for each in tokens]
    text = "".join(pieces) + decoder.decode(b"", final=True)
    return (
        EchoedPrompt(text, tokens, tuple(accumulate(map(len, pieces[:-1]), initial=0)))
        if ask.scores_prompt
        else EchoedPrompt(text)
    )
