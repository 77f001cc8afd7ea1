"""`bough rm`: delete models from this machine."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich import filesize

from bough.cache.admin.trees import TreeInfo, list_trees, remove_tree
from bough.cache.disk import DiskError
from bough.cli.screen import Screen
from bough.config import load_settings
from bough.errors import ModelNotFound
from bough.models import ModelFiles, Store


def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names as `bough list` shows them.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete models for good, and what is kept on disk for them. Nothing is deleted if one of the names is unknown."""
    settings = load_settings()
    screen, store = Screen(), Store(settings.models_folder)
    found = {model.name: model for model in (_find(store, name) for name in names)}
    size_bytes = sum(model.size_bytes for model in found.values())
    question = f"delete {', '.join(found)} ({filesize.decimal(size_bytes)})?"
    if not yes and is_interactive() and not typer.confirm(question, err=True):
        raise typer.Exit(1)
    for name in found:
        screen.write_line(f"deleted {name} ({filesize.decimal(store.remove(name))})")
        for tree in list_trees(settings.trees_folder):
            if tree.model == name:
                _remove_tree(screen, tree)


def _remove_tree(screen: Screen, tree: TreeInfo) -> None:
    try:
        screen.write_line(f"deleted its tree {tree.name} ({filesize.decimal(remove_tree(tree.folder))})")
    except DiskError as error:
        screen.write_line(f"its tree stays: {error}")


def _find(store: Store, name: str) -> ModelFiles:
    model = store.find(name)
    if model is None:
        raise ModelNotFound(f"no local model {name!r}; {store.describe()}")
    return model


def is_interactive() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty()
