"""Sixteen lanes through the real scheduler on a torch engine: no wrong token, no page that leaks."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bough.cache.tree.state import PAGE_TOKENS, Lane
from bough.config import Settings
from bough.engines.torch import TorchEngine
from tests.contract import large_parity
from tests.contract.lagging import make_lagging_transfers
from tests.contract.large_parity import LARGE, Stock, require_ready
from tests.scenarios.model_world import ARCHITECTURES
from tests.scenarios.scheduler_walk import SchedulerWalk, WalkSizes
from tests.tiny_models import make_model

ON_CUDA = WalkSizes(
    requests=250,
    system_tokens=300,
    message_tokens=120,
    answer_tokens=40,
    chat_tokens=1200,
    device_rows=32_000,
    host_rows=12_000,
    chunk=512,
    page_tokens=PAGE_TOKENS,
)


ON_POOL = {  # the lanes alone need 16 slots of full attention, and of a window 48
    "llama": WalkSizes(device_rows=24 * PAGE_TOKENS),
    "gemma3_text": WalkSizes(device_rows=46 * PAGE_TOKENS),
    "qwen3_next": WalkSizes(device_rows=24 * PAGE_TOKENS),
}


def tiny_walk(name: str, folder: Path, seed: int, sizes: WalkSizes, *, pools: bool = False) -> SchedulerWalk:
    torch.set_num_threads(1)
    model = make_model(name, **ARCHITECTURES[name])
    with patch("bough.engines.torch.lanes.pages.make_transfers", make_lagging_transfers):  # so that there is a host tier
        engine = TorchEngine(model, Settings(cache_folder=folder, chunk=16), pools=pools)
        return SchedulerWalk(engine, Stock(model), sizes, seed)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next"])
def test_a_walk_with_sixteen_lanes_gives_every_token_as_without_a_cache(name: str, tmp_path: Path) -> None:
    counts = tiny_walk(name, tmp_path, seed=1, sizes=WalkSizes()).play()

    assert counts.ended >= 25 and counts.cancelled >= 1 and counts.tokens >= 100
    assert counts.cached_tokens > 200 and counts.host_bytes > 0 and counts.evicted_tokens > 0
    assert counts.most_running > 8


@pytest.mark.parametrize("name", ON_POOL)
def test_a_walk_on_a_pool_one_step_ahead_gives_every_token_as_without_a_cache(name: str, tmp_path: Path) -> None:
    counts = tiny_walk(name, tmp_path, seed=4, sizes=ON_POOL[name], pools=True).play()

    assert counts.ended >= 25 and counts.cancelled >= 1 and counts.tokens >= 100
    assert counts.cached_tokens > 200 and counts.host_bytes > 0 and counts.evicted_tokens > 0
    assert counts.most_running > 8


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ON_POOL)
def test_long_walks_on_a_pool(name: str, seed: int, tmp_path: Path) -> None:
    tiny_walk(name, tmp_path, seed, replace(ON_POOL[name], requests=200), pools=True).play()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_long_walks_with_sixteen_lanes(name: str, seed: int, tmp_path: Path) -> None:
    tiny_walk(name, tmp_path, seed, replace(WalkSizes(), requests=200)).play()


def test_a_row_that_is_lost_on_its_way_through_the_tree_is_found(tmp_path: Path) -> None:
    walk = tiny_walk("llama", tmp_path, seed=1, sizes=WalkSizes())
    lane_type: Any = type(walk.engine.make_lane())
    adopt = lane_type.adopt

    def adopt_with_a_wrong_page(lane: Lane, offset: int, sources: Any) -> None:
        for source in sources.values():
            for page in source.pages[1:2]:
                if isinstance(page.rows, torch.Tensor):
                    page.rows.zero_()
        adopt(lane, offset, sources)

    with patch.object(lane_type, "adopt", adopt_with_a_wrong_page), pytest.raises(AssertionError, match="wrong"):
        walk.play()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("graphs", ["off", "wait"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_walk_with_sixteen_lanes_on_cuda(name: str, graphs: str, tmp_path: Path) -> None:
    model = large_parity.make_model(name, LARGE, "cuda", torch.bfloat16)
    stock = Stock(model)
    with closing(TorchEngine(model, Settings(cache_folder=tmp_path), graphs=graphs)) as engine:
        require_ready(engine)
        counts = SchedulerWalk(engine, stock, ON_CUDA, seed=1).play()

    assert counts.ended >= 200 and counts.tokens >= 3000 and counts.most_running >= 12
    assert counts.cached_tokens > 0 and counts.host_bytes > 0 and counts.evicted_tokens > 0 and counts.cancelled > 0
