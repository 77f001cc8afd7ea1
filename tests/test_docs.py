"""The documents are true, as far as a test can see."""

from __future__ import annotations

import re

import pytest

import bough
from bough.models import ModelFiles
from tests.readme_tree import README, ROOT, make_tree, read_tree


def test_the_tree_of_files_in_the_readme_is_up_to_date() -> None:
    assert read_tree() == make_tree(), "run: python -m tests.readme_tree"


def test_every_module_says_what_it_is() -> None:
    assert not [
        file for file in (ROOT / "bough").rglob("*.py") if not file.read_text(encoding="utf-8").startswith(('"""', "'''"))
    ]


def test_public_names_exist() -> None:
    for name in bough.__all__:
        assert getattr(bough, name)
    for name in ("generate", "stream", "warm"):
        assert callable(getattr(bough.Runner, name))


def test_links_between_the_documents_lead_somewhere() -> None:
    for document in (README, ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


@pytest.mark.model
def test_the_example_in_the_readme_runs(smollm2_files: ModelFiles, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(example.replace("seed=1)", "seed=1, max_tokens=5)"), {})
    assert capsys.readouterr().out.splitlines()[0] == "The capital of France is Paris."
