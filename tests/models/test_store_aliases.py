"""Aliases in the model folder: names without files, and what becomes of them when models are deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bough.errors import ModelNotFound, RequestError
from bough.models.aliases import Overlay
from bough.models.store import ModelFolder
from tests.models.test_store import add


def test_a_copy_is_a_name_without_files(tmp_path):
    store = ModelFolder(tmp_path)
    model = add(store, "small")

    alias = store.copy("small", "org/other:latest")

    assert (alias.name, alias.target) == ("org/other", "small")
    assert store.resolve("org/other") == store.resolve("small") == model
    assert [each.name for each in store.list()] == ["small"]
    assert [each.name for each in store.aliases()] == ["org/other"]
    assert store.find("org/other") is None
    assert store.names() == {"small", "org/other"}


def test_a_copy_of_an_alias_stands_for_the_model_and_has_the_same_overlay(tmp_path):
    store = ModelFolder(tmp_path)
    add(store, "small")
    store.add_alias("first", "small", Overlay(system="Be brief.", parameters={"stop": ["x"]}))

    alias = store.copy("first", "second")

    assert alias.target == "small"
    assert store.find_alias("second").overlay == Overlay(system="Be brief.", parameters={"stop": ["x"]})


def test_a_copy_takes_the_place_of_an_alias_and_not_of_a_model(tmp_path):
    store = ModelFolder(tmp_path)
    add(store, "small", '{"a": 1}')
    add(store, "other", '{"a": 2}')
    store.copy("small", "name")

    store.copy("other", "name")

    assert store.resolve("name").config == {"a": 2}
    with pytest.raises(RequestError, match="'other' is a model with weights of its own"):
        store.copy("small", "other:latest")


def test_a_copy_onto_itself_changes_nothing(tmp_path):
    store = ModelFolder(tmp_path)
    add(store, "small")

    assert store.copy("small", "small:latest") is None
    assert store.aliases() == []


def test_deleting_an_alias_leaves_the_model(tmp_path):
    store = ModelFolder(tmp_path)
    add(store, "small")
    store.copy("small", "other")

    assert store.remove("other") == 0
    assert store.names() == {"small"}


def test_the_weights_of_a_deleted_model_go_to_its_oldest_plain_alias(tmp_path):
    store = ModelFolder(tmp_path)
    add(store, "small", '{"a": 1}')
    store.add_alias("a-created", "small", Overlay(system="Be brief."))
    store.copy("small", "c")
    store.copy("small", "b")

    assert store.remove("small") == 0

    assert [each.name for each in store.list()] == ["b"]
    assert store.names() == {"a-created", "b", "c"}
    assert {store.resolve(name).name for name in store.names()} == {"b"}
    assert store.find_alias("a-created").overlay.system == "Be brief."
    assert store.find("small") is None and store.find_alias("b") is None


def test_a_created_model_that_is_left_alone_keeps_the_weights_and_its_overlay(tmp_path):
    store = ModelFolder(tmp_path)
    add(store, "small", '{"a": 1}')
    store.add_alias("created", "small", Overlay(system="Be brief."))

    store.remove("small")

    assert store.names() == {"created"}
    assert store.resolve("created").config == {"a": 1}
    assert store.find_alias("created").overlay.system == "Be brief."
    assert store.remove("created") > 0
    assert store.names() == set() and store.find_alias("created") is None


@pytest.mark.parametrize("step", range(4))
def test_every_alias_leads_to_its_weights_when_a_removal_is_killed(tmp_path, monkeypatch, step):
    store = ModelFolder(tmp_path)
    add(store, "small", '{"a": 1}')
    for name in ("x", "y", "z"):
        store.copy("small", name)
    left = iter(range(step))
    replace = Path.replace

    def replace_or_die(self, target):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_or_die)
    if step < 3:
        with pytest.raises(KeyboardInterrupt):
            store.remove("small")
    else:
        store.remove("small")
    monkeypatch.undo()

    assert all(store.resolve(name).config == {"a": 1} for name in ("x", "y", "z"))
    assert {"x", "y", "z"} <= store.names()


def test_a_model_that_is_made_takes_the_name_of_an_alias(tmp_path):
    store = ModelFolder(tmp_path)
    add(store, "small", '{"a": 1}')
    store.add_alias("other", "small", Overlay(system="Be brief."))

    add(store, "other", '{"a": 2}')

    assert store.resolve("other").config == {"a": 2}
    assert store.find_alias("other") is None


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"name": "other", "target": "small"}', '{"overlay": []}'])
def test_a_damaged_record_of_an_alias_is_no_name(tmp_path, content):
    store = ModelFolder(tmp_path)
    add(store, "small")
    (tmp_path / ".alias-other").write_text(content)

    assert store.resolve("other") is None
    assert store.names() == {"small"}


def test_an_alias_whose_model_is_gone_is_not_listed_and_can_be_deleted(tmp_path):
    store = ModelFolder(tmp_path)
    model = add(store, "small")
    store.copy("small", "other")
    shutil.rmtree(model.folder)

    assert store.resolve("other") is None and store.aliases() == []
    assert store.remove("other") == 0
    assert store.find_alias("other") is None


def test_an_overlay_has_a_largest_size(tmp_path):
    store = ModelFolder(tmp_path)
    add(store, "small")

    with pytest.raises(RequestError, match=r"has 1,\d+,\d+ bytes, and may have 1,048,576"):
        store.add_alias("other", "small", Overlay(system="x" * 2**20))
    assert store.find_alias("other") is None


def test_ten_names_are_told_and_the_others_counted(tmp_path):
    store = ModelFolder(tmp_path)
    add(store, "m")
    for number in range(11):
        store.copy("m", f"a{number:02}")

    assert store.describe().endswith("a08, a09 and 2 more")


def test_a_copy_of_nothing_is_refused(tmp_path):
    with pytest.raises(ModelNotFound, match="no local model 'small'"):
        ModelFolder(tmp_path).copy("small", "other")
