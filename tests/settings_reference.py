"""The settings reference, docs/settings.md, made from `bough/config/settings.py`, the sampling parameters and the flags of
the commands; and the numbers that the page's settings dialog asks for, made from the sampling parameters.

`make docs` (or `python -m tests.settings_reference`) writes both; a test checks that they are up to date.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import typer

from bough.cli.main import app
from bough.cli.options import settings_of
from bough.config import SIZES, TIMES, Settings
from bough.sampling_params import PARAMETERS, TYPES, Parameter, SamplingParams

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "settings.md"
NUMBERS = ROOT / "bough" / "server" / "web" / "chat" / "parameters.js"
COMMANDS = ("run", "serve")  # together they have every flag that sets a setting

NUMBERS_HEAD = """\
/**
 * The numbers that a user may give, under the names of `options`. An empty field leaves the choice to the model.
 * Made by `make docs` from bough/sampling_params.py.
 */
"""
INTRODUCTION = """\
# Settings

<!-- Made by `make docs` from bough/config/settings.py. Do not edit: change the sentence beside the setting there. -->

A setting is read from the first of these that has it: a flag, a `BOUGH_*` variable, `bough.toml`, the default. In Python
the setting is a keyword of `bough.load`. Each has one name everywhere. An unknown name is an error.

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
- Some words below: a *lane* computes one request at a time. State is kept in three *tiers*: the device's memory, host
  memory and disk, in *pages* of up to 256 tokens; a *store* is shared by machines. A *salt* is the name of a tenant, who
  has a tree of their own. [How the cache works](cache.md) explains all of them.
- `auto` derives a value from the machine. `bough show`, `bough ps` and `GET /api/cache` show the result.
- `trust_remote_code`, `host`, `origins`, `allowed_hosts` and `store` are an error in a `bough.toml` in the working folder,
  because that file may have come with other people's files.
- `PIP_INDEX_URL` is the package index that carries the default model, as for pip. `HF_TOKEN` is the Hugging Face library's
  own variable.

"""


SAMPLING = """
## Sampling parameters

<!-- Made from bough/sampling_params.py. -->

Fields of `bough.SamplingParams` and keywords of `generate`; those that a chat can use are flags of `bough run` and
names of `/set`, too. The other columns are the names in OpenAI's chats and completions and in Ollama's options. A
model's files may have defaults for those marked with \\*.

"""


def make_page() -> str:
    """The whole page."""
    order = next(each for each in (SamplingParams.__doc__ or "").split("\n\n") if "The order is" in each)
    sampling = [*_sampling_table(), "", *map(str.strip, order.splitlines())]
    return INTRODUCTION + "\n".join(_table()) + "\n" + SAMPLING + "\n".join(sampling) + "\n"


def make_numbers() -> str:
    """The module of the page with the numbers that a user may set."""
    found = [_describe_number(name, each) for name, each in PARAMETERS.items() if each.ollama and name != "stop"]
    lines = "".join(f"  {json.dumps(each, ensure_ascii=False)},\n" for each in found)
    return NUMBERS_HEAD + f"export const NUMBERS = [\n{lines}];\n"


def _describe_number(name: str, parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.ollama,
        "label": name.replace("_", " ").capitalize(),
        "least": parameter.least,
        "most": parameter.most,
        "isAbove": parameter.is_above and not parameter.is_clamped,
        "isWhole": "int" in TYPES[name],
        "hint": parameter.help,
    }


def _sampling_table() -> Iterator[str]:
    yield "| parameter | default | range | OpenAI | Ollama | what it does |"
    yield "|---|---|---|---|---|---|"
    for each in fields(SamplingParams):
        known = PARAMETERS[each.name]
        names = " | ".join(f"`{name}`" if name else "–" for name in (known.openai, known.ollama))
        mark = "" if known.neutral is None else " \\*"
        yield f"| `{each.name}`{mark} | `{each.default}` | {known.describe_range() or '–'} | {names} | {known.help} |"


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
        command = typer.main.get_command(app).get_command(None, name).load()  # type: ignore[attr-defined]
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
    NUMBERS.write_text(make_numbers(), encoding="utf-8")
