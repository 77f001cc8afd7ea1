"""The rules of sampling that do not depend on the tensor library, and the texts of its errors."""

from __future__ import annotations

from bough.types import Draw, TokenCounts

NOT_FINITE = "the largest logit is not a finite number: the model's output is broken"
NONE_ALLOWED = "no token can be chosen: the grammar's mask forbids all of them"


def is_plain(draw: Draw) -> bool:
    """Whether the draw is plain argmax: no temperature, bias, mask, penalties or log-probabilities."""
    params = draw.params
    is_unchanged = not params.logit_bias and draw.allowed is None and find_penalised(draw) is None
    return params.temperature == 0 and params.logprobs is None and is_unchanged


def find_penalised(draw: Draw) -> TokenCounts | None:
    """The tokens whose scores the penalties change, with their counts; None if there are none.

    Some may lie beyond the vocabulary: an engine has to leave those out.
    """
    return draw.seen if draw.seen is not None and draw.seen.ids and draw.params.has_penalties else None
