"""The tree of files in the README, made from the first line of each module's docstring.

`python -m tests.readme_tree` writes it; a test checks that it is up to date.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- tree: begin -->\n```\n", "```\n<!-- tree: end -->"
FOLDERS = (
    "cache",
    "cache/disk",
    "models",
    "generate",
    "engine_parts",
    "torch_engine",
    "mlx_engine",
    "server",
    "bench",
    "replay",
    "cli",
)
WIDTH = 122


def describe(file: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ")


def make_tree() -> str:
    """Every module of the package with a line on what it is."""
    lines = ["bough/"]
    top = sorted(file for file in (ROOT / "bough").glob("*.py") if not file.name.startswith("__"))
    lines += [_line("  ", file.name, describe(file)) for file in top]
    for folder in FOLDERS:
        files = sorted((ROOT / "bough" / folder).glob("*.py"))
        lines.append(_line("  ", f"{folder}/", describe(ROOT / "bough" / folder / "__init__.py")))
        lines += [_line("    ", file.name, describe(file)) for file in files if file.name != "__init__.py"]
    lines.append(
        "tests/                   mirrors bough/; fakes.py, invariants.py, contract/ (every engine), scenarios/, crash/"
    )
    lines.append("bench/results/           figures with date and set-up")
    return "\n".join(lines) + "\n"


def _line(indent: str, name: str, text: str) -> str:
    line = f"{indent}{name:<{23 - len(indent)}} {text}"
    return line if len(line) <= WIDTH else line[: WIDTH - 1].rsplit(" ", 1)[0] + " …"


def read_tree() -> str:
    text = README.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


def write_tree() -> None:
    text = README.read_text(encoding="utf-8")
    README.write_text(text.replace(read_tree(), make_tree()), encoding="utf-8")


if __name__ == "__main__":
    write_tree()
