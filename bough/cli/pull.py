"""`bough pull`: bring a model to this machine."""

from __future__ import annotations

from typing import Annotated

import typer
from rich import filesize

from bough import models
from bough.cli import work
from bough.cli.screen import Screen
from bough.config import load_settings
from bough.runner import gguf_support


def pull(
    name: Annotated[str, typer.Argument(help="A known name such as smollm2, or org/name on the Hugging Face hub.")],
) -> None:
    """Fetch a model. What a broken-off download left is gone on from."""
    screen, settings = Screen(), load_settings()
    before = {model.name: model.created for model in models.Store(settings.models_folder).list()}
    with work.shown(screen.notes) as progress:
        model = models.pull(name, settings, gguf_support(settings), progress)
    is_new = before.get(model.name) != model.created
    screen.write_line(f"{model.name} {'is here' if is_new else 'was here already'} ({filesize.decimal(model.size_bytes)})")
