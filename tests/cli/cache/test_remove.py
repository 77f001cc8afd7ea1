"""What `bough rm` does with the trees of a model."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import add_model


def test_rm_keeps_the_tree_and_says_how_to_delete_it(invoke, store, grow):
    add_model(store, "small")
    folder = grow("small")

    result = invoke("rm", "small", "-y")

    assert f"its tree {folder.name} (" in result.stdout
    assert f"stays: `bough cache clear {folder.name}` deletes it" in result.stdout
    assert folder.exists()


def test_rm_deletes_the_tree_if_asked(invoke, store, grow):
    add_model(store, "small")
    folder, other = grow("small"), grow("large")

    (found,) = json.loads(invoke("rm", "small", "-y", "--tree", "--json").stdout)["models"]

    assert (found["name"], list(found["trees"]), found["kept_trees"]) == ("small", [folder.name], {})
    assert found["freed_bytes"] > 0 and not folder.exists() and other.exists()


@pytest.mark.parametrize(("answer", "is_kept"), [("y", False), ("n", True)])
def test_rm_asks_for_the_tree_on_a_terminal(invoke, store, grow, monkeypatch, answer, is_kept):
    add_model(store, "small")
    folder = grow("small")
    monkeypatch.setattr("bough.cli.terminal.screen.is_interactive", lambda: True)

    result = invoke("rm", "small", piped=f"y\n{answer}\n")

    assert result.exit_code == 0 and folder.name in result.stderr
    assert folder.exists() is is_kept and store.find("small") is None
