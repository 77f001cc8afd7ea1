"""What the MLX engine does beyond the contract: memory, threads, errors, models without groups."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from bough.cache.tree.state import GroupSource, Kind
from bough.config import Settings
from bough.engines.mlx import MlxEngine
from bough.engines.mlx.forward import Head, MlxForward
from bough.engines.mlx.library import cache
from bough.errors import EngineError, SettingsError
from bough.system.resources import HostMemory
from bough.types import Draw, SamplingParams
from tests.contract.driving import answer, give_back, is_close, items, keep, make_ids, new_lane, run
from tests.tiny_mlx_models import DEVICE, make_loaded
from tests.tiny_models import make_folder

ROUNDING = 0 if DEVICE == "cpu" else 16_384  # bytes that a GPU may take more for an array
KINDS = ["llama", "gemma3_text", "qwen3_next", "falcon_h1", "mamba2"]
SOME_KINDS = [
    name if name in ("gemma3_text", "qwen3_next") else pytest.param(name, marks=pytest.mark.slow) for name in KINDS
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where verdicts are kept: each kind of model is checked once."""
    return tmp_path_factory.mktemp("verdicts")


def make_engine(name: str, folder: Path, **settings: Any) -> MlxEngine:
    return MlxEngine(make_loaded(name), Settings(device="cpu", cache_folder=folder, **settings))


def active_bytes() -> int:
    """What MLX holds, once nothing is left that could go."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return int(mx.get_active_memory())


def in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns, or raises, in a thread of its own that has ended."""
    found: list[Any] = []

    def run_it() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run_it)
    thread.start()
    thread.join()
    result, error = found[0]
    if error is not None:
        raise error
    return result


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("made to fail in mid-forward")


def break_layer(engine: MlxEngine, patch: pytest.MonkeyPatch) -> None:
    """Let the model fail after its first layers have taken the tokens in."""
    patch.setattr(type(engine._forward.model.layers[-1]), "__call__", fail)


# Memory


@pytest.mark.parametrize("name", SOME_KINDS)
def test_after_200_captures_and_restores_memory_is_back_to_where_it_was(name: str, folder: Path) -> None:
    engine = make_engine(name, folder)
    ids = make_ids(engine, 300)
    answer(engine, ids)  # what the model makes once is made
    before = active_bytes()
    lane = new_lane(engine, 300)
    run(engine, lane, ids, [270])
    for _ in range(200):
        kept = keep(engine, lane)
        lane.clear()
        lane.reserve(300)
        lane.adopt(270, kept)
        run(engine, lane, ids, [1])
        lane.adopt(270, kept)
        give_back(engine, kept)

    lane.clear()
    del kept

    assert engine.held_bytes == 0
    assert active_bytes() - before <= 1024 + ROUNDING


@pytest.mark.parametrize("name", SOME_KINDS)
def test_pages_and_states_hold_their_own_bytes_and_nothing_larger(name: str, folder: Path) -> None:
    engine = make_engine(name, folder)
    lane = new_lane(engine, 300)
    run(engine, lane, make_ids(engine, 300), [300])
    before = active_bytes()
    kept = keep(engine, lane)
    alone = active_bytes() - before
    lane.clear()
    after = active_bytes()

    give_back(engine, kept)

    num_bytes, rounding = sum(item.nbytes for item in items(kept)), ROUNDING * len(items(kept))
    assert alone <= num_bytes + 1024 * len(items(kept)) + rounding
    assert abs(after - active_bytes() - num_bytes) <= rounding


def test_weights_in_another_form_than_the_file_has_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"weights is 'q8_0', and MLX keeps them"):
        MlxEngine.load(make_folder("llama", tmp_path), Settings(device="cpu", weights="q8_0"))


def test_pieces_of_a_cut_page_do_not_keep_the_whole_alive(folder: Path) -> None:
    engine = make_engine("llama", folder)
    lane = new_lane(engine, 256)
    run(engine, lane, make_ids(engine, 256), [256])
    left, right = engine.cut(lane.publish(engine.groups[0], 0, 256), 250)
    lane.clear()
    before = active_bytes()

    engine.release(left)

    assert abs(before - active_bytes() - left.nbytes) <= ROUNDING
    engine.release(right)


