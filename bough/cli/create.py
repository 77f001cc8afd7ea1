"""`bough create`: make a model from another with a Modelfile, in the running server or in the model folder."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from bough.cli import options
from bough.cli.client import find_client
from bough.cli.terminal.screen import Screen
from bough.config import Settings, load_settings
from bough.errors import BoughError, RequestError
from bough.system.distribution import find_missing, install_command

_STANDARD_INPUT = "-"


def create(
    name: Annotated[
        str | None, typer.Argument(help="The name of the new model; not given: that of the Modelfile's folder.")
    ] = None,
    file: Annotated[
        str, typer.Option("--file", "-f", metavar="MODELFILE", help="The Modelfile; - for standard input.")
    ] = "Modelfile",
    url: options.Url = None,
    is_local: options.IsLocal = False,
    as_json: options.AsJsonObject = False,
) -> None:
    """Make a model from one that is here, with a Modelfile: a system prompt, parameters, messages, a template.

    It has no weights of its own: it shares those, the loaded model and the tree of the model that it is made from.
    """
    screen, settings = Screen(), load_settings()
    if name is None and file == _STANDARD_INPUT:
        raise typer.BadParameter("give the name of the new model")
    name, text = name or Path(file).expanduser().resolve().parent.name, _read(file)
    client = find_client(settings, url, is_local=is_local)
    if client is None:
        _create_here(name, text, settings)
    else:
        with closing(client):
            client.post("/api/create", model=name, modelfile=text, stream=False)
    if as_json:
        return screen.write_line(json.dumps({"model": name}))
    return screen.write_line(f"{name} is here: `bough show {name}` shows what it adds")


def _read(file: str) -> str:
    """The text of a Modelfile. Raises RequestError if it cannot be read."""
    try:
        if file == _STANDARD_INPUT:
            return sys.stdin.read()
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"the Modelfile {file} cannot be read: {reason}") from error


def _create_here(name: str, modelfile: str, settings: Settings) -> None:
    """Make the model as a server would. Raises BoughError."""
    if missing := find_missing("server"):
        raise BoughError(f"{', '.join(missing)} not installed: {install_command('server')}")
    from bough.server.apis.ollama.create import CreateRequest
    from bough.server.serving.catalog import Catalog

    source, overlay = CreateRequest(model=name, modelfile=modelfile).read()
    Catalog(settings).create(name, source, overlay)
