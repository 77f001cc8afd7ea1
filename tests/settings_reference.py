"""The settings reference, docs/settings.md, made from `bough/config/settings.py` and the flags of the commands.

`make docs` (or `python -m tests.settings_reference`) writes it; a test checks that it is up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import typer

from bough.cli.main import app
from bough.cli.options import settings_of
from bough.config import SIZES, TIMES, Settings

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"
COMMANDS = ("run", "serve")  # together they have every flag that sets a setting

INTRODUCTION = """\
# Settings

<!-- Made by `make docs` from bough/config/settings.py. Do not edit: change the sentence beside the setting there. -->

A setting is read from the first of these that has it: a flag, a `BOUGH_*` variable, `bough.toml`, the default. In Python
the setting is a keyword of `bough.load`. Each has one name everywhere; names of version 0.1 (`device_bytes`, `disk_ttl_s`,
`--memory` …) still work. An unknown name is an error.

```bash
bough serve --lanes 8 --device-memory 4GB                   # flags
BOUGH_LANES=8 BOUGH_DEVICE_MEMORY=4GB bough serve           # variables
```
```toml
# bough.toml, in the working folder or in the platform's configuration folder (~/.config/bough on Linux)
lanes = 8
device_memory = "4GB"
disk_ttl = "7d"
```
```python
import bough

bough.load(lanes=8, device_memory="4GB")  # keywords
```

- Sizes are bytes, or a text such as `"512M"`, `"2GB"` (powers of 1,024). Times are seconds, or a text such as `"30s"`,
  `"90m"`, `"12h"`, `"7d"`. Switches are `true` and `false` (also `1`, `0`, `yes`, `no`, `on`, `off`).
- `auto` derives a value from the machine. `bough show`, `bough ps` and `GET /api/cache` tell what it came to.
- `trust_remote_code`, `host`, `origins`, `allowed_hosts` and `store` are not read from a `bough.toml` in the working
  folder: that file may have come with somebody else's files.
- `PIP_INDEX_URL` sets `index_url` where nothing else does. `HF_TOKEN` is the Hugging Face library's own variable.

"""


def make_page() -> str:
    """The whole page."""
    return INTRODUCTION + "\n".join(_table()) + "\n"


def _table() -> Iterator[str]:
    flags = find_flags()
    yield "| setting, key in `bough.toml` | flag | variable | default | what it does |"
    yield "|---|---|---|---|---|"
    for each in fields(Settings):
        names = f"`{each.name}` | {flags.get(each.name, '–')} | `BOUGH_{each.name.upper()}`"
        yield f"| {names} | {_default_of(each)} | {each.metadata.get('help', '')} |"


def find_flags() -> dict[str, str]:
    """The flag of each setting that has one, in Markdown."""
    found: dict[str, str] = {}
    for name in COMMANDS:
        command = typer.main.get_command(app).get_command(None, name)  # type: ignore[attr-defined]
        for param in command.params:
            for setting in settings_of(cast(typer.Context, SimpleNamespace(command=command, params={param.name: ""}))):
                names = [text for text in (*param.opts, *param.secondary_opts) if text.startswith("--")]
                found[setting] = ", ".join(f"`{text}`" for text in names)
    return found


def _default_of(field: Field[Any]) -> str:
    if field.default is MISSING:
        return "the platform's folder"
    if field.default is None:
        return "none" if field.name == "keys_file" else "never" if field.name in TIMES else "auto"
    if field.name in SIZES:
        return _size(field.default)
    if field.default == "":
        return "empty"
    return f"`{str(field.default).lower() if field.type == 'bool' else format(field.default, '')}`".replace(".0`", "`")


def _size(num_bytes: int) -> str:
    unit, size = next((unit, size) for unit, size in (("GB", 2**30), ("MB", 2**20), ("", 1)) if num_bytes % size == 0)
    return f"`{num_bytes // size}{unit}`"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
