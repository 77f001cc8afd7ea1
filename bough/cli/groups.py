"""Commands and groups of commands as typer makes them, whose help shows no type for a switch, which takes no value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command. Its help shows `--json`, not `--json <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_types_of_switches(super().get_params(ctx))


class PlainGroup(TyperGroup):
    """A group of commands, with the same help."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_types_of_switches(super().get_params(ctx))


def _hide_types_of_switches(params: list[Any]) -> list[Any]:
    for each in params:
        if getattr(each, "is_flag", False):
            each.metavar = ""
    return params


class CommandApp(typer.Typer):
    """A group of sub-commands."""

    def __init__(self, help: str) -> None:
        super().__init__(help=help, cls=PlainGroup, no_args_is_help=True)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=PlainCommand, **options)
