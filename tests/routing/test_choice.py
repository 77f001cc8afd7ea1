"""The choice of a replica against a prediction that tries every depth, and what ties, copies and unknown rates do."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from bough.cache.residency.rates import BAND_TOKENS, Rates
from bough.cache.tree.state import Tier
from bough.routing.choice import Copy, PrefixSource, ReplicaCandidate, choose, predict
from bough.routing.index import COMING, Run
from bough.routing.page_reports import TIERS, PageNote, encode_note
from bough.routing.rates import ReplicaRates

PAGE = 256
FLAT = ReplicaRates({0: 1e-4}, {Tier.HOST: 1e-9, Tier.DISK: 1e-7}, bytes_per_token=1000)


@dataclass(frozen=True)
class KnownPage:
    """One page at one replica; None instead of a note: it is coming."""

    note: PageNote | None


def runs_of(pages: list[KnownPage]) -> list[Run]:
    runs: list[Run] = []
    for number, page in enumerate(pages, start=1):
        code = COMING if page.note is None else encode_note(page.note)
        if runs and runs[-1].code == code:
            runs[-1].end = number
        else:
            runs.append(Run(number, code))
    return runs


def pages(*counts: tuple[int, Tier | None]) -> list[KnownPage]:
    return [KnownPage(None if tier is None else PageNote(tier)) for number, tier in counts for _ in range(number)]


def brute_force_s(num_tokens: int, rates: ReplicaRates, waiting_s: float, held: list[KnownPage]) -> float:
    """The smallest time over the ends of all runs, token by token."""

    def token_s(at: int) -> float:
        bands = rates.token_s
        return bands[min(sorted(bands), key=lambda band: abs(band - at // BAND_TOKENS))]

    totals = [waiting_s + sum(token_s(at) for at in range(num_tokens))]
    for depth in range(1, len(held) + 1):
        is_end_of_run = depth == len(held) or held[depth] != held[depth - 1]
        note = held[depth - 1].note
        if not is_end_of_run or (note is not None and not note.stands):
            continue
        end = min(depth * PAGE, num_tokens - 1)
        loaded = 0.0
        for at in range(end):
            below = held[at // PAGE].note
            if below is not None and below.tier is not Tier.DEVICE:
                loaded += rates.bytes_per_token * rates.byte_s[below.tier]
        totals.append(waiting_s + loaded + sum(token_s(at) for at in range(end, num_tokens)))
    return min(totals)


@pytest.mark.parametrize("seed", range(4))
def test_the_prediction_is_the_smallest_of_all_depths(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(6):
        num_tokens = chance.randrange(1, 6000)
        candidates, expected = [], []
        for number in range(4):
            held = [
                KnownPage(chance.choice([None, *(PageNote(tier, stands) for tier in TIERS for stands in (True, False))]))
                for _ in range(chance.randrange(num_tokens // PAGE + 1))
            ]
            held = [page for page in held for _ in range(chance.randrange(1, 4))][: num_tokens // PAGE]
            bands = {band: chance.uniform(1e-5, 1e-4) for band in chance.sample(range(5), 2)}
            rates = ReplicaRates(bands, {tier: chance.choice([1e-9, 1e-7]) for tier in TIERS}, chance.randrange(1, 2000))
            candidates.append(ReplicaCandidate(str(number), rates, chance.random(), runs_of(held)))
            expected.append(brute_force_s(num_tokens, rates, candidates[-1].waiting_s, held))
        price = sum(each.waiting_s > 0 for each in candidates) / 4
        predictions = [predict(num_tokens, PAGE, each) for each in candidates]
        assert [each.total_s for each in predictions] == pytest.approx(expected)
        costs = [each.total_s + price * (each.load_s + each.compute_s) for each in predictions]
        best = choose(num_tokens, PAGE, candidates, 0.0)
        assert costs[predictions.index(best)] <= min(costs) * 1.01 + 1e-4


def test_prefill_costs_what_the_cache_itself_would_say() -> None:
    measured = Rates(clock=lambda: 0.0)
    measured.note_prefill(0, 2048, 1.0)
    measured.note_prefill(8192, 10240, 3.0)
    rates = ReplicaRates({0: 1 / 2048, 4: 3 / 2048})
    for start, end in ((0, 1), (0, 5000), (3000, 20000), (9000, 9000)):
        assert rates.prefill_s(start, end) == pytest.approx(measured.prefill_s(start, end))


def test_a_slow_tail_is_computed_and_a_fast_one_is_loaded() -> None:
    held = pages((2, Tier.DEVICE), (2, Tier.HOST), (4, Tier.DISK))
    rates = ReplicaRates({0: 1e-4}, {Tier.HOST: 1e-9, Tier.DISK: 2e-7}, bytes_per_token=1000)
    best = choose(4096, PAGE, [ReplicaCandidate("a", rates, 0.0, runs_of(held))], 0.0)
    assert best.depth == 1024  # a token from disk takes 2e-4 s, and computing it half of that
    assert best.load_s == pytest.approx(512 * 1000 * 1e-9)


def test_a_prompt_that_is_wholly_known_still_computes_one_token() -> None:
    best = choose(1024, PAGE, [ReplicaCandidate("a", FLAT, 0.0, runs_of(pages((4, Tier.DEVICE))))], 0.0)
    assert (best.depth, best.compute_s) == (1023, pytest.approx(1e-4))


def test_a_page_without_a_restore_point_is_no_depth() -> None:
    rows = [KnownPage(PageNote(Tier.DEVICE, stands=number == 2)) for number in range(1, 5)]
    assert choose(2048, PAGE, [ReplicaCandidate("a", FLAT, 0.0, runs_of(rows))], 0.0).depth == 512


def test_ties_are_spread_over_all_that_are_as_good() -> None:
    candidates = [ReplicaCandidate(str(number), FLAT, 0.0 if number != 3 else 9.0) for number in range(6)]
    chosen = Counter(choose(1000, PAGE, candidates, step / 1000).replica for step in range(1000))
    assert set(chosen) == {"0", "1", "2", "4", "5"}
    assert min(chosen.values()) == max(chosen.values()) == 200


def test_a_shorter_queue_wins_over_a_match_that_saves_less() -> None:
    held = runs_of(pages((4, Tier.DEVICE)))  # saves 0.1024 s of work
    busy, idle = ReplicaCandidate("busy", FLAT, 0.15, held), ReplicaCandidate("idle", FLAT, 0.0)
    assert choose(2048, PAGE, [busy, idle], 0.0).replica == "busy"  # one of two is busy: work counts 1.5 times
    busy.waiting_s = 0.16
    assert choose(2048, PAGE, [busy, idle], 0.0).replica == "idle"


def test_work_counts_more_the_more_replicas_are_busy() -> None:
    held = runs_of(pages((4, Tier.DEVICE)))
    for num_busy, longest in ((1, 0.11), (5, 0.15), (9, 0.19)):  # 0.1024 × (1 + a tenth of the busy ones)
        others = [ReplicaCandidate("other", FLAT, 0.001) for _ in range(num_busy - 1)]
        others += [ReplicaCandidate("idle", FLAT, 0.0) for _ in range(9 - len(others))]
        assert choose(2048, PAGE, [ReplicaCandidate("held", FLAT, longest, held), *others], 0.0).replica == "held"
        assert choose(2048, PAGE, [ReplicaCandidate("held", FLAT, longest + 0.02, held), *others], 0.0).replica != "held"


def with_store(byte_s: float) -> ReplicaRates:
    return ReplicaRates(FLAT.token_s, {**FLAT.byte_s, Tier.STORE: byte_s}, FLAT.bytes_per_token, PAGE)


def test_the_store_copies_a_prefix_where_that_is_sooner_than_computing_it() -> None:
    held = runs_of(pages((4, Tier.DEVICE)))

    def candidates(rates: ReplicaRates) -> list[ReplicaCandidate]:
        return [ReplicaCandidate("busy", rates, 5.0, held), ReplicaCandidate("idle", rates, 0.0)]

    copied = choose(2048, PAGE, candidates(with_store(1e-8)), 0.0)
    assert copied.replica == "idle"
    assert copied.copy == Copy("busy", 1024, pytest.approx(0.1024 - 1024 * 1000 * 1e-8))
    assert copied.total_s == pytest.approx(1024 * 1000 * 1e-8 + 1024 * 1e-4)
    computed = choose(2048, PAGE, candidates(with_store(1e-6)), 0.0)
    assert (computed.replica, computed.copy) == ("idle", None)
    assert choose(2048, PAGE, candidates(FLAT), 0.0).copy is None


def test_only_whole_pages_that_can_be_restored_are_copied() -> None:
    rates = ReplicaRates(FLAT.token_s, FLAT.byte_s, FLAT.bytes_per_token, store_page_tokens=1024)
    notes = [PageNote(Tier.DEVICE, stands=number < 5) for number in range(7)]
    held = runs_of([KnownPage(note) for note in notes])
    chosen = choose(2048, PAGE, [ReplicaCandidate("busy", rates, 5.0, held), ReplicaCandidate("idle", rates, 0.0)], 0.0)
    assert chosen.copy is not None and chosen.copy.num_tokens == 1024


def test_what_is_coming_can_be_copied_when_it_has_been_computed() -> None:
    coming, rates = runs_of(pages((4, None))), with_store(1e-9)
    waiting = [ReplicaCandidate("leader", rates, 0.5, coming), ReplicaCandidate("idle", rates, 0.0)]
    assert choose(2048, PAGE, waiting, 0.0).copy is None  # computing it takes 0.2 s, sooner than 0.5
    soon = [ReplicaCandidate("leader", rates, 0.02, coming), ReplicaCandidate("idle", rates, 0.0)]
    sources = [PrefixSource("leader", "", 1024, 0.02, is_coming=True)]
    found = {each.replica: predict(2048, PAGE, each, sources) for each in soon}
    assert found["idle"].copy is not None and found["idle"].copy.num_tokens == 1024
    assert found["idle"].total_s == pytest.approx(0.02 + 1024e-6 + 0.1024)
    assert found["leader"].copy is None


def test_unknown_rates_count_as_the_best_of_the_others_and_nominal_if_nobody_knows() -> None:
    slow, fast, new = ReplicaRates({0: 2e-4}), ReplicaRates({0: 1e-4}, {Tier.DISK: 1e-9}, 100), ReplicaRates()
    filled = new.filled_from([slow, fast, new])
    assert (filled.token_s, filled.byte_s, filled.bytes_per_token) == ({0: 1e-4}, {Tier.DISK: 1e-9}, 100)
    assert slow.filled_from([slow, fast]).token_s == {0: 2e-4}
    assert new.filled_from([new]).prefill_s(0, 100) == new.filled_from([new, new]).prefill_s(0, 100) > 0
