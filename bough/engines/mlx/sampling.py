"""Choosing the next token from arrays of MLX.

The host reads rows where they are: Apple's GPUs share their memory with it, and have no double precision. A step that goes
ahead of plain argmax cannot wait for it: there the device finds the largest logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from bough.engines.sampling import NOT_FINITE, sample_row, score_row
from bough.errors import EngineError
from bough.types import Draw, SampledToken

_BROKEN = -1  # instead of a token id, so that finding a failure needs no second wait


def sample(logits: Sequence[mx.array], draws: Sequence[Draw]) -> list[SampledToken]:
    """Choose one token for each row of logits, which stay as they are. No row's result depends on the others.

    Raises EngineError if a row has NaN or no finite logit, or if its mask forbids every token.
    """
    rows = [row.astype(mx.float32) for row in logits]  # which represents every value of the half types exactly
    mx.eval(rows)
    return [sample_row(np.array(row, copy=False), draw) for row, draw in zip(rows, draws, strict=True)]


def find_likeliest(rows: Sequence[mx.array]) -> mx.array:
    """The id of each row's largest logit, of equal ones the lowest: not evaluated yet, and -1 where there is none."""
    stacked = mx.stack(list(rows))
    is_sound = mx.isfinite(stacked.max(axis=-1))  # NaN is the maximum on every device, but not always the argmax
    return mx.where(is_sound, stacked.argmax(axis=-1).astype(mx.int32), _BROKEN)


def read_likeliest(token_ids: mx.array) -> list[SampledToken]:
    """Wait for the result of `find_likeliest` and read it."""
    chosen: list[int] = np.array(token_ids).tolist()
    if _BROKEN in chosen:
        raise EngineError(NOT_FINITE)
    return [SampledToken(token_id) for token_id in chosen]


def score(rows: mx.array, token_ids: Sequence[int], num_top: int) -> list[SampledToken]:
    """The log-probability of a given token in each row of logits in float32, and the likeliest ones there."""
    mx.eval(rows)
    values = np.array(rows, copy=False)
    return [score_row(row, token_id, num_top) for row, token_id in zip(values, token_ids, strict=True)]
