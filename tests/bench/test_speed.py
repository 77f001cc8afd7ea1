"""Decode, prefill and quality over the fake engine: what is measured, and what is compared."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bough.bench.speed.decode import DecodeSetup, measure_decode
from bough.bench.speed.figures import Figure, SpeedReport
from bough.bench.speed.prefill import PrefillSetup, measure_prefill
from bough.bench.speed.prompts import PROMPTS
from bough.bench.speed.quality import add_up, compare, continue_greedily, kl_divergence, measure_quality
from bough.bench.speed.variants import PreparedLane, Variant, find_equal_variants
from bough.cache.tree.state import Group
from bough.errors import RequestError
from tests.cli.conftest import make_runner
from tests.fakes import MODELS, FakeEngine

PROMPT = [3, 1, 4, 1, 5]


class ShiftedEngine(FakeEngine):
    """Logits that are a little off, and prefer another token at every tenth position."""

    def _logits(self, held: dict[Group, tuple[int, list[int]]]) -> tuple[float, ...]:
        best, *rest = super()._logits(held)
        first, tokens = next(iter(held.values()))
        return (100.0 if (first + len(tokens)) % 10 == 0 else best, *(each + 1e-3 for each in rest))


@pytest.fixture
def variants(tmp_path: Path) -> Iterator[list[Variant]]:
    with (
        make_runner(tmp_path / "one") as one,
        make_runner(tmp_path / "two", ShiftedEngine(vocab_size=one.runtime.engine.vocab_size)) as two,
    ):
        yield [Variant("float32", one.runtime), Variant("auto", two.runtime)]


def engine_of(variant: Variant) -> FakeEngine:
    assert isinstance(variant.engine, FakeEngine)
    return variant.engine


@pytest.mark.parametrize("groups", MODELS.values(), ids=MODELS)
def test_a_prepared_lane_goes_back_to_the_end_of_its_prompt_and_leaves_nothing(groups) -> None:
    engine = FakeEngine(groups)
    prepared = PreparedLane(engine, PROMPT, room_tokens=4)

    first = engine.step([prepared.lane], [7])
    engine.step([prepared.lane], [8])
    prepared.put_back()

    assert prepared.lane.offset == len(PROMPT)
    assert engine.step([prepared.lane], [7]) == first
    prepared.close()
    assert not engine.live


def test_every_variant_decodes_every_size_in_turns_with_the_same_numbers_of_tokens(variants: list[Variant]) -> None:
    setup = DecodeSetup(lanes=(1, 3), depths=(0, 5), steps=2, rounds=2)

    figures = [each for case in measure_decode(variants, setup) for each in case]

    sizes = [(each.rows, each.size, each.weights) for each in figures]
    assert sizes == [(rows, lanes, name) for rows in (0, 5) for lanes in (1, 3) for name in ("float32", "auto")]
    assert all(len(each.round_ms) == 2 and min(each.round_ms) > 0 for each in figures)
    assert engine_of(variants[0]).evaluated == engine_of(variants[1]).evaluated
    assert not engine_of(variants[0]).live


def test_a_run_of_prefill_is_on_the_rows_that_were_asked_for(variants: list[Variant]) -> None:
    figures = [
        each for case in measure_prefill(variants[:1], PrefillSetup(tokens=(1, 9), rows=(0, 4), rounds=1)) for each in case
    ]

    assert [(each.rows, each.size, each.tokens) for each in figures] == [(0, 1, 1), (0, 9, 9), (4, 1, 1), (4, 9, 9)]
    # a warm-up and a round of each size; the lane's own rows are evaluated once
    assert engine_of(variants[0]).evaluated == [1, 1, 9, 9, 4, 1, 1, 9, 9]


def test_sizes_that_do_not_fit_into_the_context_are_refused_with_the_numbers(variants: list[Variant]) -> None:
    with pytest.raises(RequestError, match="5,000 rows and 33 steps do not fit into the context of 4,096 tokens"):
        list(measure_decode(variants, DecodeSetup(lanes=(1,), depths=(5000,))))
    with pytest.raises(RequestError, match="0 rows and 9,000 tokens do not fit"):
        list(measure_prefill(variants, PrefillSetup(tokens=(9000,))))


def test_ratios_are_those_of_the_quickest_rounds_to_the_first_way_at_the_same_size() -> None:
    figures = [
        Figure("float32", 0, 1, 1, (40.0, 50.0, 60.0)),
        Figure("auto", 0, 1, 1, (30.0, 20.0, 10.0)),
        Figure("float32", 0, 4, 4, (80.0,)),
        Figure("auto", 0, 4, 4, (160.0,)),
    ]
    report = SpeedReport("decode", figures)

    assert [report.ratio(each) for each in figures] == [1, 4, 1, 0.5]
    found = report.as_dict()["figures"][1]
    assert (found["lanes"], found["smallest_ms"], found["median_ms"], found["tokens_per_s"]) == (1, 10, 20, 100)


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


def test_ways_that_are_described_alike_are_said_to_be_the_same(variants: list[Variant]) -> None:
    assert find_equal_variants(variants) == ["the engine runs float32 and auto the same way: there is nothing to compare"]
    assert find_equal_variants(variants[:1]) == []
