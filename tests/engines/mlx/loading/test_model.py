"""From a folder to a model of mlx-lm: the same one that transformers would load, or an error, never random weights."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from bough.config import Settings
from bough.engines.mlx import MlxEngine
from bough.engines.mlx.library import VERSION, llama, nn, utils
from bough.engines.mlx.loading.model import MlxModel, choose_dtype, load_model, make_random_model, use_device
from bough.engines.torch.model_loader import load_model as load_torch_model
from bough.errors import ModelError, UnsupportedModel
from tests.tiny_mlx_models import make_loaded
from tests.tiny_models import CONFIGS, ON_MLX, make_folder, make_model, make_pickled_folder

CPU = Settings(device="cpu")
IDS = [(7 * i * i + 3 * i + 5) % 90 + 4 for i in range(90)]
OTHERWISE = {  # mlx-lm computes these in another way than transformers; `warnings` say so
    "gemma2": "without its window of 24",
    "jamba": "weighs the experts",
}
REFUSED = {  # mlx-lm does not have these, or only in shapes that these are not
    "bamba": "has no model of type 'bamba'",
    "gemma3n_text": "has no model of type 'gemma3n_text'",
    "gemma4_text": "do not fill the model",  # transformers writes the sizes of its heads by layer
    "minimax": "cannot load the model",  # mlx-lm's is the next version
    "recurrent_gemma": "do not fill the model",  # mlx-lm's has one head for keys
}
MULTIPLIERS = {
    "key_multiplier": 3.0,
    "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [2.0, 3.0, 4.0, 0.5, 0.25],
    "ssm_in_multiplier": 1.5,
    "ssm_out_multiplier": 0.4,
    "mlp_multipliers": [2.0, 3.0],
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.5,
}


def logits_of(loaded: MlxModel) -> np.ndarray:
    return np.array(loaded.model(mx.array([IDS]))[0].astype(mx.float32))


def expected_logits(name: str, **overrides: Any) -> np.ndarray:
    with torch.inference_mode():
        return make_model(name, **overrides)(torch.tensor([IDS]), use_cache=False).logits[0].numpy()


def difference(name: str, loaded: MlxModel, **overrides: Any) -> float:
    """To transformers' logits, as a share of their spread."""
    expected = expected_logits(name, **overrides)
    return float(abs(logits_of(loaded) - expected).max() / max(1.0, np.ptp(expected)))


def quantized_folder(folder: Path, bits: int = 4) -> Path:
    """A folder as mlx-lm converts and quantizes models: those of mlx-community."""
    plain = load_model(make_folder("llama", folder / "plain"), CPU)
    nn.quantize(plain.model, group_size=32, bits=bits)
    utils.save_model(folder, plain.model)
    quantization = {"group_size": 32, "bits": bits}
    utils.save_config(plain.config | {"quantization": quantization}, folder / "config.json")
    shutil.rmtree(folder / "plain")
    return folder


@pytest.mark.parametrize("name", ON_MLX)
def test_a_loaded_model_gives_the_logits_of_transformers(name: str) -> None:
    loaded = make_loaded(name)

    assert difference(name, loaded) <= 1e-4
    assert loaded.warnings == ()


def test_every_tiny_architecture_is_accounted_for() -> None:
    assert {*ON_MLX, *OTHERWISE, *REFUSED} == set(CONFIGS)


@pytest.mark.parametrize(("name", "words"), OTHERWISE.items())
def test_an_architecture_that_mlx_lm_computes_otherwise_has_a_warning(name: str, words: str) -> None:
    loaded = make_loaded(name)

    assert difference(name, loaded) > 1e-4
    assert any(words in warning for warning in loaded.warnings)


@pytest.mark.parametrize(("name", "words"), REFUSED.items())
def test_an_architecture_that_mlx_lm_does_not_have_is_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        load_model(make_folder(name, tmp_path), CPU)


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt_oss"])
def test_a_window_is_as_wide_as_the_configuration_says(name: str) -> None:
    assert difference(name, make_loaded(name, sliding_window=4), sliding_window=4) <= 1e-4
    assert difference(name, make_loaded(name, sliding_window=4)) > 1e-2


