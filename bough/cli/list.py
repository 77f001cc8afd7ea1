"""`bough list`: the models on this machine."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich import filesize

from bough.cli.columns import ago, align, count
from bough.cli.screen import Screen
from bough.config import load_settings
from bough.models import ModelFiles, Store


def list_models(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False) -> None:
    """List the models on this machine."""
    screen, settings = Screen(), load_settings()
    found = Store(settings.models_folder).list()
    if as_json:
        screen.write_line(json.dumps([_facts(model) for model in found], indent=2))
    elif found:
        for line in align([("NAME", "SIZE", "PARAMETERS", "QUANTIZATION", "MODIFIED"), *map(_row, found)]):
            screen.write_line(line)
    else:
        screen.note(f"no models yet: `bough pull {settings.model}` fetches the default one")


def _row(model: ModelFiles) -> tuple[str, ...]:
    return (
        model.name,
        filesize.decimal(model.size_bytes),
        count(model.num_parameters) if model.num_parameters else "",
        model.quantization,
        ago(model.created),
    )


def _facts(model: ModelFiles) -> dict[str, Any]:
    return {
        "name": model.name,
        "size_bytes": model.size_bytes,
        "num_parameters": model.num_parameters,
        "quantization": model.quantization,
        "modified": model.created.isoformat() if model.created else None,
        "source": model.source,
        "sha256": model.sha256,
        "folder": str(model.folder),
    }
