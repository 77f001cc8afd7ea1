"""The fingerprint: what changes it, what does not, and that weights are read once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import gguf
import pytest

from bough.config import Settings
from bough.errors import ModelError, UnsupportedModel
from bough.models.files import CONFIG_FILE, FLOATS_FILE, PACKED_FILE, ModelFiles
from bough.models.fingerprint import (
    check_packed,
    fingerprint,
    hash_paths,
    hash_weights,
    remember_hashes,
    safe_name,
    tree_folder,
)
from bough.models.gguf.folder import make_folder
from bough.models.weights.gguf_header import read_gguf
from bough.types import SilentProgress
from tests.models.gguf.prepared import prepare_to
from tests.models.tiny_gguf import write_gguf

FILES = {
    "config.json": json.dumps({"model_type": "llama", "hidden_size": 8}),
    "model-1.safetensors": "one",
    "model-2.safetensors": "two",
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "special_tokens_map.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "modeling_own.py": "pass",
    "README.md": "a model",
}
FACTS = {"dtype": "float32", "page_tokens": "256"}


class Told:
    """A progress that notes what it hears."""

    def __init__(self) -> None:
        self.starts: list[tuple[str, int | None]] = []
        self.done_bytes = 0
        self.num_finished = 0

    def start(self, label: str, total_bytes: int | None) -> None:
        self.starts.append((label, total_bytes))

    def advance(self, num_bytes: int) -> None:
        self.done_bytes += num_bytes

    def finish(self) -> None:
        self.num_finished += 1


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_folder=tmp_path / "data", cache_folder=tmp_path / "cache")


@pytest.fixture
def model(tmp_path: Path) -> ModelFiles:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return ModelFiles("small", folder)


def print_of(model: ModelFiles, settings: Settings, **facts: str) -> str:
    return fingerprint(ModelFiles(model.name, model.folder), settings, **(FACTS | facts))


def test_it_is_the_same_again_and_64_hexadecimal_digits(model, settings):
    found = print_of(model, settings)

    assert len(bytes.fromhex(found)) == 32
    assert print_of(model, settings) == found


@pytest.mark.parametrize("name", [name for name in FILES if name not in ("config.json", "README.md")])
def test_a_change_of_a_file_of_weights_tokenizer_template_or_code_changes_it(model, settings, name):
    before = print_of(model, settings)

    (model.folder / name).write_text("???")

    assert print_of(model, settings) != before


def test_a_change_of_the_configuration_changes_it(model, settings):
    before = print_of(model, settings)

    (model.folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 16}))

    assert print_of(model, settings) != before


def test_a_file_that_comes_or_goes_changes_it(model, settings):
    found = {print_of(model, settings)}

    (model.folder / "added_tokens.json").write_text("{}")
    found.add(print_of(model, settings))
    (model.folder / "model-2.safetensors").unlink()
    found.add(print_of(model, settings))

    assert len(found) == 3


@pytest.mark.parametrize(
    "name",
    [
        "modules.json",
        "sentence_bert_config.json",
        "config_sentence_transformers.json",
        "1_Pooling/config.json",
        "2_Dense/w",
    ],
)
def test_how_an_encoder_makes_its_vectors_changes_it(model, settings, name):
    before = print_of(model, settings)

    (model.folder / name).parent.mkdir(exist_ok=True)
    (model.folder / name).write_text("{}")

    assert print_of(model, settings) != before


def test_two_files_of_weights_that_swap_their_content_change_it(model, settings):
    before = print_of(model, settings)

    (model.folder / "model-1.safetensors").write_text("two")
    (model.folder / "model-2.safetensors").write_text("one")

    assert print_of(model, settings) != before


@pytest.mark.parametrize("facts", [{"dtype": "bfloat16"}, {"page_tokens": "128"}, {"groups": "full"}])
def test_a_fact_that_differs_or_is_added_changes_it(model, settings, facts):
    assert print_of(model, settings, **facts) != print_of(model, settings)


def test_where_the_files_lie_and_what_the_model_is_called_does_not_change_it(model, settings, tmp_path):
    shutil.copytree(model.folder, tmp_path / "elsewhere")

    assert print_of(ModelFiles("other", tmp_path / "elsewhere"), settings) == print_of(model, settings)


def test_when_the_files_were_written_does_not_change_it(model, settings):
    before = print_of(model, settings)

    for file in model.folder.iterdir():
        os.utime(file, (1, 1))

    assert print_of(model, settings) == before


def test_the_order_of_keys_of_facts_and_of_listed_files_does_not_change_it(model, settings, monkeypatch):
    before = print_of(model, settings)
    glob = Path.glob

    (model.folder / "config.json").write_text('{ "hidden_size": 8,\n "model_type": "llama" }')
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: sorted(glob(folder, pattern), reverse=True))
    backwards = dict(reversed(FACTS.items()))

    assert fingerprint(ModelFiles("small", model.folder), settings, **backwards) == before


def test_a_file_that_nothing_depends_on_does_not_change_it(model, settings):
    before = print_of(model, settings)

    (model.folder / "README.md").write_text("a better model")

    assert print_of(model, settings) == before


def test_weights_that_only_the_index_names_count(model, settings):
    (model.folder / "shards").mkdir()
    shard = model.folder / "shards" / "a.safetensors"
    shard.write_text("a")
    index = model.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "shards/a.safetensors"}}))
    before = print_of(model, settings)

    shard.write_text("b")

    assert print_of(model, settings) != before


def test_weights_are_read_once_and_the_reading_is_told(model, settings):
    first, second = Told(), Told()

    fingerprint(model, settings, first, **FACTS)
    fingerprint(model, settings, second, **FACTS)

    assert first.starts == [("reading the weights of small", 6)]
    assert (first.done_bytes, first.num_finished) == (6, 1)
    assert second.starts == []


def test_only_the_file_that_was_written_to_is_read_again(model, settings):
    fingerprint(model, settings, **FACTS)
    (model.folder / "model-2.safetensors").write_text("three")
    told = Told()

    fingerprint(model, settings, told, **FACTS)

    assert told.starts == [("reading the weights of small", 5)]


def test_a_file_replaced_by_one_of_the_same_size_and_time_is_read_again(model, settings, tmp_path):
    weights, other = model.folder / "model-1.safetensors", tmp_path / "other"
    os.utime(weights, (1, 1))
    before = print_of(model, settings)

    other.write_text("ONE")
    os.utime(other, (1, 1))
    other.replace(weights)

    assert print_of(model, settings) != before


def test_the_hashes_are_kept_for_the_user_alone_and_nothing_else_is_left(model, settings):
    fingerprint(model, settings, **FACTS)

    (file,) = settings.cache_folder.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_hash_of_a_file_that_is_gone_is_forgotten(model, settings):
    fingerprint(model, settings, **FACTS)
    (model.folder / "model-2.safetensors").unlink()
    (model.folder / "model-1.safetensors").write_text("new")

    fingerprint(model, settings, **FACTS)

    (file,) = settings.cache_folder.iterdir()
    assert [Path(path).name for path in json.loads(file.read_text())] == ["model-1.safetensors"]


@pytest.mark.parametrize("content", ["", "[]", "{]", '{"a": 1}', b"\xff\xfe"])
def test_hashes_that_make_no_sense_are_made_anew(model, settings, content):
    before = print_of(model, settings)
    (file,) = settings.cache_folder.iterdir()
    file.write_bytes(content if isinstance(content, bytes) else content.encode())

    assert print_of(model, settings) == before
    assert len(json.loads(file.read_text())) == 2


def test_a_folder_that_takes_no_hashes_costs_only_time(model, tmp_path):
    (tmp_path / "file").write_text("")
    blocked = Settings(data_folder=tmp_path, cache_folder=tmp_path / "file")
    open_one = Settings(data_folder=tmp_path, cache_folder=tmp_path / "cache")

    assert print_of(model, blocked) == print_of(model, open_one)


def test_weights_that_cannot_be_read_are_a_model_error(model, settings):
    index = model.folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "missing.safetensors"}}))

    with pytest.raises(ModelError, match=r"missing\.safetensors"):
        print_of(model, settings)


def test_a_tree_lies_in_the_trees_folder_under_name_and_fingerprint(settings):
    found = tree_folder(settings, "org/Small-1.5", "0123456789abcdef")

    assert found == settings.trees_folder / "org--Small-1.5-0123456789ab"


@pytest.mark.parametrize("name", ["", "..", "/", "../../up", "a b:c\n", ".hidden", "ü" * 300, "x" * 300])
def test_no_name_leads_out_of_the_trees_folder(settings, name):
    found = tree_folder(settings, name, "0" * 64)

    assert found.parent == settings.trees_folder
    assert not found.name.startswith((".", "-")) and len(found.name) < 100
    assert safe_name(name).isascii()


def test_a_fingerprint_from_a_strange_file_leads_nowhere_else(settings):
    assert tree_folder(settings, "small", "/../../../etc").parent == settings.trees_folder


def test_a_gguf_file_counts_as_the_weights_it_holds(tmp_path: Path, settings: Settings) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    make_folder(read_gguf(tmp_path / "tiny.gguf"), tmp_path / "kept", SilentProgress())
    files = ModelFiles("tiny", tmp_path / "kept")
    before = fingerprint(files, settings)

    content = bytearray(files.weights[0].read_bytes())
    content[-1] ^= 1
    files.weights[0].write_bytes(content)

    assert hash_weights(files, settings) == {"model.gguf": hashlib.sha256(content).hexdigest()}
    assert fingerprint(files, settings) != before


@pytest.fixture
def prepared(tmp_path: Path) -> ModelFiles:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    prepare_to(tmp_path / "prepared", tmp_path / "tiny.gguf")
    return ModelFiles("tiny", tmp_path / "prepared")


def test_how_the_tokenizer_of_a_gguf_file_was_derived_does_not_count(prepared: ModelFiles, settings: Settings) -> None:
    before = print_of(prepared, settings)

    (prepared.folder / "tokenizer.json").write_text("derived in another way")

    assert print_of(prepared, settings) == before
    assert fingerprint(prepared, settings, dtype="another") != before


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (CONFIG_FILE, lambda content: content | {"rope_theta": 5.0}),
        (PACKED_FILE, lambda content: content | {"files": [content["files"][0] | {"sha256": "0" * 64}]}),
        (PACKED_FILE, lambda content: content | {"tensors": dict(list(content["tensors"].items())[1:])}),
    ],
    ids=["configuration", "file", "rows"],
)
def test_what_a_gguf_model_is_computed_with_counts(prepared: ModelFiles, settings: Settings, file, change) -> None:
    before, path = print_of(prepared, settings), prepared.folder / file

    path.write_text(json.dumps(change(json.loads(path.read_text()))))

    assert print_of(prepared, settings) != before


def test_the_small_weights_of_a_gguf_model_count(prepared: ModelFiles, settings: Settings) -> None:
    before, path = print_of(prepared, settings), prepared.folder / FLOATS_FILE

    path.write_bytes(path.read_bytes()[:-4] + b"\x00\x00\x80?")

    assert print_of(prepared, settings) != before


def test_which_version_of_the_library_derived_the_configuration_does_not_count(
    prepared: ModelFiles, settings: Settings
) -> None:
    before, path = print_of(prepared, settings), prepared.folder / CONFIG_FILE

    path.write_text(json.dumps(json.loads(path.read_text()) | {"transformers_version": "0.1"}))

    assert print_of(prepared, settings) == before


def test_a_gguf_file_is_read_once_to_be_checked(prepared: ModelFiles, settings: Settings) -> None:
    first, second = Told(), Told()

    packed = check_packed(prepared, settings, first)
    fingerprint(prepared, settings, second)

    assert packed is not None and packed.tensors
    assert first.starts == [("reading the weights of tiny", prepared.weights[0].stat().st_size)]
    assert second.starts == []


def test_hashes_that_are_remembered_are_not_computed(prepared: ModelFiles, settings: Settings) -> None:
    told = Told()

    remember_hashes(prepared.weights, ["b179"], settings)

    assert hash_paths(prepared.weights, "tiny", settings, told) == ["b179"]
    assert told.starts == []


def test_a_gguf_file_that_changed_is_refused(prepared: ModelFiles, settings: Settings) -> None:
    check_packed(prepared, settings)
    file = prepared.weights[0]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.unlink()
    file.write_bytes(content)

    with pytest.raises(UnsupportedModel, match=r"tiny\.gguf differs from the file that tiny was made of") as caught:
        check_packed(prepared, settings)

    assert hashlib.sha256(content).hexdigest() in str(caught.value)


def test_a_model_without_packed_weights_has_none_to_check(model: ModelFiles, settings: Settings) -> None:
    assert check_packed(model, settings) is None