@pytest.mark.parametrize("name", KINDS)
def test_a_lane_takes_the_memory_that_it_tells(name: str, folder: Path) -> None:
    engine = make_engine(name, folder)
    ids = make_ids(engine, 600)
    answer(engine, ids[:50])
    before = active_bytes()

    lane = new_lane(engine, 600)
    run(engine, lane, ids, [512, 88])

    told = lane.nbytes
    assert abs(active_bytes() - before - told) <= max(16_384, told // 50) + 40 * ROUNDING


def test_a_step_writes_into_the_memory_that_is_there(folder: Path) -> None:
    engine = make_engine("llama", folder, context=2048)
    lane = new_lane(engine, 2000)
    run(engine, lane, make_ids(engine, 50), [50])
    active_bytes()
    mx.reset_peak_memory()
    before = mx.get_active_memory()

    for _ in range(20):
        engine.step([lane], [7])
    mx.synchronize()

    assert mx.get_peak_memory() - before < lane.nbytes // 4


def test_it_tells_what_it_holds_and_held_at_most(folder: Path) -> None:
    assert "MiB in use" in make_engine("llama", folder).describe()["memory"]


# Threads


@pytest.mark.parametrize("name", KINDS)
def test_each_call_may_come_from_another_thread(name: str, folder: Path) -> None:
    engine = in_thread(lambda: make_engine(name, folder))
    ids = make_ids(engine, 80)
    lane, other = in_thread(lambda: (new_lane(engine, 80), new_lane(engine, 80)))
    in_thread(lambda: run(engine, lane, ids, [40]))
    kept = in_thread(lambda: keep(engine, lane))
    packed = in_thread(lambda: [bytes(engine.pack(item) or b"") for item in items(kept)])
    in_thread(lambda: run(engine, lane, ids, [30]))
    in_thread(lambda: other.adopt(40, kept))
    in_thread(lambda: run(engine, other, ids, [30]))
    logits = in_thread(lambda: engine.step([lane, other], [ids[70], ids[70]]))
    chosen = in_thread(lambda: engine.sample(logits, [Draw(SamplingParams()), Draw(SamplingParams(temperature=1.0))]))

    assert all(is_close(each, answer(engine, ids[:71])) for each in logits)
    assert chosen[0].token_id == int(mx.argmax(logits[0]).item())
    assert packed == [bytes(engine.pack(item) or b"") for item in items(kept)]
    give_back(engine, kept)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_another_thread_may_go_on_after_a_run_that_failed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(name, folder)
    ids = make_ids(engine, 80)
    lane = new_lane(engine, 80)
    run(engine, lane, ids, [50])
    with monkeypatch.context() as patch:
        break_layer(engine, patch)
        with pytest.raises(EngineError, match="made to fail"):
            in_thread(lambda: engine.evaluate(lane, ids[50:60]))

    assert lane.offset == 50
    assert is_close(in_thread(lambda: run(engine, lane, ids, [30])), answer(engine, ids))


# Errors


def test_a_failed_step_of_many_lanes_leaves_them_where_they_were(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("falcon_h1", folder)
    ids = make_ids(engine, 30)
    lanes = [new_lane(engine, 30) for _ in range(3)]
    for lane in lanes:
        run(engine, lane, ids, [20])
    with monkeypatch.context() as patch:
        break_layer(engine, patch)
        with pytest.raises(EngineError, match="made to fail"):
            engine.step(lanes, [5, 6, 7])

    assert [lane.offset for lane in lanes] == [20, 20, 20]
    logits = engine.step(lanes, [ids[20]] * 3)
    assert all(is_close(each, answer(engine, ids[:21])) for each in logits)


@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_a_lane_whose_run_fails_on_the_device_holds_nothing_until_it_begins_anew(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(name, folder)
    ids = make_ids(engine, 80)
    lane = new_lane(engine, 80)
    run(engine, lane, ids, [40])
    kept = keep(engine, lane)
    with monkeypatch.context() as patch:
        patch.setattr("bough.engines.mlx.compute.mx.eval", fail)
        with pytest.raises(EngineError, match="made to fail"):
            engine.evaluate(lane, ids[40:50])

    assert (lane.offset, lane.nbytes) == (0, 0)
    with pytest.raises(EngineError, match="holds nothing any more"):
        lane.adopt(40, {group: GroupSource(live=40) for group in engine.groups})
    in_thread(lambda: lane.adopt(40, kept))
    assert is_close(in_thread(lambda: run(engine, lane, ids, [40])), answer(engine, ids))
    give_back(engine, kept)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's own errors come from MLX")
def test_memory_that_the_machine_does_not_have_is_an_error_and_not_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("llama", folder)
    ids = make_ids(engine, 80)
    lane = new_lane(engine, 80)
    run(engine, lane, ids, [50])
    with monkeypatch.context() as patch, pytest.raises(EngineError, match="bytes more, and the machine has 1,000 left"):
        patch.setattr("bough.engines.mlx.device.read_host_memory", lambda: HostMemory(1000, 1000))
        lane.reserve(1500)

    assert is_close(run(engine, lane, ids, [30]), answer(engine, ids))


def test_a_step_one_by_one_that_fails_moves_no_lane(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("qwen3_next", folder)
    ids = make_ids(engine, 60)
    first, second = new_lane(engine, 60), new_lane(engine, 60)
    run(engine, first, ids, [30])
    with monkeypatch.context() as patch:
        calls = iter([True, False])
        build = type(engine._forward).last_logits
        patch.setattr(type(engine._forward), "last_logits", lambda *args: build(*args) if next(calls) else fail())
        with pytest.raises(EngineError, match="made to fail"):
            engine.step([first, second], [ids[30], ids[0]])  # one of them has not begun: one by one

    assert [first.offset, second.offset] == [30, 0]
    logits = in_thread(lambda: engine.step([first, second], [ids[30], ids[0]]))
    assert is_close(logits[0], answer(engine, ids[:31])) and is_close(logits[1], answer(engine, ids[:1]))


def test_an_adoption_that_fails_half_way_leaves_nothing_behind(folder: Path) -> None:
    engine = make_engine("falcon_h1", folder)
    ids = make_ids(engine, 60)
    lane, other = new_lane(engine, 60), new_lane(engine, 60)
    run(engine, lane, ids, [40])
    kept = keep(engine, lane)
    gone = {group: replace(source, state=other_state(engine, lane, source)) for group, source in kept.items()}

    with pytest.raises(EngineError):
        other.adopt(40, gone)

    in_thread(lambda: other.adopt(0, {group: GroupSource() for group in engine.groups}))
    assert is_close(in_thread(lambda: run(engine, other, ids, [60])), answer(engine, ids))
    give_back(engine, kept)


def other_state(engine: MlxEngine, lane: Any, source: GroupSource) -> Any:
    """A state that was released already, in the place of one."""
    if source.state is None:
        return None
    state = lane.capture(source.state.group)
    engine.release(state)
    return state


def test_an_engine_may_be_closed_twice(folder: Path) -> None:
    engine = MlxEngine(make_loaded("llama"), Settings(device="cpu", cache_folder=folder))

    engine.close()
    engine.close()


def test_the_context_can_be_set_lower_but_not_higher_than_the_model_allows(folder: Path) -> None:
    assert make_engine("llama", folder, context=500).context_tokens == 500
    with pytest.raises(SettingsError, match="5000, and the model holds 2048"):
        make_engine("llama", folder, context=5000)


def test_loading_a_folder_tells_what_is_going_on(tmp_path: Path) -> None:
    said: list[str] = []
    settings = Settings(device="cpu", cache_folder=tmp_path / "cache")

    engine = MlxEngine.load(make_folder("llama", tmp_path / "model"), settings, said.append)

    assert said == ["reading weights", "checking what this model can do"]
    described = engine.describe()
    assert {name: described[name] for name in ("engine", "model", "device", "dtype", "batching")} == {
        "engine": "mlx",
        "model": "llama",
        "device": "cpu",
        "dtype": "float32",
        "batching": "together",
    }
    assert (engine.vocab_size, engine.context_tokens) == (97, 2048)
    assert engine.default_budget_bytes() > 0
    engine.close()


# What the model is asked for


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_only_the_last_position_goes_through_the_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = MlxForward(make_loaded(name))
    ids = list(range(3, 43))
    lengths: list[int] = []
    cut = Head.cut
    monkeypatch.setattr(
        Head, "cut", lambda self, hidden: (lengths.append(cut(self, hidden).shape[1]), cut(self, hidden))[1]
    )

    last = forward.last_logits(mx.array([ids]), forward.make_cache())[0]

    assert is_close(last, forward.all_logits(ids)[-1])
    assert lengths == [1, 40]


def test_accumulators_stay_in_float32(tmp_path: Path) -> None:
    loaded = make_loaded("mamba2")
    half = MlxEngine(replace(loaded, model=_in_half(loaded)), Settings(device="cpu", cache_folder=tmp_path))

    types = [part.dtype for state in half._layout.states.values() for part in state.parts]  # type: ignore[attr-defined]

    assert mx.float32 in types and mx.bfloat16 in types


def _in_half(loaded: Any) -> Any:
    model_class, args_class = type(loaded.model), type(loaded.model.args)
    model = model_class(args_class.from_dict(loaded.config))
    model.update(loaded.model.parameters())
    model.set_dtype(mx.bfloat16)
    mx.eval(model.state)
    return model


class OddCache(cache.KVCache):  # type: ignore[misc]
    """A cache that may behave in any way."""


def test_a_model_with_a_cache_of_an_unknown_kind_runs_without_reuse_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(make_loaded("llama").model), "make_cache", lambda self: [OddCache() for _ in self.layers], raising=False
    )
    engine = make_engine("llama", tmp_path)
    ids = make_ids(engine, 40)
    lane = new_lane(engine, 40)
    run(engine, lane, ids[::-1], [40])

    assert engine.groups == () and not engine.capabilities.can_reuse
    assert "OddCache" in engine.capabilities.reason
    assert engine.describe()["state"] == "the model's own cache"
    assert lane.bytes_for(50) >= lane.nbytes > 0
    with pytest.raises(AssertionError):
        lane.adopt(20, {})
    lane.adopt(0, {})
    assert (lane.offset, lane.nbytes) == (0, 0)
    assert is_close(run(engine, lane, ids, [37, 1, 1, 1]), answer(engine, ids))


def test_a_window_buffer_is_as_long_as_the_window_and_one_chunk(folder: Path) -> None:
    engine = make_engine("gemma3_text", folder, chunk=200)
    window = next(group for group in engine.groups if group.kind is Kind.WINDOW)
    ids = make_ids(engine, 900)
    lane = new_lane(engine, 900)

    logits = run(engine, lane, ids, [200] * 4 + [100])

    assert lane.rows_of(window).capacity == 256  # type: ignore[attr-defined]
    assert is_close(logits, answer(engine, ids))
