"""Names and patterns of the setting `aliases`, and trees that follow a model to its other names."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.config import Settings, load_settings
from bough.errors import SettingsError
from bough.models import GgufSupport, ModelFolder, resolve
from bough.models.aliases import AliasRules
from tests.models.test_store import add

NO_GGUF = GgufSupport(False, False)


@pytest.mark.parametrize("given", ["gpt-4o=small, claude-*=big", ["gpt-4o=small", "claude-*=big"]])
def test_aliases_come_as_a_text_or_as_a_list(given):
    rules = AliasRules(load_settings({"aliases": given}, {}, None).aliases)

    assert rules.names == {"gpt-4o": "small"}
    assert rules.patterns == {"claude-*": "big"}


def test_aliases_come_from_a_file_as_a_list(tmp_path: Path):
    file = tmp_path / "bough.toml"
    file.write_text('aliases = ["gpt-4o=small", "claude-*=big:latest"]')

    assert AliasRules(load_settings({}, {}, file).aliases).patterns == {"claude-*": "big"}


@pytest.mark.parametrize("text", ["gpt-4o", "=small", "gpt-4o=", "a=b=c", "a=b*", "a b=c", "a=b, a=c"])
def test_what_is_no_alias_is_refused_with_its_text(text):
    with pytest.raises(SettingsError, match="aliases has"):
        Settings(aliases=text)


def test_the_pattern_that_says_most_counts_and_other_characters_mean_themselves():
    rules = AliasRules("*=all, claude-*=claude, claude-*-mini=mini, o.1*=dot")

    assert rules.match("claude-x-mini") == "mini"
    assert rules.match("claude-x") == "claude"
    assert rules.match("oX1") == "all"
    assert AliasRules("claude-*=a").match("gpt") is None


def test_a_name_is_an_alias_of_the_settings_then_a_model_then_matched_by_a_pattern(tmp_path: Path):
    settings = Settings(data_folder=tmp_path, aliases="exact=small, c*=small")
    store = ModelFolder(settings.models_folder)
    add(store, "small", '{"a": 1}')
    add(store, "code", '{"a": 2}')

    found = {name: resolve(name, settings, NO_GGUF).config["a"] for name in ("exact", "exact:latest", "code", "cx")}

    assert found == {"exact": 1, "exact:latest": 1, "code": 2, "cx": 1}
