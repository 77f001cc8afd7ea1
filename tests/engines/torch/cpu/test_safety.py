"""What must not crash, hang or corrupt memory, though the kernels themselves check nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from bough.config import Settings
from bough.engines.torch import TorchEngine
from bough.engines.torch.cpu.library import load_kernels
from bough.engines.torch.cpu.matrix import Matrix
from bough.engines.torch.cpu.weight import PackedWeight, Products
from bough.errors import KernelsMissing
from tests.tiny_models import CONFIGS, make_folder

IDS = [7, 3, 9, 12, 5, 30, 8, 2]


@pytest.fixture
def weight() -> PackedWeight:
    try:
        products = Products(load_kernels(), num_threads=3)
    except KernelsMissing as missing:
        pytest.skip(str(missing))
    values = torch.arange(64 * 32, dtype=torch.float32).view(64, 32) / 100
    return PackedWeight(Matrix.of_tensor(values), (64, 32), products)


@pytest.fixture
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def test_a_forked_child_multiplies_with_threads_of_its_own(weight):
    x = torch.ones(1, 32)
    expected = weight.linear(x, None)
    for _ in range(3):
        child = os.fork()
        if not child:
            signal.alarm(20)  # ends a child that hangs
            right = all(torch.equal(weight.linear(x, None), expected) for _ in range(20))
            os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_an_input_of_another_width_is_torchs_error(weight):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        F.linear(torch.ones(3, 64), weight)


def test_a_bias_that_is_broadcast_is_added_to_every_row(weight):
    x = torch.ones(2, 32)

    assert torch.allclose(F.linear(x, weight, torch.ones(1)), weight.linear(x, None) + 1)


def test_operators_see_the_unpacked_weight(weight):
    whole = weight.unpack()

    assert torch.equal(weight * 2, whole * 2)
    assert torch.equal(1 - weight, 1 - whole)
    assert torch.equal(-weight, -whole)
    assert len(weight) == 64


def test_experts_are_counted_from_the_end_and_end(weight):
    experts = PackedWeight(weight.matrix, (4, 16, 32), weight._products)

    assert torch.equal(experts[-1].unpack(), weight.unpack()[48:])
    assert len(list(experts)) == 4


def test_a_weight_without_rows_is_unpacked_to_nothing(weight):
    assert weight._products.unpack(weight.matrix.slice(0, 0)).shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logits_do_not_depend_on_torchs_default_type(dtype, tmp_path, default_dtype):
    engine = TorchEngine.load(make_folder("llama", tmp_path), Settings(cache_folder=tmp_path, device="cpu"))
    before = engine.evaluate(_lane(engine), IDS)

    torch.set_default_dtype(dtype)

    assert torch.equal(engine.evaluate(_lane(engine), IDS), before)


@pytest.mark.parametrize("name", ["olmo", "arcee"])
def test_a_model_that_the_kernels_do_not_know_runs_by_its_modules(name, tmp_path):
    """OLMo's norms have no weights, so all of its are packed; Arcee's MLP has no gate."""
    config = AutoConfig.for_model(name, **CONFIGS["llama"])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    settings = Settings(cache_folder=tmp_path, device="cpu")

    packed = TorchEngine.load(tmp_path, settings)
    plain = TorchEngine.load(tmp_path, replace(settings, weights="float32"))

    difference = packed.evaluate(_lane(packed), IDS) - plain.evaluate(_lane(plain), IDS)
    assert difference.abs().max() < 1e-4


def test_a_scale_that_begins_far_from_the_start_is_noticed(tmp_path):
    rotation = {"rope_type": "default", "rope_theta": 1e6, "llama_4_scaling_beta": 0.1}
    rotation["original_max_position_embeddings"] = 65_536
    sizes = CONFIGS["llama"] | {"max_position_embeddings": 262_144, "head_dim": 16, "initializer_range": 0.2}
    config = AutoConfig.for_model("ministral3", **sizes, rope_parameters=rotation)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    engine = TorchEngine.load(tmp_path, Settings(cache_folder=tmp_path, device="cpu"))

    assert "near the end of the context" in engine.describe()["step"]


def _lane(engine: TorchEngine):
    lane = engine.make_lane()
    lane.reserve(len(IDS))
    return lane
