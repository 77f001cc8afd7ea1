"""The catalog: what the APIs list, and that no name leads elsewhere."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bough.cache.disk import Disk
from bough.config import Settings
from bough.errors import ModelNotFound, RequestError, SettingsError, UnsupportedModel
from bough.models import ModelFiles, ModelFolder
from bough.models.aliases import Overlay
from bough.prompting.ask import Ask
from bough.server.serving.catalog import Catalog, human_number
from tests.models.tiny_tokenizer import THINKS, byte_level
from tests.tiny_models import make_folder, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer whose template knows tools and thinking."""
    folder = make_folder("qwen3", tmp_path_factory.mktemp("catalog") / "tiny")
    byte_level(THINKS).save_pretrained(folder)
    (folder / "LICENSE").write_text("do as you like")
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(data_folder=tmp_path / "data", cache_folder=tmp_path / "cache")


@pytest.fixture
def store(settings: Settings) -> ModelFolder:
    return ModelFolder(settings.models_folder)


def add(store: ModelFolder, name: str, folder: Path, quantization: str = "") -> ModelFiles:
    with store.making(name) as making:
        for file in folder.iterdir():
            (making.folder / file.name).write_bytes(file.read_bytes())
        return making.commit("a test", "12ab", 0, quantization)


def test_a_model_is_described_as_the_apis_want_it(settings, store, folder):
    files = add(store, "tiny", folder)

    facts = Catalog(settings).find("tiny")

    assert (facts.name, facts.family) == ("tiny", "qwen3")
    assert facts.architecture == "Qwen3ForCausalLM"
    assert facts.num_parameters == sum(each.numel() for each in make_model("qwen3").parameters())
    assert facts.digest == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert facts.size_bytes == files.size_bytes
    assert facts.modified == files.created
    assert (facts.context_tokens, facts.quantization) == (2048, "F32")
    assert facts.embedding_length == files.config["hidden_size"]
    assert facts.capabilities == ("completion", "tools", "thinking")
    assert facts.template == THINKS
    assert facts.license == "do as you like"


def test_the_recorded_quantization_counts_before_the_type(settings, store, folder):
    add(store, "tiny", folder, "Q4_1")

    assert Catalog(settings).find("tiny").quantization == "Q4_1"


def test_models_are_listed_by_name_without_those_that_make_no_sense(settings, store, folder, caplog):
    for name in ("second", "org/first", "broken", "odd"):
        add(store, name, folder)
    (store.folder / "broken" / "model.safetensors").unlink()
    (store.folder / "odd" / "config.json").write_text('{"architectures": 5, "max_position_embeddings": []}')

    assert [facts.name for facts in Catalog(settings).list()] == ["org/first", "second"]
    assert "the model broken is not listed" in caplog.text
    with pytest.raises(UnsupportedModel):
        Catalog(settings).find("odd")


def test_weights_are_read_once_and_again_only_when_they_change(settings, store, folder, monkeypatch):
    files = add(store, "tiny", folder)
    before = Catalog(settings).find("tiny")

    monkeypatch.setattr("bough.models.fingerprint._hash_with_progress", lambda file, progress: "0" * 64)
    assert Catalog(settings).find("tiny") == before
    (files.folder / "model.safetensors").touch()
    assert Catalog(settings).find("tiny").digest == "0" * 64


@pytest.mark.parametrize("content", ["", "[]", '{"x": 5}', "{}"])
def test_a_damaged_memo_only_costs_time(settings, store, folder, content):
    add(store, "tiny", folder)
    before = Catalog(settings).find("tiny")
    (settings.cache_folder / "digests.json").write_text(content)

    assert Catalog(settings).find("tiny") == before


@pytest.mark.parametrize("name", ["nobody", "", "../tiny", "/etc", "a/b/c", "tiny\0", ".", "~", "tiny:7b", "x" * 500])
def test_a_name_that_is_not_in_the_folder_is_not_found(settings, store, folder, name):
    add(store, "tiny", folder)

    with pytest.raises(ModelNotFound, match="not found"):
        Catalog(settings).files(name)


def test_latest_is_accepted_and_never_listed(settings, store, folder):
    add(store, "tiny:latest", folder)

    assert Catalog(settings).find("tiny:latest").name == "tiny"


def test_a_model_that_was_named_by_its_path_is_served_under_its_folders_name(settings, folder):
    catalog = Catalog(settings, ModelFiles(folder.name, folder))

    assert [facts.name for facts in catalog.list()] == ["tiny"]
    assert catalog.files("tiny:latest").folder == folder
    with pytest.raises(ModelNotFound):
        catalog.files(str(folder))


def test_a_model_outside_the_folder_is_neither_copied_nor_deleted(settings, folder):
    catalog = Catalog(settings, ModelFiles(folder.name, folder))

    for change in (lambda: catalog.remove("tiny"), lambda: catalog.copy("tiny", "other")):
        with pytest.raises(RequestError, match="outside the model folder"):
            change()
    assert (folder / "config.json").exists()


def test_a_copy_is_a_model_of_its_own(settings, store, folder):
    add(store, "tiny", folder, "Q4_1")
    catalog = Catalog(settings)

    catalog.copy("tiny", "other")
    catalog.remove("tiny")

    assert [(facts.name, facts.quantization) for facts in catalog.list()] == [("other", "Q4_1")]


