"""From a folder to a model: fast where the files match, by transformers where they do not, never with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.config import Settings
from bough.engines.torch import model_loader
from bough.engines.torch.model_loader import choose_device, choose_dtype, load_model
from bough.errors import ModelError, UnsupportedModel
from tests.tiny_models import CONFIGS, make_folder, make_model, make_pickled_folder

CPU = Settings(device="cpu")


def same_weights(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    both = left.state_dict(), right.state_dict()
    return both[0].keys() == both[1].keys() and all(torch.equal(both[0][name], both[1][name]) for name in both[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_loaded_model_gives_the_logits_of_the_one_that_was_saved(name: str, tmp_path: Path) -> None:
    saved = make_model(name)
    model = load_model(make_folder(name, tmp_path), CPU).model
    ids = torch.arange(3, 40)[None]

    with torch.inference_mode():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, saved(input_ids=ids, use_cache=False).logits)
    assert not model.training
    assert not any(each.requires_grad for each in model.parameters())


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2"])
def test_plain_folders_are_loaded_the_fast_way(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "load_pretrained", None)

    model = load_model(make_folder(name, tmp_path), CPU).model

    assert same_weights(model, make_model(name))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = load_model(make_folder("llama", tmp_path, tie_word_embeddings=True), CPU).model

    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_checkpoint_in_several_files_is_read_by_its_index(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1

    assert same_weights(load_model(tmp_path, CPU).model, make_model("llama"))


def test_a_missing_file_of_several_is_named(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()

    with pytest.raises(ModelError, match=lost.name):
        load_model(tmp_path, CPU)


def test_a_missing_weight_is_an_error_and_never_random(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.self_attn.q_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"layers\.2\.self_attn\.q_proj"):
        load_model(folder, CPU)


def test_a_damaged_file_is_a_model_error(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path)
    (folder / "model.safetensors").write_bytes(b"not safetensors at all")

    with pytest.raises(ModelError, match="cannot be read"):
        load_model(folder, CPU)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_with_pickles_alone_is_refused(tmp_path: Path, sharded: bool) -> None:
    folder = make_pickled_folder("llama", tmp_path, sharded)

    with pytest.raises(UnsupportedModel, match=f"no safetensors weights in {folder}"):
        load_model(folder, CPU)


def test_transformers_own_loading_reads_no_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder("llama", tmp_path)
    torch.save(make_model("llama").state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(model_loader, "require_suffixes", lambda folder, files, *suffixes: [])
    monkeypatch.setattr(model_loader, "_load_fast", lambda *arguments: None)

    with pytest.raises(UnsupportedModel, match="safetensors"):
        load_model(folder, CPU)


def test_a_folder_that_lacks_its_own_code_is_told_why(tmp_path: Path) -> None:
    config = {"model_type": "own_code", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    with pytest.raises(UnsupportedModel, match="works from local folders only"):
        load_model(tmp_path, Settings(device="cpu", trust_remote_code=True))


def test_an_unknown_architecture_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}), encoding="utf-8")

    with pytest.raises(UnsupportedModel, match="no_such_model"):
        load_model(tmp_path, CPU)


def test_a_folder_without_a_configuration_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model(tmp_path, CPU)


def test_the_type_follows_the_setting(tmp_path: Path) -> None:
    model = load_model(make_folder("llama", tmp_path), Settings(device="cpu", dtype="bfloat16")).model

    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16), ("mps", torch.bfloat16)])
def test_each_device_has_its_usual_type(device: str, dtype: torch.dtype) -> None:
    assert choose_dtype("auto", torch.device(device)) is dtype


@pytest.mark.parametrize("name", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(ModelError, match=name):
        choose_device(name)


def test_an_unknown_type_is_an_error() -> None:
    with pytest.raises(ModelError, match="int3"):
        choose_dtype("int3", torch.device("cpu"))
