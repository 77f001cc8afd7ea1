"""A tree on disk is found again by its fingerprint, so the same model and engine must always give the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.cache.admin.trees import list_trees
from bough.config import Settings
from bough.engines.contract import EngineInfo
from bough.models.files import ModelFiles
from bough.runtime.tiers import open_tiers
from tests.fakes import FakeEngine, full, recurrent, window
from tests.packed_models import has_kernels, load_packed, save_model
from tests.tiny_models import make_model


@pytest.mark.parametrize(
    "info, tree",
    [
        (EngineInfo("torch", "LlamaForCausalLM", "cpu", "bfloat16"), "little-063ceda03ab6"),
        (EngineInfo("mlx", "llama", "gpu", "bfloat16", "weights in 4 bits by 64"), "little-90dc8d2dfae9"),
    ],
)
def test_a_tree_that_an_earlier_version_wrote_is_found(tmp_path: Path, info: EngineInfo, tree: str) -> None:
    engine = FakeEngine((full(0), window(1), recurrent(2)))
    engine.info = info
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    settings = Settings(data_folder=tmp_path, cache_folder=tmp_path, disk=2**30, disk_free=0)

    tiers = open_tiers(engine, ModelFiles("little", folder), settings)

    assert tiers is not None and tiers.disk is not None
    tiers.disk.close()
    assert [found.folder.name for found in list_trees(settings.trees_folder)] == [tree]


@pytest.mark.skipif(not has_kernels(), reason="there are no CPU kernels")
def test_exact_packed_weights_find_the_tree_of_float32_and_quantized_ones_make_their_own(tmp_path: Path) -> None:
    folder = save_model(make_model("llama"), tmp_path / "model")
    settings = Settings(data_folder=tmp_path, cache_folder=tmp_path, disk=2**30, disk_free=0)
    num_trees = []
    for weights in ("float32", "packed", "auto", "q8_0", "q4_0"):
        tiers = open_tiers(load_packed(folder, weights), ModelFiles("little", folder), settings)
        assert tiers is not None and tiers.disk is not None
        tiers.disk.close()
        num_trees.append(len(list_trees(settings.trees_folder)))

    assert num_trees == [1, 1, 1, 2, 3]
