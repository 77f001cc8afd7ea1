"""The rules of sampling that do not depend on the tensor library, and the texts of its errors."""

from __future__ import annotations

from collections import Counter

from bough.types import Draw

NOT_FINITE = "the largest logit is not a finite number: the model's output is broken"
NONE_ALLOWED = "no token can be chosen: the grammar's mask forbids all of them"


def is_plain(draw: Draw) -> bool:
    """Whether the draw is plain argmax: no temperature, mask, penalties or log-probabilities."""
    params = draw.params
    return params.temperature == 0 and draw.allowed is None and params.logprobs is None and not _has_penalties(draw)


def count_penalised(draw: Draw, vocab_size: int) -> dict[int, int]:
    """How often each token that penalties change was seen; those beyond the vocabulary are left out."""
    if not _has_penalties(draw):
        return {}
    return {token_id: count for token_id, count in Counter(draw.history).items() if 0 <= token_id < vocab_size}


def _has_penalties(draw: Draw) -> bool:
    params = draw.params
    is_neutral = params.repeat_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0
    return len(draw.history) > 0 and not is_neutral
