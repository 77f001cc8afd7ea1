"""Decode, prefill and quality over the fake engine: what is measured, and what is compared."""

from __future__ import annotations

import pytest

from bough.bench.decode import DecodeReport, DecodeSetup, Figure, measure_decode
from bough.bench.variants import PreparedLane, Variant, variant_lines
from bough.errors import RequestError
from tests.bench.conftest import PROMPT
from tests.fakes import MODELS, FakeEngine


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
    setup = DecodeSetup(lanes=(1, 3), tokens=(), depths=(0, 5), steps=2, rounds=2)

    figures = [each for case in measure_decode(variants, setup) for each in case]

    sizes = [(each.rows, each.size, each.weights) for each in figures]
    assert sizes == [(rows, lanes, name) for rows in (0, 5) for lanes in (1, 3) for name in ("float32", "auto")]
    assert all(len(each.round_ms) == 2 and min(each.round_ms) > 0 for each in figures)
    assert engine_of(variants[0]).evaluated == engine_of(variants[1]).evaluated
    assert not engine_of(variants[0]).live


def test_a_run_of_prefill_is_on_the_rows_that_were_asked_for(variants: list[Variant]) -> None:
    setup = DecodeSetup(lanes=(), tokens=(1, 9), depths=(0, 4), rounds=1)

    figures = [each for case in measure_decode(variants[:1], setup) for each in case]

    assert [(each.unit, each.rows, each.size) for each in figures] == [
        *(("tokens", 0, 1), ("tokens", 0, 9)),
        *(("tokens", 4, 1), ("tokens", 4, 9)),
    ]
    # a warm-up and a round of each size; the lane's own rows are evaluated once
    assert engine_of(variants[0]).evaluated == [1, 1, 9, 9, 4, 1, 1, 9, 9]


def test_sizes_that_do_not_fit_into_the_context_are_refused_with_the_numbers(variants: list[Variant]) -> None:
    with pytest.raises(RequestError, match="5,000 rows and 33 steps do not fit into the context of 4,096 tokens"):
        list(measure_decode(variants, DecodeSetup(lanes=(1,), depths=(5000,))))
    with pytest.raises(RequestError, match="0 rows and 9,000 tokens do not fit"):
        list(measure_decode(variants, DecodeSetup(lanes=(), tokens=(9000,))))


def test_ratios_are_those_of_the_quickest_rounds_to_the_first_way_at_the_same_size() -> None:
    figures = [
        Figure("float32", "lanes", 0, 1, (40.0, 50.0, 60.0)),
        Figure("auto", "lanes", 0, 1, (30.0, 20.0, 10.0)),
        Figure("float32", "tokens", 0, 1, (80.0,)),
        Figure("auto", "tokens", 0, 1, (160.0,)),
    ]
    report = DecodeReport(DecodeSetup(), figures)

    assert [report.ratio(each) for each in figures] == [1, 4, 1, 0.5]
    found = report.as_dict()["figures"][1]
    assert (found["lanes"], found["smallest_ms"], found["median_ms"], found["tokens_per_s"]) == (1, 10, 20, 100)


def test_ways_that_are_described_alike_are_said_to_be_the_same(variants: list[Variant]) -> None:
    same = "the engine runs float32 and auto the same way: there is nothing to compare"
    assert variant_lines(variants)[2:] == [same]
    assert variant_lines(variants[:1])[1:] == []
