"""Logits, masks and draws for tests of sampling, as plain numbers: no engine is imported for them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from bough.types import Draw, SamplingParams, TokenCounts


def logs(*probabilities: float) -> list[float]:
    return [math.log(each) if each else -math.inf for each in probabilities]


def bits(allowed: Iterable[int], vocab_size: int) -> bytes:
    mask = sum(1 << token_id for token_id in allowed)
    return mask.to_bytes((vocab_size + 7) // 8, "little")


def make_many_draws(count: int, vocab_size: int) -> list[Draw]:
    """Draws of every kind: greedy and not, with each of the limits, penalties, biases, a mask and log-probabilities."""
    limits: list[dict[str, Any]] = [
        {},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 40, "top_p": 0.9, "repeat_penalty": 1.3},
        {"logprobs": 3},
        {"top_n_sigma": 1.0, "top_p": 0.95},
        {"logit_bias": {7: 100.0, 8: -100.0, 9: 2.5}, "logprobs": 2},
    ]
    return [
        Draw(
            SamplingParams(temperature=(index % 3) / 2, **limits[index % len(limits)]),
            uniform=(index + 0.5) / count,
            seen=TokenCounts(range(index * 10, index * 20)),
            allowed=b"\x5a" * (vocab_size // 8) if index % 2 else None,
        )
        for index in range(count)
    ]