def test_every_multiplier_of_falcon_h1_counts() -> None:
    assert difference("falcon_h1", make_loaded("falcon_h1", **MULTIPLIERS), **MULTIPLIERS) <= 1e-4
    for multiplier in MULTIPLIERS:
        rest = {name: value for name, value in MULTIPLIERS.items() if name != multiplier}
        assert difference("falcon_h1", make_loaded("falcon_h1", **rest), **MULTIPLIERS) > 1e-4, multiplier


def test_a_loaded_model_can_be_used_in_another_thread(tmp_path: Path) -> None:
    loaded = load_model(make_folder("gpt_oss", tmp_path), CPU)  # it computes rotary frequencies, which are no weights
    found: list[np.ndarray] = []

    thread = threading.Thread(target=lambda: found.append(logits_of(loaded)))
    thread.start()
    thread.join()

    np.testing.assert_array_equal(found[0], logits_of(loaded))
    assert not loaded.model.training


def test_a_checkpoint_in_several_files_is_read_whole(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    np.testing.assert_array_equal(logits_of(load_model(tmp_path, CPU)), logits_of(make_loaded("llama")))


def test_a_missing_file_of_several_is_named_with_their_number(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    files[1].unlink()

    with pytest.raises(ModelError, match=f"lacks 1 of {len(files)} files of weights; the first is {files[1].name}"):
        load_model(tmp_path, CPU)


@pytest.mark.parametrize("change", ["missing", "extra", "misshapen"])
def test_a_weight_that_is_not_as_it_should_be_is_an_error_and_never_random(tmp_path: Path, change: str) -> None:
    file = make_folder("llama", tmp_path) / "model.safetensors"
    weights = mx.load(str(file))
    name = "model.layers.2.self_attn.q_proj.weight"
    weight = weights.pop(name)
    if change == "extra":
        weights |= {name: weight, f"{name}_too": weight}
    if change == "misshapen":
        weights[name] = weight[:, :8]
    mx.eval(weights)
    mx.save_safetensors(str(file), weights, metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"do not fill the model: .*layers\.2\.self_attn\.q_proj"):
        load_model(tmp_path, CPU)


@pytest.mark.parametrize("num_bytes", [0, 10, 1_000, 100_000])
def test_a_damaged_file_is_a_model_error(tmp_path: Path, num_bytes: int) -> None:
    file = make_folder("llama", tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])

    with pytest.raises(ModelError, match=r"model\.safetensors is damaged, truncated or not a safetensors file"):
        load_model(tmp_path, CPU)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_with_pickles_alone_is_refused(tmp_path: Path, sharded: bool) -> None:
    folder = make_pickled_folder("llama", tmp_path, sharded)

    with pytest.raises(UnsupportedModel, match=f"no safetensors weights in {folder}"):
        load_model(folder, CPU)


@pytest.mark.parametrize("kind", ["no_such_model", "olmo"])  # olmo's module ends the process where a package is missing
def test_an_unknown_architecture_is_told_with_the_version_of_mlx_lm(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")

    with pytest.raises(UnsupportedModel, match=f"mlx-lm {VERSION} has no model of type '{kind}'"):
        load_model(tmp_path, CPU)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"model_type": 3}', '{"model_type": "llama", "rope_parameters": 3}'])
def test_a_configuration_that_makes_no_sense_is_a_model_error(tmp_path: Path, text: str) -> None:
    make_folder("llama", tmp_path)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")

    with pytest.raises(ModelError):
        load_model(tmp_path, CPU)


def test_a_folder_without_a_configuration_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(tmp_path, CPU)


def test_code_that_comes_with_a_model_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    config_file = make_folder("llama", tmp_path) / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config_file.write_text(json.dumps(config | {"model_file": "own.py"}), encoding="utf-8")

    with pytest.raises(UnsupportedModel, match="works from local folders only"):
        load_model(tmp_path, Settings(device="cpu", trust_remote_code=True))
    (tmp_path / "own.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n", encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="trust_remote_code"):
        load_model(tmp_path, CPU)
    trusted = load_model(tmp_path, Settings(device="cpu", trust_remote_code=True))

    np.testing.assert_array_equal(logits_of(trusted), logits_of(make_loaded("llama")))


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_weights_stay_quantized_and_compute_in_float32_on_a_cpu(tmp_path: Path, bits: int) -> None:
    loaded = load_model(quantized_folder(tmp_path, bits), CPU)

    layer = loaded.model.model.layers[0].self_attn.q_proj
    assert (layer.bits, layer.group_size, layer.weight.dtype) == (bits, 32, mx.uint32)
    assert layer.scales.dtype == mx.float32
    assert difference("llama", loaded) < {4: 0.3, 8: 0.02}[bits]


def test_the_torch_engine_refuses_weights_that_are_packed_for_mlx(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="packed for MLX, in 4 bits: use the engine mlx"):
        load_torch_model(quantized_folder(tmp_path), CPU)


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", mx.bfloat16), ("float16", mx.float16), ("auto", mx.float32)])
def test_the_type_follows_the_setting(tmp_path: Path, name: str, dtype: mx.Dtype) -> None:
    loaded = load_model(make_folder("llama", tmp_path), Settings(device="cpu", dtype=name))

    assert loaded.model.model.embed_tokens.weight.dtype == dtype
    assert loaded.model.model.layers[3].mlp.up_proj.weight.dtype == dtype


@pytest.mark.parametrize(
    ("held", "on_gpu", "dtype"),
    [
        (mx.float32, False, mx.float32),
        (mx.bfloat16, False, mx.float32),
        (mx.float32, True, mx.bfloat16),
        (mx.bfloat16, True, mx.bfloat16),
        (mx.float16, True, mx.float16),
    ],
)
def test_each_device_has_its_usual_type(held: mx.Dtype, on_gpu: bool, dtype: mx.Dtype) -> None:
    assert choose_dtype("auto", held, on_gpu) == dtype


def test_an_unknown_type_is_an_error() -> None:
    with pytest.raises(ModelError, match="int3"):
        choose_dtype("int3", mx.float32, False)


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps"])
def test_a_device_of_the_torch_engine_is_told_as_such(name: str) -> None:
    with pytest.raises(ModelError, match=f"'{name}' is the torch engine's"):
        use_device(name)


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(ModelError, match="nonsense"):
        use_device("nonsense")


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="there is a GPU here")
@pytest.mark.parametrize("name", ["gpu", "metal"])
def test_a_gpu_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(ModelError, match="not available here"):
        use_device(name)


