"""The torch engine over a pool: what it says of it, its size, when there is none, and what a closed one leaves."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bough.config import Settings
from bough.engines.torch import TorchEngine
from bough.engines.torch.pooled.long_run import LongRun
from bough.engines.torch.pooled.static_batch import StaticBatch
from bough.errors import EngineError
from tests.contract.driving import answer, is_close, items, keep, make_ids, new_lane
from tests.contract.lagging import make_lagging_transfers
from tests.engines.torch.pooled.parts import GREEDY
from tests.tiny_models import make_model

BUDGET_BYTES = 8 << 20
HOST_BYTES = 1 << 20


def make_engine(name: str, folder: Path, **options: Any) -> TorchEngine:
    torch.set_num_threads(1)
    return TorchEngine(make_model(name), Settings(device="cpu", cache_folder=folder), pools=True, **options)


@pytest.mark.parametrize("graphs", ["auto", "wait", "off"])
def test_a_pool_on_a_cpu_computes_without_graphs_whatever_is_wanted(graphs: str, tmp_path: Path) -> None:
    engine = make_engine("llama", tmp_path, graphs=graphs)
    assert engine.describe()["step"] == "transformers' modules over a pool: not begun"

    engine.limit_device(BUDGET_BYTES)

    assert engine.wait_until_ready(0)
    described = engine.describe()
    assert described["step"] == "transformers' modules over a pool: eager"
    assert described["attention"] == "bough_pool"
    assert (described["state"], described["batching"]) == ("bough's lanes", "together")
    engine.close()


def test_the_pool_is_made_once_of_the_size_that_was_given_before_the_first_lane(tmp_path: Path) -> None:
    engine = make_engine("llama", tmp_path)
    engine.limit_device(BUDGET_BYTES)

    engine.limit_device(100 * BUDGET_BYTES)

    lanes = [engine.make_lane()]
    with pytest.raises(EngineError, match="cannot be promised"):
        while True:
            lanes[-1].reserve(2048)
            lanes.append(engine.make_lane())
    assert BUDGET_BYTES <= sum(lane.nbytes for lane in lanes) < 2 * BUDGET_BYTES


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba2", "the model has no rows of attention"),
        ("gemma3n_text", "Gemma3nTextAttention of layer 4 has no rows of its own"),
    ],
)
def test_a_model_that_does_not_pool_tells_why_and_still_answers(name: str, reason: str, tmp_path: Path) -> None:
    engine = make_engine(name, tmp_path)
    engine.limit_device(BUDGET_BYTES)
    ids = make_ids(engine, 20)

    assert engine.describe()["step"] == f"transformers' modules in torch; no pool, because {reason}"
    with torch.inference_mode():
        expected = make_model(name)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    assert is_close(answer(engine, ids), expected)


def test_an_engine_on_a_cpu_does_not_try_a_pool_unless_told_so(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    engine = TorchEngine(make_model("llama"), Settings(device="cpu", cache_folder=tmp_path))

    assert engine.describe()["step"] == "transformers' modules in torch"


@pytest.mark.parametrize("wrong", [LongRun, StaticBatch])
def test_the_self_check_notices_that_runs_of_either_kind_are_wrong(wrong: type, tmp_path: Path) -> None:
    def attend(self: Any, group: int, query: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros_like(query.transpose(1, 2))

    with patch.object(wrong, "attend", attend):
        engine = make_engine("llama", tmp_path)

    assert "no pool, because" in engine.describe()["step"]


def test_an_error_of_the_step_ahead_is_raised_by_the_step_as_the_engines(tmp_path: Path) -> None:
    model, ids = make_model("llama"), list(range(3, 13))
    engine = TorchEngine(model, Settings(device="cpu", cache_folder=tmp_path), pools=True)
    engine.limit_device(BUDGET_BYTES)
    lane = new_lane(engine, 20)
    row = engine.evaluate(lane, ids)

    with patch.object(model.lm_head, "forward", side_effect=RuntimeError("made to fail")):
        (sampled,) = engine.sample([row], [GREEDY])
        with pytest.raises(EngineError, match="made to fail"):
            engine.step([lane], [sampled.token_id])

    assert sampled.token_id == int(row.argmax())
    (row,) = engine.step([lane], [sampled.token_id])
    assert is_close(row, answer(engine, [*ids, sampled.token_id]))


def test_the_limit_of_host_memory_holds_for_a_pool_that_is_made_later(tmp_path: Path) -> None:
    with patch("bough.engines.torch.lanes.pages.make_transfers", make_lagging_transfers):
        engine = make_engine("llama", tmp_path)
        engine.limit_host(HOST_BYTES)
        engine.limit_device(BUDGET_BYTES)
    lane = new_lane(engine, 1500)
    engine.evaluate(lane, make_ids(engine, 1500))

    with pytest.raises(EngineError, match=f"of {HOST_BYTES:,}"):
        for item in items(keep(engine, lane)):
            engine.to_host(item)

    assert engine.host_bytes() <= HOST_BYTES


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_closed_engine_leaves_no_pool_behind_whoever_still_knows_the_model_or_a_lane(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    engine = TorchEngine(model, Settings(device="cpu", cache_folder=tmp_path), pools=True)
    engine.limit_device(BUDGET_BYTES)
    lane = new_lane(engine, 20)
    engine.sample([engine.evaluate(lane, make_ids(engine, 10))], [GREEDY])
    assert engine._pool is not None
    storage = weakref.ref(engine._pool.memory._flat.untyped_storage())

    engine.close()

    assert storage() is None, "the memory of a closed engine's pool is still taken"
    assert not any(buffer.endswith("bough_rows") for buffer, _ in model.named_buffers())
