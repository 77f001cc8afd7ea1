"""Damaged safetensors and folders that lack something: one line with what is wrong, and where."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from bough.config import Settings
from bough.errors import UnsupportedModel
from bough.models import ModelFiles, check_weights, describe
from bough.runtime import make_engine
from tests.tiny_models import make_folder

FIRST = "model.layers.0.self_attn.q_proj.weight"
LAST = "model.norm.weight"
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_folder("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    return shutil.copytree(tiny, tmp_path / "copy")


def read(folder: Path) -> tuple[dict[str, Any], bytes]:
    content = (folder / FILE).read_bytes()
    length = struct.unpack_from("<Q", content)[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(folder: Path, header: dict[str, Any] | bytes, weights: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / FILE).write_bytes(struct.pack("<Q", len(text)) + text + weights)


def refusal(folder: Path) -> str:
    """What is said of a folder, the same by both uses, without the folder's path."""
    with pytest.raises(UnsupportedModel) as caught:
        check_weights(ModelFiles("tiny", folder))
    with pytest.raises(UnsupportedModel) as caught_again:
        describe(ModelFiles("tiny", folder))
    assert str(caught.value) == str(caught_again.value)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{folder}/", "")


def engine_refusal(folder: Path, tmp_path: Path, capfd) -> str:
    """What the torch engine says of a folder whose files are whole. Nothing else is printed."""
    with pytest.raises(UnsupportedModel) as caught:
        make_engine(ModelFiles("tiny", folder), Settings(cache_folder=tmp_path, engine="torch", device="cpu"))
    assert capfd.readouterr() == ("", "")
    return str(caught.value)


def test_a_whole_folder_passes(folder):
    check_weights(ModelFiles("tiny", folder))


def reason(folder: Path) -> str:
    """What the library finds wrong with the file of weights; before it comes the size of the file."""
    size = (folder / FILE).stat().st_size
    start = f"{FILE} is damaged, truncated or not a safetensors file: it has {size:,} bytes, and the library says: "
    said = refusal(folder)
    assert said.startswith(start)
    return said.removeprefix(start)


def test_a_file_without_a_header_is_refused(folder):
    (folder / FILE).write_bytes(b"12345")

    assert "header too small" in reason(folder)


def test_a_header_beyond_the_end_is_refused(folder):
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:100])
    assert "invalid header length" in reason(folder)

    (folder / FILE).write_bytes(struct.pack("<Q", 10**15) + content[8:])
    assert "header too large" in reason(folder)


def test_a_header_that_is_no_json_is_told_with_its_place(folder):
    write(folder, b'{"a": x}', b"")
    assert "expected value at line 1 column 7" in reason(folder)

    write(folder, b'{"\xff": {}}', b"")
    assert "invalid UTF-8 in header" in reason(folder)


@pytest.mark.parametrize("num_missing", [1, 3, 5000])
def test_truncated_weights_are_refused(folder, num_missing):
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:-num_missing])

    assert "file not fully covered" in reason(folder)


def test_bytes_that_no_weight_has_are_refused(folder):
    header, weights = read(folder)
    write(folder, header, weights + b"more")
    assert "file not fully covered" in reason(folder)

    header.pop(FIRST)
    write(folder, header, weights)
    assert "invalid offset for tensor `model.layers.0.self_attn.v_proj.weight`" in reason(folder)


def test_a_weight_whose_bytes_do_not_fit_its_shape_is_refused(folder):
    header, weights = read(folder)
    header[FIRST]["shape"] = [64, 63]
    write(folder, header, weights)

    assert "invalid shape, data type, or offset for tensor" in reason(folder)


def test_a_type_that_cannot_be_read_is_told(folder):
    header, weights = read(folder)
    header[FIRST]["dtype"] = "Q99"
    write(folder, header, weights)

    assert "Q99" in reason(folder)


def test_an_index_is_checked_against_the_files(folder):
    header, _ = read(folder)
    shards = {name: FILE for name in header if name != "__metadata__"}
    index = folder / "model.safetensors.index.json"

    index.write_text(json.dumps({"weight_map": shards | {"lm_head.weight": "model-2.safetensors"}}))
    assert refusal(folder).endswith("lacks 1 of 2 files of weights; the first is model-2.safetensors")

    index.write_text(json.dumps({"weight_map": shards | {"other.weight": FILE}}))
    assert refusal(folder) == f"{FILE} lacks the weight other.weight, which model.safetensors.index.json says is there"

    index.write_text("{")
    assert refusal(folder).startswith("cannot read model.safetensors.index.json: Expecting property name")


def test_a_folder_without_weights_says_what_it_has(folder):
    (folder / FILE).rename(folder / "pytorch_model.bin")
    assert refusal(folder).endswith("it has pytorch_model.bin, and pickles are never loaded")

    (folder / "pytorch_model.bin").unlink()
    assert refusal(folder).endswith("it has no *.safetensors file")


def test_a_weight_that_no_file_has_is_told_by_name(folder, tmp_path, capfd):
    header, weights = read(folder)
    start, end = header.pop(LAST)["data_offsets"]
    assert end == len(weights)
    write(folder, header, weights[:start])

    assert engine_refusal(folder, tmp_path, capfd) == (
        f"the weights in {folder} do not fill the model: 1 are missing, such as {LAST}"
    )


def test_a_weight_of_another_shape_is_told_with_both_shapes(folder, tmp_path, capfd):
    header, weights = read(folder)
    header[FIRST]["shape"] = [128, 32]
    write(folder, header, weights)

    assert engine_refusal(folder, tmp_path, capfd) == (
        f"the weights in {folder} do not fill the model: 1 of another shape, such as {FIRST} with [128, 32] "
        "instead of [64, 64]"
    )


def test_an_architecture_that_is_not_known_is_one_line(folder, tmp_path, capfd):
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "nonesuch"}
    (folder / "config.json").write_text(json.dumps(config))

    said = engine_refusal(folder, tmp_path, capfd)

    assert "nonesuch" in said and "\n" not in said