def test_a_random_model_has_the_shape_that_was_asked_for_and_the_same_weights_every_time() -> None:
    config = {"model_type": "gemma3_text"} | CONFIGS["gemma3_text"]

    first, second = make_random_model(config, CPU), make_random_model(config, CPU)

    assert len(first.model.layers) == 6
    assert first.model.args.sliding_window_pattern == 3
    np.testing.assert_array_equal(logits_of(first), logits_of(second))


def test_importing_the_library_leaves_the_number_of_open_files_alone() -> None:
    wanted = 1_000
    code = "import resource; import bough.engines.mlx.library; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"

    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({wanted}, {wanted})); {code}"
    done = subprocess.run([sys.executable, "-c", limit], capture_output=True, text=True, timeout=100)

    assert done.stdout.strip() == str(wanted), done.stderr


def test_a_model_may_bring_its_own_code_and_a_changed_one_is_checked_anew(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    code = Path(llama.__file__).read_text().replace("from .", "from mlx_lm.models.")
    wrong = code.replace("keys = self.rope(keys, offset=cache.offset)", "keys = self.rope(keys, offset=0)")
    assert wrong != code
    settings = Settings(device="cpu", trust_remote_code=True, cache_folder=tmp_path / "cache")

    (folder / "own.py").write_text(code)
    right = MlxEngine.load(folder, settings)
    (folder / "own.py").write_text(wrong)
    changed = MlxEngine.load(folder, settings)

    assert right.capabilities.can_reuse and right.describe()["batching"] == "together"
    assert not changed.capabilities.can_reuse
    with pytest.raises(UnsupportedModel, match=r"own\.py"):
        MlxEngine.load(folder, Settings(device="cpu", cache_folder=tmp_path / "cache"))
