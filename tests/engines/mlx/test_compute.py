"""One step ahead of delivery: the same tokens as without it, whatever the caller does in between."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest

from bough.cache.tree.state import GroupSource
from bough.config import Settings
from bough.engines.mlx import MlxEngine
from bough.types import Draw, SamplingParams
from tests.contract.driving import answer, give_back, is_close, keep, make_ids, new_lane, rewind, run
from tests.tiny_mlx_models import make_loaded

KINDS = ["llama", "mistral", "gemma3_text", "qwen3_next", "falcon_h1", "mamba2"]
GREEDY = Draw(SamplingParams())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where verdicts are kept: each kind of model is checked once."""
    return tmp_path_factory.mktemp("verdicts")


@pytest.fixture(params=KINDS)
def engine(request: pytest.FixtureRequest, folder: Path) -> MlxEngine:
    return make_ahead(request.param, folder)


def make_ahead(name: str, folder: Path, **settings: Any) -> MlxEngine:
    return MlxEngine(make_loaded(name), Settings(device="cpu", cache_folder=folder, **settings), goes_ahead=True)


def count_steps(engine: MlxEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many lanes each forward pass of single tokens from now on has."""
    steps: list[int] = []
    inner = engine._compute  # type: ignore[attr-defined]
    build = inner.build_step
    monkeypatch.setattr(inner, "build_step", lambda lanes, tokens: (steps.append(len(lanes)), build(lanes, tokens))[1])
    return steps


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_step_after_a_choice_is_on_its_way_before_it_is_asked_for(
    engine: MlxEngine, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = make_ids(engine, 30)
    lane = new_lane(engine, 100)
    logits = engine.evaluate(lane, ids)
    steps = count_steps(engine, monkeypatch)

    (sampled,) = engine.sample([logits], [Draw(SamplingParams(temperature=temperature), uniform=0.4)])
    assert (steps, lane.offset) == ([1], 30)
    (logits,) = engine.step([lane], [sampled.token_id])

    assert (steps, lane.offset) == ([1], 31)
    assert is_close(logits, answer(engine, [*ids, sampled.token_id]))


def test_another_token_than_the_chosen_one_is_computed_anew(engine: MlxEngine) -> None:
    ids = make_ids(engine, 30)
    lane = new_lane(engine, 100)
    (sampled,) = engine.sample([engine.evaluate(lane, ids)], [GREEDY])
    other = (sampled.token_id + 1) % engine.vocab_size

    (logits,) = engine.step([lane], [other])

    assert is_close(logits, answer(engine, [*ids, other]))


def test_what_a_lane_holds_is_as_if_it_had_not_gone_ahead(engine: MlxEngine) -> None:
    ids = make_ids(engine, 60)
    lane, other = new_lane(engine, 100), new_lane(engine, 100)
    engine.sample([run(engine, lane, ids, [40])], [GREEDY])
    kept = keep(engine, lane)

    other.adopt(40, kept)

    assert is_close(run(engine, other, ids, [20]), answer(engine, ids))
    assert is_close(run(engine, lane, ids, [20]), answer(engine, ids))
    give_back(engine, kept)


def test_a_lane_that_goes_elsewhere_forgets_what_was_ahead(engine: MlxEngine) -> None:
    ids = make_ids(engine, 60)
    lane = new_lane(engine, 100)
    run(engine, lane, ids, [30])
    kept = keep(engine, lane)
    (sampled,) = engine.sample([run(engine, lane, ids, [10])], [GREEDY])
    rewind(engine, lane, 30, kept)

    (logits,) = engine.step([lane], [sampled.token_id])

    assert is_close(logits, answer(engine, [*ids[:30], sampled.token_id]))
    give_back(engine, kept)


def test_a_cleared_lane_begins_anew(engine: MlxEngine) -> None:
    ids = make_ids(engine, 40)
    lane = new_lane(engine, 60)
    engine.sample([engine.evaluate(lane, ids)], [GREEDY])

    lane.clear()
    lane.reserve(60)
    lane.adopt(0, {group: GroupSource() for group in engine.groups})

    assert is_close(run(engine, lane, ids, [40]), answer(engine, ids))


def test_a_lane_that_grows_forgets_what_was_ahead(engine: MlxEngine) -> None:
    ids = make_ids(engine, 256)
    lane = new_lane(engine, 257)
    (sampled,) = engine.sample([run(engine, lane, ids, [200, 56])], [GREEDY])

    lane.reserve(900)
    (logits,) = engine.step([lane], [sampled.token_id])

    assert is_close(logits, answer(engine, [*ids, sampled.token_id]))


def test_a_lane_without_room_waits_for_the_caller(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_ahead("llama", folder, context=300)
    full, free = new_lane(engine, 256), new_lane(engine, 300)
    logits = [engine.evaluate(lane, make_ids(engine, length)) for lane, length in ((full, 256), (free, 50))]
    steps = count_steps(engine, monkeypatch)

    engine.sample(logits, [GREEDY, GREEDY])

    assert steps == [1]


def test_a_step_that_fails_ahead_is_told_when_it_is_asked_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_ahead("qwen3_next", folder)
    ids = make_ids(engine, 30)
    lane = new_lane(engine, 60)
    logits = engine.evaluate(lane, ids)
    layer = type(engine._forward.model.layers[-1])
    with monkeypatch.context() as patch:
        patch.setattr(layer, "__call__", lambda *_, **__: 1 / 0)
        (sampled,) = engine.sample([logits], [GREEDY])
        assert lane.offset == 30

    (logits,) = engine.step([lane], [sampled.token_id])

    assert is_close(logits, answer(engine, [*ids, sampled.token_id]))


def test_the_same_logits_may_be_asked_for_twice_at_once(engine: MlxEngine) -> None:
    ids = make_ids(engine, 255)
    lane = new_lane(engine, 300)
    logits = run(engine, lane, ids, [200, 55])
    engine._compute.can_batch = False  # type: ignore[attr-defined]

    first, second = engine.sample([logits, logits], [GREEDY, GREEDY])
    (logits,) = engine.step([lane], [first.token_id])

    assert first == second
    assert is_close(logits, answer(engine, [*ids, first.token_id]))


def test_states_that_are_ahead_are_counted(tmp_path: Path) -> None:
    settings = Settings(cache_folder=tmp_path)
    ahead, plain = (MlxEngine(make_loaded("mamba2"), settings, goes_ahead=each) for each in (True, False))

    assert new_lane(ahead, 50).nbytes == 2 * new_lane(plain, 50).nbytes


def test_lanes_that_nobody_refers_to_go(tmp_path: Path) -> None:
    engine = make_ahead("llama", tmp_path)
    for _ in range(3):
        lane = new_lane(engine, 60)
        engine.sample([engine.evaluate(lane, make_ids(engine, 20))], [GREEDY])
    del lane
    gc.collect()

    assert len(engine._compute._lanes) == 0  # type: ignore[attr-defined]


def test_an_interrupted_step_ahead_leaves_the_lane_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_ahead("qwen3_next", tmp_path)
    ids = make_ids(engine, 30)
    lane = new_lane(engine, 60)
    logits = engine.evaluate(lane, ids)
    inner = engine._compute  # type: ignore[attr-defined]
    build = inner.build_step

    def interrupt(*args: Any) -> None:
        build(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(inner, "build_step", interrupt)
        engine.sample([logits], [GREEDY])

    assert lane.offset == 30
    assert is_close(run(engine, lane, [*ids, *ids], [30]), answer(engine, [*ids, *ids]))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", KINDS)
def test_many_lanes_that_come_and_go_give_the_same_tokens_as_without(name: str, temperature: float, folder: Path) -> None:
    plain = MlxEngine(make_loaded(name), Settings(device="cpu", cache_folder=folder), goes_ahead=False)

    assert generate(make_ahead(name, folder), temperature) == generate(plain, temperature)


def generate(engine: MlxEngine, temperature: float) -> dict[int, list[int]]:
    """Answers of several lanes; at random one ends, another begins, or one is given a token that nobody chose."""
    chance = random.Random(5)
    answers: dict[int, list[int]] = {}
    running: dict[int, tuple[Any, Any]] = {}
    for _ in range(40):
        if len(running) < 3 and chance.random() < 0.6:
            number = len(answers)
            lane = new_lane(engine, 90)
            running[number] = (lane, engine.evaluate(lane, make_ids(engine, chance.randrange(2, 40), seed=number)))
            answers[number] = []
        if running and chance.random() < 0.1:
            running.pop(chance.choice(sorted(running)))
        draws = [Draw(SamplingParams(temperature=temperature), uniform=chance.random()) for _ in running]
        sampled = [each.token_id for each in engine.sample([row for _, row in running.values()], draws)] if running else []
        fed = [7 if chance.random() < 0.1 else token_id for token_id in sampled]
        lanes = [lane for lane, _ in running.values()]
        rows = engine.step(lanes, fed) if lanes else []
        for number, lane, row, token_id in zip(list(running), lanes, rows, sampled, strict=True):
            running[number] = (lane, row)
            answers[number].append(token_id)
    return answers
