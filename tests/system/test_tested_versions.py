"""Libraries outside the range that Bough was tested with are named."""

from __future__ import annotations

import pytest

from bough.system import tested_versions
from bough.system.tested_versions import find_untested


def pretend(monkeypatch: pytest.MonkeyPatch, installed: str, *required: str) -> None:
    monkeypatch.setattr(tested_versions, "requires", lambda name: list(required))
    monkeypatch.setattr(tested_versions, "version", lambda name: installed)


def test_the_libraries_of_this_environment_are_known() -> None:
    assert len(tested_versions.requires("bough-llm") or ()) > 10


@pytest.mark.parametrize("installed", ["5.17.0", "5.23.9", "5.23.0.dev0"])
def test_a_tested_version_is_not_named(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, installed, "transformers>=5.17,<5.24", "torch>=2.11; extra == 'torch'")
    assert find_untested("transformers") == []


@pytest.mark.parametrize("installed", ["5.24.0", "5.16.2", "6.0.0rc1"])
def test_a_version_outside_is_named_with_the_range(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, installed, "transformers>=5.17,<5.24; extra == 'torch'")
    assert find_untested("transformers", "rich") == [f"transformers {installed} (tested: >=5.17, <5.24)"]


def test_a_bare_source_folder_names_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tested_versions, "DISTRIBUTION", "no-such-distribution")
    assert find_untested("transformers") == []
