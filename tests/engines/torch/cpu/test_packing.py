"""Which weights stay packed, what the setting `weights` leads to, and what the engine says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from bough.config import Settings
from bough.engines.torch import TorchEngine, model_loader
from bough.engines.torch.cpu import library, route
from bough.engines.torch.cpu.packing import Packing, packed_weights
from bough.engines.torch.cpu.weight import PackedWeight, Products
from bough.engines.torch.model_loader import load_model
from bough.errors import KernelsMissing, SettingsError
from tests.contract.driving import answer, make_ids, new_lane, run
from tests.packed_models import differs_by, load_packed, make_reference, make_settings, make_wide_model, save_model

pytestmark = pytest.mark.usefixtures("kernels", "one_thread")

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "num_hidden_layers": 1}
SMALL = {"num_hidden_layers": 2}


def save(folder: Path, model_type: str = "llama", dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    return save_model(make_wide_model(model_type, **SMALL | config), folder / "model", dtype)


def load_weights(folder: Path, weights: str = "auto") -> Any:
    return load_model(folder, make_settings(folder, weights)).model


def types_of(model: Any) -> dict[str, str]:
    """The ggml type of each packed weight, by its name."""
    return {
        f"{prefix}.{name}": each.matrix.type
        for prefix, module in model.named_modules()
        for name, each in vars(module).items()
        if isinstance(each, PackedWeight)
    }


def test_linear_layers_and_embeddings_are_packed_and_norms_and_biases_are_not(tmp_path: Path) -> None:
    model = load_weights(save(tmp_path, "qwen2", num_hidden_layers=1))

    layer = "model.layers.0"
    projections = [f"{layer}.self_attn.{each}_proj.weight" for each in "qkvo"]
    mlp = [f"{layer}.mlp.{each}_proj.weight" for each in ("gate", "up", "down")]
    assert types_of(model) == dict.fromkeys(["model.embed_tokens.weight", *projections, *mlp, "lm_head.weight"], "BF16")
    assert {name.rpartition(".")[2] for name, _ in model.named_parameters()} == {"bias", "weight"}
    assert {each.dtype for each in model.parameters()} == {torch.float32}


def test_the_experts_of_a_mixture_are_packed(tmp_path: Path) -> None:
    model = load_weights(save(tmp_path, "qwen3_moe", **MOE))

    experts = {name: each for name, each in types_of(model).items() if "experts" in name}
    assert list(experts.values()) == ["BF16", "BF16"]
    assert {each.ndim for each in packed_weights(model)} == {2, 3}


def test_a_step_never_unpacks_the_experts_of_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_packed(save(tmp_path, "qwen3_moe", **MOE))
    lane = new_lane(engine, 20)
    monkeypatch.setattr(PackedWeight, "unpack", None)

    run(engine, lane, make_ids(engine, 20), [18, 1, 1])

    assert lane.offset == 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_16_bits_are_kept_bit_by_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    made = make_wide_model("llama", **SMALL)
    model = load_weights(save(tmp_path, dtype=dtype))

    assert len(types_of(model)) == 16
    for name, weight in types_of(model).items():
        assert weight == {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
        assert torch.equal(
            model.get_submodule(name.rpartition(".")[0]).weight.unpack(), made.state_dict()[name].to(dtype).float()
        )


def test_weights_in_float32_stay_as_they_are_and_run_in_one_call(tmp_path: Path) -> None:
    engine = load_packed(save(tmp_path, dtype=torch.float32))

    assert engine.describe()["weights"] == "float32 (as in its files)"
    assert engine.describe()["step"].startswith("whole, in one call")


def test_a_tied_embedding_and_head_share_one_packed_weight(tmp_path: Path) -> None:
    model = load_weights(save(tmp_path, tie_word_embeddings=True))

    assert isinstance(model.lm_head.weight, PackedWeight)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(packed_weights(model)) == len(types_of(model)) - 1


def test_a_model_that_transformers_loads_itself_is_packed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, tie_word_embeddings=True)
    fast = load_weights(folder)
    monkeypatch.setattr(model_loader, "_load_fast", lambda *_: None)

    model = load_weights(folder)

    assert types_of(model) == types_of(fast)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for slow, quick in zip(packed_weights(model), packed_weights(fast), strict=True):
        assert torch.equal(slow.unpack(), quick.unpack())


def test_weights_that_16_bits_do_not_hold_stay_float32_when_transformers_loads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loader, "_load_fast", lambda *_: None)

    assert types_of(load_weights(save(tmp_path, dtype=torch.float32))) == {}


@pytest.mark.parametrize("weights", ["q8_0", "q4_0"])
def test_weights_are_quantized_as_gguf_does_it_and_the_ends_never_below_eight_bits(weights: str, tmp_path: Path) -> None:
    folder = save(tmp_path, dtype=torch.float32)

    model = load_weights(folder, weights)

    found = types_of(model)
    ends = {name: found.pop(name) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert set(ends.values()) == {"Q8_0"}
    assert set(found.values()) == {weights.upper()}
    kind = gguf.GGMLQuantizationType[weights.upper()]
    plain = make_wide_model("llama", **SMALL).model.layers[1].mlp.up_proj.weight.detach().numpy()
    wanted = gguf.quants.dequantize(gguf.quants.quantize(plain, kind), kind)
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight.unpack(), torch.from_numpy(wanted))


def test_rows_that_blocks_do_not_fit_stay_float32(tmp_path: Path) -> None:
    folder = save(tmp_path, dtype=torch.float32, intermediate_size=80)

    engine = load_packed(folder, "q8_0")

    found = types_of(load_weights(folder, "q8_0"))
    assert not any("down_proj" in name for name in found)
    assert any("up_proj" in name for name in found)
    ids = make_ids(engine, 40)
    assert engine.describe()["step"].startswith("whole, in one call")
    assert differs_by(answer(engine, ids), make_reference(folder, "q8_0")(ids)[-1]) <= 1e-3


def test_a_random_model_of_a_shape_is_quantized_if_the_user_asks_for_it(tmp_path: Path) -> None:
    config = make_wide_model("llama", **SMALL).config.to_dict()

    engine = TorchEngine.load_shape(config, make_settings(tmp_path / "model", "q8_0"))

    assert engine.describe()["weights"].startswith("quantized: Q8_0")


def test_packed_weights_count_as_parameters(tmp_path: Path) -> None:
    folder = save(tmp_path, tie_word_embeddings=True)

    assert load_packed(folder).describe()["parameters"] == load_packed(folder, "float32").describe()["parameters"]


def test_exact_packed_weights_are_the_same_model_and_quantized_ones_are_another(tmp_path: Path) -> None:
    folder = save(tmp_path)
    plain = load_packed(folder, "float32").info

    assert load_packed(folder).info == load_packed(folder, "packed").info == plain
    assert (plain.dtype, plain.quantization) == ("float32", "")
    assert [load_packed(folder, each).info.quantization for each in ("q8_0", "q4_0")] == ["q8_0", "q4_0"]


@pytest.mark.parametrize("weights", ["packed", "q8_0", "q4_0"])
def test_packed_weights_in_another_type_are_refused(weights: str, tmp_path: Path) -> None:
    settings = Settings(device="cpu", dtype="bfloat16", weights=weights)

    with pytest.raises(SettingsError, match=rf"weights is '{weights}', which needs .*: this is cpu in bfloat16"):
        load_model(save(tmp_path), settings)


def test_packed_weights_on_another_device_are_refused_and_auto_runs_in_torch() -> None:
    cuda = torch.device("cuda")

    with pytest.raises(SettingsError, match=r"weights is 'q4_0', which needs .*: this is cuda in float32"):
        route.choose_weights(Settings(weights="q4_0"), cuda, torch.float32)
    choice = route.choose_weights(Settings(), cuda, torch.bfloat16)
    assert choice.packing is None


class TestWithoutKernels:
    @pytest.fixture(autouse=True)
    def no_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        missing = tmp_path / "nowhere" / "_kernels.so"
        monkeypatch.setattr(route, "load_kernels", lambda: library.load_kernels(path=missing))

    def test_a_model_runs_in_float32_and_says_why(self, tmp_path: Path) -> None:
        folder = save(tmp_path)

        engine = load_packed(folder)

        assert engine.describe()["weights"].startswith(
            "float32 (there are no kernels for this CPU: the library was not built"
        )
        assert engine.describe()["step"] == "transformers' modules in torch"
        ids = make_ids(engine, 30)
        assert differs_by(answer(engine, ids), make_reference(folder)(ids)[-1]) <= 1e-4

    @pytest.mark.parametrize("weights", ["packed", "q8_0"])
    def test_packed_weights_are_refused(self, weights: str, tmp_path: Path) -> None:
        with pytest.raises(KernelsMissing, match="the library was not built"):
            load_packed(save(tmp_path), weights)


def test_what_is_packed_is_taken_out_of_the_tensors_that_are_loaded(kernels: library.Kernels, tmp_path: Path) -> None:
    model = make_wide_model("llama", **SMALL)
    tensors = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}

    found = Packing(Products(kernels, 1)).take(model, tensors)

    assert set(found) == set(types_of(load_weights(save(tmp_path))))
    assert not set(found) & set(tensors)
    assert all("norm" in name for name in tensors)