def test_aliases_are_listed_and_stand_for_one_model(settings, store, folder):
    add(store, "tiny", folder)
    catalog = Catalog(replace(settings, aliases="gpt-4o=tiny, claude-*=made"))

    catalog.copy("tiny", "other")
    catalog.create("made", "other", Overlay(system="Be brief.", license="mine"))

    listed = {entry.name: entry.stands_for for entry in catalog.list()}
    assert listed == {"gpt-4o": "tiny", "made": "tiny", "other": "tiny", "tiny": ""}
    assert {catalog.files(name).name for name in (*listed, "claude-x", "gpt-4o:latest")} == {"tiny"}
    assert catalog.aliases_of("tiny") == ["gpt-4o", "made", "other"]
    assert catalog.find("claude-x").name == "claude-x"
    asked = catalog.names.complete(Ask("claude-x", messages=[{"role": "user", "content": "Hello"}]))
    assert asked.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert all(catalog.names.complete(ask) is ask for ask in (Ask("tiny", text="a"), Ask("nobody", text="a")))
    assert catalog.find("other").digest == catalog.find("tiny").digest != catalog.find("made").digest
    assert catalog.find("made").license == "mine"
    catalog.check_aliases()


def test_a_name_that_only_a_pattern_matches_is_not_here(settings, store, folder):
    add(store, "tiny", folder)
    catalog = Catalog(replace(settings, aliases="gpt-4o=tiny, *=tiny"))

    assert [name for name in ("tiny", "tiny:latest", "gpt-4o", "qwen3:4b", "../up") if catalog.names.has_name(name)] == [
        "tiny",
        "tiny:latest",
        "gpt-4o",
    ]
    assert catalog.files("qwen3:4b").name == "tiny"


def test_an_alias_of_the_settings_needs_a_model_and_is_not_changed_by_clients(settings, store, folder, caplog):
    add(store, "tiny", folder)
    with pytest.raises(SettingsError, match="aliases has a=nobody, and there is no model 'nobody'; there are: tiny"):
        Catalog(replace(settings, aliases="a=nobody")).check_aliases()
    add(store, "big", folder)
    catalog = Catalog(replace(settings, aliases="big=tiny, x*=tiny"))
    catalog.check_aliases()

    assert "the alias big=tiny of the settings hides the model big" in caplog.text
    for change in (lambda: catalog.remove("big"), lambda: catalog.copy("tiny", "big"), lambda: catalog.remove("xy")):
        with pytest.raises(RequestError, match="settings"):
            change()


def test_copies_from_before_there_were_aliases_are_one_model_and_share_its_tree(settings, store, folder):
    for name in ("second", "first"):
        add(store, name, folder)
    record = json.loads((store.folder / "first" / "bough.json").read_text())
    older = record | {"created": "2020-01-01T00:00:00+00:00"}
    (store.folder / "first" / "bough.json").write_text(json.dumps(older))
    other = add(store, "other", folder)
    config = json.loads((other.folder / "config.json").read_text())
    (other.folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    catalog = Catalog(settings)

    assert [catalog.files(name).name for name in ("first", "second", "other")] == ["first", "first", "other"]
    assert catalog.aliases_of("first") == ["second"]
    catalog.remove("first")
    assert catalog.files("second").name == "second"


def test_an_unknown_model_is_answered_with_the_known_ones(settings, store, folder):
    add(store, "tiny", folder)
    Catalog(settings).copy("tiny", "other")

    with pytest.raises(ModelNotFound, match=r"^model 'nobody' not found; there are: other, tiny$"):
        Catalog(settings).find("nobody")


def test_a_copy_needs_a_source_and_a_name(settings, store, folder):
    add(store, "tiny", folder)

    with pytest.raises(ModelNotFound, match="model 'nobody' not found"):
        Catalog(settings).copy("nobody", "other")
    with pytest.raises(RequestError, match="not a model name"):
        Catalog(settings).copy("tiny", "../other")


@pytest.mark.parametrize("aliases", ["", "gpt-4o=tiny", "gpt-4o=tiny,claude-*=gpt-4o"])
def test_the_tree_of_a_deleted_model_goes_whatever_the_settings_call_it(settings, store, folder, aliases):
    add(store, "tiny", folder)
    tree = settings.trees_folder / "tiny-12ab"
    Disk(tree, fingerprint="12ab", model="tiny", page_tokens=256, budget_bytes=2**20).close()

    Catalog(replace(settings, aliases=aliases)).remove("tiny")

    assert store.names() == set() and not tree.exists()


def test_removing_what_is_not_there_is_refused(settings):
    with pytest.raises(ModelNotFound, match="model 'nobody' not found"):
        Catalog(settings).remove("nobody")


@pytest.mark.parametrize("written", ["plain", "named"])
def test_the_template_is_found_in_the_tokenizers_configuration_too(settings, store, folder, written):
    files = add(store, "tiny", folder)
    (files.folder / "chat_template.jinja").unlink()
    template = (
        "{{ 1 }}" if written == "plain" else [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    )
    config = json.loads((files.folder / "tokenizer_config.json").read_text())
    (files.folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))

    assert Catalog(settings).find("tiny").template == ("{{ 1 }}" if written == "plain" else "d")


@pytest.mark.parametrize(
    ("number", "text"),
    [(134_515_008, "134.52M"), (7_615_616_512, "7.6B"), (3_000_000_000, "3B"), (149_000, "149K"), (12, "12")],
)
def test_numbers_of_parameters_are_short(number, text):
    assert human_number(number) == text
