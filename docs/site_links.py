"""Brings the repository's files that the pages link to into the site: examples, results of benchmarks, the changelog.

The pages link as they lie in the repository (`../examples/README.md`), so that the links work there, too. MkDocs knows only
what is in docs/. So this hook adds each linked file to the site under `repository/`, Markdown as pages and the rest as it
is, and rewrites the links. A link to a file that does not exist is left as it is, and `--strict` fails for it.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = "docs/"
OUTSIDE = "repository/"
LINK = re.compile(r"(```.*?```|`[^`\n]*`)|\]\(([^):#\s]+)(#[^)\s]*)?\)", re.DOTALL)  # code is matched to be left alone


def on_files(files: Files, *, config: Any) -> Files:
    """Add what the pages link to, and what those pages link to."""
    waiting = [DOCS + file.src_uri for file in files if file.src_uri.endswith(".md")]
    waiting += [_source(page) for page in _pages_of(config["nav"])]
    while waiting:
        source = waiting.pop()
        if not source.endswith(".md") or not (ROOT / source).is_file():
            continue
        for target in _linked(source):
            if not target.startswith(DOCS) and not files.get_file_from_path(site_path(target)):
                files.append(File.generated(config, site_path(target), abs_src_path=str(ROOT / target)))
                waiting.append(target)
        if not source.startswith(DOCS) and not files.get_file_from_path(site_path(source)):
            files.append(File.generated(config, site_path(source), abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """The page with its links as the site needs them."""
    here = page.file.src_uri
    source = _source(here)

    def rewrite(found: re.Match[str]) -> str:
        if found[1] or not (target := _resolve(source, found[2])):
            return found[0]
        return f"]({posixpath.relpath(site_path(target), posixpath.dirname(here) or '.')}{found[3] or ''})"

    return LINK.sub(rewrite, markdown)


def site_path(source: str) -> str:
    """Where a file of the repository lies in the site."""
    return source.removeprefix(DOCS) if source.startswith(DOCS) else OUTSIDE + source


def _source(site: str) -> str:
    """The opposite of `site_path`."""
    return site.removeprefix(OUTSIDE) if site.startswith(OUTSIDE) else DOCS + site


def _linked(source: str) -> Iterator[str]:
    """The files that a page links to, as paths in the repository."""
    for _, path, _ in LINK.findall((ROOT / source).read_text(encoding="utf-8")):
        if path and (target := _resolve(source, path)):
            yield target


def _resolve(source: str, path: str) -> str | None:
    """A link's path in the repository, if that is a file."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    return target if not target.startswith("..") and (ROOT / target).is_file() else None


def _pages_of(nav: Any) -> Iterator[str]:
    """The pages that the navigation names, at any depth."""
    if isinstance(nav, str):
        yield nav
    elif nav:
        for each in nav.values() if isinstance(nav, dict) else nav:
            yield from _pages_of(each)
