"""Rotary embeddings that depend on the longest position of a batch: a lane beyond the limit does not disturb others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config

from bough.config import Settings
from bough.engines.torch import TorchEngine
from tests.contract.driving import answer, is_close, make_ids, new_lane
from tests.engines.torch.pooled.parts import GREEDY
from tests.tiny_models import SEED

BUDGET_BYTES = 16 << 20
LIMIT = 64  # tokens; beyond it all of a batch is computed with other angles


def make_engine(folder: Path, *, pools: bool) -> TorchEngine:
    torch.set_num_threads(1)
    engine = TorchEngine(make_longrope(), Settings(device="cpu", cache_folder=folder), pools=pools)
    engine.limit_device(BUDGET_BYTES)
    assert ("over a pool" in engine.describe()["step"]) == pools
    return engine


def make_longrope() -> Any:
    config = Phi3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=2048,
        original_max_position_embeddings=LIMIT,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": LIMIT,
        },
    )
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("pools", [False, True])
def test_lanes_on_both_sides_of_the_limit_are_stepped_at_once(pools: bool, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, pools=pools)
    prompts = [make_ids(engine, length, seed=length) for length in (20, 80, 30, 90)]
    lanes = [new_lane(engine, 100) for _ in prompts]
    logits = [engine.evaluate(lane, ids) for lane, ids in zip(lanes, prompts, strict=True)]
    engine.sample(logits, [GREEDY] * len(lanes))

    rows = engine.step(lanes, [7] * len(lanes))

    for row, ids in zip(rows, prompts, strict=True):
        assert is_close(row, answer(engine, [*ids, 7]))
