"""The reference of the self-check: one prompt and the logits that the stock model gives for it.

The reference is one forward pass from the first token on, made by the engine. Logits are tensors of any library that has
`abs`, `max` and `std`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bough.engines.contract import Logits

ComputeLogits = Callable[[Sequence[int]], Logits]
"""The logits [run, vocabulary] of a stock model after each of the given ids."""


class Reference:
    """A prompt, a branch that leaves it at `branch_at`, and the reference logits of both."""

    def __init__(self, compute_logits: ComputeLogits, num_tokens: int, usual: Sequence[int]) -> None:
        """`usual` are the ids to choose from."""
        self.ids = random.Random(1).choices(usual, k=num_tokens)
        self.branch_at = num_tokens * 5 // 8
        self.branch = self.ids[: self.branch_at] + random.Random(2).choices(usual, k=num_tokens - self.branch_at)
        self.logits = compute_logits(self.ids)
        self.branch_logits = compute_logits(self.branch)
        self.scale = float(self.logits.std())

    def noise(self, compute_logits: ComputeLogits) -> float:
        """How far another model or attention is from the reference, over all positions of one forward pass."""
        return float(abs(compute_logits(self.ids) - self.logits).max())

    def difference(self, logits: Logits, length: int, is_branch: bool = False) -> float:
        """How far the logits after the first `length` tokens are from the reference."""
        reference = self.branch_logits if is_branch else self.logits
        found = float(abs(logits - reference[length - 1]).max())
        return found if found == found else float("inf")  # a NaN is as wrong as can be


def usual_ids(config: Mapping[str, Any], vocab_size: int) -> list[int]:
    """Ids without those that the configuration gives a meaning, such as those that stand for images."""
    special = set(_special_ids(config))
    return [token_id for token_id in range(vocab_size) if token_id not in special]


def _special_ids(config: Mapping[str, Any]) -> Iterator[int]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _special_ids(value)
        elif isinstance(value, int) and str(name).endswith(("token_id", "token_index")):
            yield value
