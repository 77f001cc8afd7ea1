"""`bough tree`: what a server's model remembers, drawn."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from bough.cli import options
from bough.cli.client import Client
from bough.cli.screen import Screen
from bough.config import load_settings


def tree(
    model: Annotated[str | None, typer.Argument(help="A model; not given: the server's own.")] = None,
    salt: Annotated[str | None, typer.Option(help="Only the tree of this salt.")] = None,
    as_json: options.AsJson = False,
    url: options.Url = None,
) -> None:
    """Draw the tree: every edge with its text, where it lies, what is kept and what is in use."""
    screen = Screen()
    with Client(load_settings(), url) as client:
        if as_json:
            found = client.get("/api/cache/tree", model=model, salt=salt)
            return screen.write_line(json.dumps(found, indent=2, ensure_ascii=False))
        return screen.write_line(client.get_text("/api/cache/tree", model=model, salt=salt, format="text"))
