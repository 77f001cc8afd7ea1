"""The documents are true, as far as a test can see."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bough
from benchmarks.__main__ import app as benchmarks
from bough.cli.bench import app as bench
from bough.cli.main import COMMANDS
from tests import settings_reference

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
FOLDERS = (ROOT / "benchmarks", ROOT / "examples")
QUIET = {"NO_MKDOCS_2_WARNING": "1"}  # the theme tells of its successor, as long as this is not set
DOCUMENTS = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(page for each in FOLDERS for page in each.rglob("*.md"))])


def test_every_module_says_what_it_is() -> None:
    files = [file for folder in ("bough", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    assert not [file for file in files if not file.read_text(encoding="utf-8").startswith(('"""', "'''"))]


def test_public_names_exist() -> None:
    for name in bough.__all__:
        assert getattr(bough, name)
    for name in ("generate", "stream", "warm"):
        assert callable(getattr(bough.Runner, name))


def test_the_library_page_names_every_public_name() -> None:
    page = (DOCS / "library.md").read_text(encoding="utf-8")
    assert [name for name in bough.__all__ if not re.search(rf"\b{name}\b", page)] == []


def test_the_commands_page_names_every_command() -> None:
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert [name for name in COMMANDS if not re.search(rf"\bbough {name}\b|`{name}`", page)] == []


def test_the_benchmarks_page_names_every_benchmark() -> None:
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    for program, app in (("bough bench", bench), ("python -m benchmarks", benchmarks)):
        names = {command.callback.__name__.replace("_", "-") for command in app.registered_commands if command.callback}
        assert names == set(re.findall(rf"^\| `{program} ([\w-]+)` \| .+ \|$", page, re.MULTILINE))


def test_the_architecture_has_a_line_for_each_folder_and_no_other() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(bough[\w/]*)` \| .+ \|$", page, re.MULTILINE)
    folders = [file.parent.relative_to(ROOT).as_posix() for file in (ROOT / "bough").rglob("__init__.py")]
    assert sorted(listed) == sorted(folders), "each package folder has one line in docs/architecture.md"


def test_the_settings_page_is_up_to_date() -> None:
    page = settings_reference.PAGE.read_text(encoding="utf-8")
    assert page == settings_reference.make_page(), "run: make docs"


def test_the_numbers_of_the_page_are_the_sampling_parameters() -> None:
    found = settings_reference.NUMBERS.read_text(encoding="utf-8")
    assert found == settings_reference.make_numbers(), "run: make docs"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_links_between_the_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^):]+)\)", _without_code(document)):
        path, _, heading = target.partition("#")
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), f"{document.name} links to {target}"
        assert not heading or heading in _headings(linked), f"{document.name} links to {target}"


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(docs/([^)#]+\.md)", README.read_text(encoding="utf-8")))
    assert linked == {page.name for page in DOCS.glob("*.md")}


def test_the_site_builds_with_all_pages_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    """Strict: a page that is not in the navigation, and a link or heading that does not exist, fail the build. (With
    `--quiet` MkDocs does not count its warnings, and nothing would fail.)"""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | QUIET, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr

    pages = list(tmp_path.rglob("*.html"))
    loaded = re.compile(r"<(?:script|img|link|iframe|source)\b[^>]*\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")
    assert len(pages) > len(list(DOCS.glob("*.md")))
    assert {page.name: found for page in pages if (found := loaded.findall(page.read_text(encoding="utf-8")))} == {}
    assert any(tmp_path.rglob("drawings/growing.svg"))


def _without_code(document: Path) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)


def _headings(document: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
