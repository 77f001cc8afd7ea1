"""The reference of the self-check: some prompts and the logits of the stock model for them.

The reference is one forward pass without a cache, made by the engine. Logits are tensors of any library that has `abs`,
`max` and `std`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bough.engines.contract import Logits


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the position of the first of them."""

    ids: Sequence[int]
    first: int = 0


ComputeLogits = Callable[[Sequence[Prompt]], Sequence[Logits]]
"""Returns the logits [run, vocabulary] after each token of each prompt. The prompts have the same length."""


class Reference:
    """A prompt, a branch that leaves it at `branch_at`, and the reference logits of both.

    The prompts are random, out of the `usual` ids. With `far` the prompt is also computed at the positions from `far` on: a
    model may scale something by the position.
    """

    def __init__(self, compute_logits: ComputeLogits, num_tokens: int, usual: Sequence[int], far: int = 0) -> None:
        self._usual, self._far = usual, far
        self.ids = random.Random(1).choices(usual, k=num_tokens)
        self.branch_at = num_tokens * 5 // 8
        self.branch = self.ids[: self.branch_at] + random.Random(2).choices(usual, k=num_tokens - self.branch_at)
        prompts = [Prompt(self.ids), Prompt(self.branch), *([Prompt(self.ids, far)] if far else [])]
        self.logits, self.branch_logits, *self._far_logits = compute_logits(prompts)
        self.scale = float(self.logits.std())

    def computed_by(self, compute_logits: ComputeLogits) -> Reference:
        """The same prompts, with the logits of another way of computing."""
        return Reference(compute_logits, len(self.ids), self._usual, self._far)

    def distance(self, other: Reference) -> float:
        """The largest difference from the same prompts computed another way."""
        pairs = ((self.logits, other.logits), (self.branch_logits, other.branch_logits))
        return max(_largest(found - wanted) for wanted, found in pairs)

    def far_distance(self, other: Reference) -> float:
        """The same at the far positions; 0 if there are none."""
        pairs = zip(self._far_logits, other._far_logits, strict=True)
        return max((_largest(found - wanted) for wanted, found in pairs), default=0.0)

    def noise(self, compute_logits: ComputeLogits) -> float:
        """The distance of another model or attention from the reference, over all positions of one forward pass."""
        (logits,) = compute_logits([Prompt(self.ids)])
        return _largest(logits - self.logits)

    def difference(self, logits: Logits, length: int, is_branch: bool = False) -> float:
        """The distance of the logits after the first `length` tokens from the reference."""
        reference = self.branch_logits if is_branch else self.logits
        return _largest(logits - reference[length - 1])


def _largest(difference: Logits) -> float:
    found = float(abs(difference).max())
    return found if found == found else float("inf")  # a NaN is as wrong as can be


def usual_ids(config: Mapping[str, Any], vocab_size: int) -> list[int]:
    """The ids without those with a meaning in the configuration, such as placeholders for images."""
    special = set(_special_ids(config))
    return [token_id for token_id in range(vocab_size) if token_id not in special]


def _special_ids(config: Mapping[str, Any]) -> Iterator[int]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _special_ids(value)
        elif isinstance(value, int) and str(name).endswith(("token_id", "token_index")):
            yield value
