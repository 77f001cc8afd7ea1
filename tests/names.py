"""`python -m tests.names`, part of `make lint`: no two public classes of Bough share a name."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = "bough", "benchmarks"


def find_repeated_classes(files: Iterable[Path]) -> dict[str, list[str]]:
    """The places of each public top-level class whose name another one has too, as `file:line`."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{file}:{node.lineno}")
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def main() -> int:
    repeated = find_repeated_classes(sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")))
    for name, places in repeated.items():
        print(f"{name} is the name of {len(places)} classes: {', '.join(places)}")
    return 1 if repeated else 0


if __name__ == "__main__":
    sys.exit(main())
