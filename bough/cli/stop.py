"""`bough stop`: let a server unload models. Their trees are saved, and the next request loads them again."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from bough.cli import options
from bough.cli.client import Client
from bough.cli.screen import Screen
from bough.config import load_settings


def stop(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Names as `bough ps` shows them; none: all.")
    ] = None,
    as_json: options.AsJson = False,
    url: options.Url = None,
) -> None:
    """Unload models from the server; one that is in use goes when its last answer ends."""
    screen = Screen()
    with Client(load_settings(), url) as client:
        names = models or [str(each["name"]) for each in client.get("/api/ps")["models"]]
        for name in names:
            client.post("/api/generate", model=name, keep_alive=0, stream=False)
    if as_json:
        return screen.write_line(json.dumps({"stopped": names}))
    for name in names:
        screen.write_line(f"stopped {name}")
    return None if names else screen.note("no model is loaded")
