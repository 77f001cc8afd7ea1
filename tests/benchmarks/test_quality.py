"""The benchmark of quality: logits of one variant beside those of another, over fake engines."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.quality.compare import add_up, compare, continue_greedily, kl_divergence, measure_quality
from benchmarks.quality.prompts import PROMPTS
from bough.bench.variants import Variant
from tests.bench.conftest import PROMPT


def test_a_variant_with_other_logits_is_told_from_float32(variants: list[Variant]) -> None:
    written = continue_greedily(variants[0].engine, PROMPT, 40)

    same, other = compare(variants[0], "a", written), compare(variants[1], "a", written)

    assert (same.equal_tokens, same.same_best) == (40, 40) and same.kl_max < 1e-9 and same.largest_difference < 1e-6
    # the first logits are those after 5 tokens, so that the sixth comes after 10
    assert (other.positions, other.equal_tokens, other.same_best) == (40, 5, 36)
    assert other.kl_max > 1 and other.largest_difference > 90 and 0 < other.largest_gap < 10


def test_all_prompts_together_count_every_position_once(variants: list[Variant]) -> None:
    parts = [part for (part,) in measure_quality(variants, PROMPTS[:3], 20)]

    total = add_up(parts)

    assert [part.prompt for part in parts] == ["chat", "code", "prose"]
    assert total.positions == 60 and total.same_best == sum(part.same_best for part in parts)
    assert math.isclose(total.kl_mean, sum(part.kl_mean for part in parts) / 3)
    assert total.kl_max == max(part.kl_max for part in parts)


def test_the_kl_divergence_is_that_of_the_two_distributions() -> None:
    expected, row = np.log([0.5, 0.25, 0.25]), np.log([0.25, 0.5, 0.25]) + 7  # logits have no absolute height

    assert math.isclose(kl_divergence(expected, row), 0.5 * math.log(2) - 0.25 * math.log(2))
    assert kl_divergence(expected, expected + 3) < 1e-12
