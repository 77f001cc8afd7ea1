"""Models that are made from another with a Modelfile."""

from __future__ import annotations

import json

import httpx
import pytest

from bough.models import ModelFiles, ModelFolder
from tests.cli.conftest import add_model
from tests.server.in_process import make_words_folder, serving

MODELFILE = '''
# a plumber
FROM small
SYSTEM """You are Mario.
Be brief."""
PARAMETER temperature 0.3
'''


def make_small(store: ModelFolder) -> ModelFiles:
    """A model that a server can load."""
    with store.making("small") as making:
        make_words_folder(making.folder, do_sample=False)
        return making.commit("a test", "", 0, "")


@pytest.fixture
def modelfile(tmp_path):
    (tmp_path / "mario").mkdir()
    file = tmp_path / "mario" / "Modelfile"
    file.write_text(MODELFILE)
    return file


def test_without_a_server_a_model_is_made_in_the_model_folder_under_the_name_of_the_modelfiles_folder(
    invoke, store, modelfile
):
    add_model(store, "small")

    result = invoke("create", "-f", str(modelfile))

    alias = store.find_alias("mario")
    assert result.stdout.startswith("mario is here") and alias.target == "small"
    assert (alias.overlay.system, dict(alias.overlay.parameters)) == ("You are Mario.\nBe brief.", {"temperature": 0.3})


def test_with_a_server_the_model_is_made_there(invoke, home, store, monkeypatch):
    with serving(make_small(store), home / "served", data_folder=home / "data") as server:
        monkeypatch.setenv("BOUGH_CACHE_FOLDER", str(server.cache_folder))
        result = invoke("create", "plumber", "-f", "-", piped="FROM small\nSYSTEM You are Mario.")
        shown = httpx.post(f"{server.url}/api/show", json={"model": "plumber"}, timeout=30).json()

    assert result.stdout.startswith("plumber is here"), result.stderr
    assert shown["system"] == "You are Mario."


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("FROM nothing", "model 'nothing' not found; there are: small"),
        ("FROMM small", "the Modelfile has 'FROMM', which is not supported"),
        ("SYSTEM Hi", "there is no model to make it from"),
        ("FROM small\nPARAMETER temperatur 1", "the parameter 'temperatur' is not supported"),
    ],
)
def test_a_wrong_modelfile_is_one_line_with_the_reason(invoke, store, text, problem):
    add_model(store, "small")

    result = invoke("create", "mario", "-f", "-", piped=text)

    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert problem in result.stderr and store.find_alias("mario") is None


def test_a_modelfile_that_cannot_be_read_is_named(invoke, home):
    assert "the Modelfile nowhere cannot be read: No such file" in invoke("create", "mario", "-f", "nowhere").stderr


def test_show_says_what_a_created_model_adds_and_from_which_it_was_made(invoke, store, modelfile):
    make_small(store)
    invoke("create", "-f", str(modelfile))

    lines = [line.split() for line in invoke("show", "mario", "--no-check").stdout.splitlines()]
    facts = json.loads(invoke("show", "mario", "--no-check", "--json").stdout)

    assert lines[:5] == [
        ["mario"],
        ["made", "from", "small"],
        ["system", "You", "are", "Mario."],
        ["Be", "brief."],
        ["parameters", "temperature", "0.3"],
    ]
    assert ["small"] in lines
    assert (facts["name"], facts["made_from"], facts["system"]) == ("mario", "small", "You are Mario.\nBe brief.")
    assert "made_from" not in json.loads(invoke("show", "small", "--no-check", "--json").stdout)
