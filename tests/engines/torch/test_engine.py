"""What the torch engine does beyond the contract: errors, buffers, descriptions, models without groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bough.cache.tree.state import GroupSource, Kind
from bough.config import Settings
from bough.engines.torch import TorchEngine
from bough.errors import EngineError, SettingsError
from bough.types import Draw, SamplingParams
from tests.contract.driving import answer, give_back, is_close, keep, make_ids, new_lane, run
from tests.tiny_models import make_folder, make_model

NO_TOKEN = 10_000


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_engine(name: str, folder: Path, dtype: torch.dtype = torch.float32, **settings: int) -> TorchEngine:
    return TorchEngine(make_model(name).to(dtype), Settings(device="cpu", cache_folder=folder, **settings))  # type: ignore[arg-type]


def test_loading_a_folder_tells_what_is_going_on(tmp_path: Path) -> None:
    said: list[str] = []
    settings = Settings(device="cpu", threads=1, cache_folder=tmp_path / "cache")

    engine = TorchEngine.load(make_folder("llama", tmp_path / "model"), settings, said.append)

    assert said == ["reading weights", "checking what this model can do"]
    described = engine.describe()
    assert {name: described[name] for name in ("engine", "device", "dtype", "attention", "threads")} == {
        "engine": "torch",
        "device": "cpu",
        "dtype": "float32",
        "attention": "bough",
        "threads": "1",
    }
    assert engine.vocab_size == 97
    assert engine.context_tokens == 2048
    assert engine.default_budget_bytes() > 0
    engine.close()


def test_the_context_can_be_set_lower_but_not_higher_than_the_model_allows(tmp_path: Path) -> None:
    assert make_engine("llama", tmp_path, context=500).context_tokens == 500
    with pytest.raises(SettingsError, match="5000, and the model holds 2048"):
        make_engine("llama", tmp_path, context=5000)


def test_sampling_takes_the_logits_as_they_are(tmp_path: Path) -> None:
    engine = make_engine("llama", tmp_path)
    logits = answer(engine, make_ids(engine, 10))

    (sampled,) = engine.sample([logits], [Draw(SamplingParams())])

    assert sampled.token_id == int(logits.argmax())


def test_logits_keep_no_other_positions_alive(tmp_path: Path) -> None:
    engine = make_engine("mamba2", tmp_path)

    logits = answer(engine, make_ids(engine, 50))

    assert logits.untyped_storage().nbytes() == logits.nbytes == 4 * engine.vocab_size


def test_a_failed_run_leaves_a_lane_of_rows_where_it_was(tmp_path: Path) -> None:
    engine = make_engine("gemma3_text", tmp_path)
    ids = make_ids(engine, 80)
    lane = new_lane(engine, 80)
    run(engine, lane, ids, [50])

    with pytest.raises(EngineError, match="IndexError"):
        engine.evaluate(lane, [5, NO_TOKEN])

    assert lane.offset == 50
    assert is_close(run(engine, lane, ids, [30]), answer(engine, ids))


def test_a_failed_run_damages_a_recurrent_state_until_it_is_replaced(tmp_path: Path) -> None:
    engine = make_engine("qwen3_next", tmp_path)
    ids = make_ids(engine, 80)
    lane = new_lane(engine, 80)
    run(engine, lane, ids, [50])
    kept = keep(engine, lane)
    with pytest.raises(EngineError):
        engine.evaluate(lane, [NO_TOKEN])

    for group in engine.groups:
        if group.kind is Kind.RECURRENT:
            with pytest.raises(AssertionError):
                lane.capture(group)
    with pytest.raises(AssertionError):
        engine.evaluate(lane, ids[50:])

    lane.adopt(50, kept)
    assert is_close(run(engine, lane, ids, [30]), answer(engine, ids))
    give_back(engine, kept)


def test_a_failed_step_of_many_lanes_is_an_engine_error(tmp_path: Path) -> None:
    engine = make_engine("llama", tmp_path)
    lanes = [new_lane(engine, 20) for _ in range(2)]
    for lane in lanes:
        run(engine, lane, make_ids(engine, 10), [10])

    with pytest.raises(EngineError):
        engine.step(lanes, [5, NO_TOKEN])

    assert [lane.offset for lane in lanes] == [10, 10]


def test_half_precision_rows_pack_bit_by_bit(tmp_path: Path) -> None:
    engine = make_engine("qwen3_next", tmp_path, torch.bfloat16)
    lane = new_lane(engine, 60)
    run(engine, lane, make_ids(engine, 60), [60])
    kept = keep(engine, lane)

    for group, source in kept.items():
        for page in source.pages:
            assert page.rows.dtype == torch.bfloat16
            copy = engine.unpack_page(group, page.start, page.end, engine.pack(page))
            assert torch.equal(copy.rows, page.rows)
            engine.release(copy)
    give_back(engine, kept)


def test_accumulators_stay_in_float32(tmp_path: Path) -> None:
    single, half = make_engine("mamba2", tmp_path), make_engine("mamba2", tmp_path, torch.bfloat16)

    sizes = [part.dtype for state in half._layout.states.values() for part in state.parts]

    assert torch.float32 in sizes
    assert half.groups[0].state_bytes > single.groups[0].state_bytes // 2


def test_a_buffer_grows_by_half_and_never_beyond_the_context(tmp_path: Path) -> None:
    engine = make_engine("llama", tmp_path, context=2000)
    (group,) = engine.groups
    lane = new_lane(engine, 1000)
    assert lane.nbytes == 1024 * group.bytes_per_token
    run(engine, lane, make_ids(engine, 10), [10])

    lane.reserve(1025)
    assert lane.nbytes == 1536 * group.bytes_per_token
    lane.reserve(1600)
    assert lane.nbytes == 2000 * group.bytes_per_token


def test_a_window_buffer_is_as_long_as_the_window_and_one_chunk(tmp_path: Path) -> None:
    engine = make_engine("mistral", tmp_path, chunk=200)
    (group,) = engine.groups
    ids = make_ids(engine, 1500)
    lane = new_lane(engine, 1500)
    assert lane.nbytes == 256 * group.bytes_per_token

    logits = run(engine, lane, ids, [200] * 7 + [100])

    assert lane.nbytes == 256 * group.bytes_per_token
    assert is_close(logits, answer(engine, ids))


def test_a_run_longer_than_a_chunk_makes_a_window_buffer_grow_by_that_run(tmp_path: Path) -> None:
    engine = make_engine("mistral", tmp_path, chunk=100)
    (group,) = engine.groups
    ids = make_ids(engine, 1500)
    lane = new_lane(engine, 1500)
    run(engine, lane, ids, [100] * 5)

    logits = run(engine, lane, ids, [1000])

    assert lane.first_row(group) <= group.first_needed(500)
    assert lane.nbytes == 1024 * group.bytes_per_token
    assert is_close(logits, answer(engine, ids))


def test_a_released_page_cannot_be_released_again(tmp_path: Path) -> None:
    engine = make_engine("llama", tmp_path)
    lane = new_lane(engine, 10)
    run(engine, lane, make_ids(engine, 10), [10])
    page = lane.publish(engine.groups[0], 0, 10)
    engine.release(page)

    with pytest.raises(AssertionError):
        engine.release(page)


@pytest.mark.parametrize("name", ["minimax", "recurrent_gemma"])
def test_a_model_without_groups_starts_anew_and_nothing_else(name: str, tmp_path: Path) -> None:
    engine = make_engine(name, tmp_path)
    ids = make_ids(engine, 40)
    lane = new_lane(engine, 40)
    run(engine, lane, ids[::-1], [40])
    assert engine.groups == ()
    assert lane.bytes_for(50) >= lane.nbytes

    with pytest.raises(AssertionError):
        lane.adopt(20, {})
    lane.adopt(0, {})

    assert (lane.offset, lane.nbytes) == (0, 0)
    assert is_close(run(engine, lane, ids, [37, 1, 1, 1]), answer(engine, ids))


def test_a_lane_of_full_attention_goes_back_without_any_page(tmp_path: Path) -> None:
    engine = make_engine("llama", tmp_path)
    ids = make_ids(engine, 60)
    lane = new_lane(engine, 60)
    run(engine, lane, ids, [50])
    lane.adopt(30, {group: GroupSource(live=30) for group in engine.groups})

    assert is_close(run(engine, lane, ids, [30]), answer(engine, ids))
