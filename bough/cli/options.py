"""Flags that several commands share. A flag that is not given is None and does not change its setting."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from typing import Annotated, Any, TypeVar

import typer

from bough.config import Settings, load_settings
from bough.sampling_params import PARAMETERS, TYPES

_KINDS: Mapping[str, Any] = {
    "int": int,
    "int | None": int,
    "float": float,
    "bool": bool,
    "tuple[str, ...]": list[str],
    "str | dict[str, Any] | None": str,
}
_SETTINGS = {each.name: each for each in fields(Settings)}

_SAMPLING = "Sampling"
_SETTINGS_PANEL = "Settings (also BOUGH_* variables and bough.toml)"
_SERVER_PANEL = "Server settings"
Command = TypeVar("Command", bound=Callable[..., None])


def with_flags(flags: Iterable[inspect.Parameter]) -> Callable[[Command], Command]:
    """Give a command flags that are data. It takes them as `**flags`; typer reads them from its signature."""

    def add(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True).parameters.values()
        named = [each for each in own if each.kind is not inspect.Parameter.VAR_KEYWORD]
        command.__signature__ = inspect.Signature([*named, *flags])  # type: ignore[attr-defined]
        return command

    return add


def sampling_flags(names: Iterable[str]) -> list[inspect.Parameter]:
    """A flag for each of these sampling parameters."""
    return [_flag(name, _KINDS[TYPES[name]], PARAMETERS[name].help, _SAMPLING) for name in names]


def command_flags(command: str) -> list[inspect.Parameter]:
    """A flag for each setting that this command has one for."""
    return setting_flags(*(name for name, each in _SETTINGS.items() if command in each.metadata["commands"]))


def setting_flags(*names: str) -> list[inspect.Parameter]:
    """A flag for each of these settings. One that is not given is None."""
    return [_setting_flag(_SETTINGS[name]) for name in names]


def _setting_flag(setting: Field[Any]) -> inspect.Parameter:
    name, known = setting.name, setting.metadata
    panel = _SETTINGS_PANEL if "run" in known["commands"] else _SERVER_PANEL
    kind = str if known["unit"] else _KINDS.get(str(setting.type), str)
    kind = list[str] if name == "aliases" else kind
    return _flag(name, kind, known["help"], panel, known["flag"], known["metavar"])


def _flag(name: str, kind: Any, help: str, panel: str, flag: str = "", metavar: str | None = None) -> inspect.Parameter:
    names = (flag,) if flag else ()
    option = typer.Option(*names, help=help, metavar=metavar, show_default=False, rich_help_panel=panel)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


Model = Annotated[str | None, typer.Option("--model", "-m", help="The model; all arguments are then the prompt.")]
Url = Annotated[str | None, typer.Option("--url", help="The server's address; not given: the server that runs here.")]
IsLocal = Annotated[bool, typer.Option("--local", help="Do not use a running server.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsJsonObject = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]


def read_names(text: str, known: Iterable[str], kind: str) -> list[str]:
    """Known names, separated by commas; `all` stands for all of them."""
    names = list(known) if text == "all" else [name.strip() for name in text.split(",")]
    if unknown := next((name for name in names if name not in known), None):
        raise typer.BadParameter(f"the {kind} {unknown!r} is not one of {', '.join(known)}")
    return names


def settings_of(ctx: typer.Context) -> dict[str, Any]:
    """The flags of a command that are settings, by the names of the settings. Flags that were not given are None.

    A sampling flag is none, also if a setting has its name: `bough run --max-tokens` is about this one answer.
    """
    sampling = {param.name for param in ctx.command.params if getattr(param, "rich_help_panel", None) == _SAMPLING}
    given = {name: value for name, value in ctx.params.items() if name in _SETTINGS.keys() - sampling}
    return {name: (list(value) or None) if isinstance(value, list | tuple) else value for name, value in given.items()}


def read_settings(ctx: typer.Context) -> Settings:
    """The settings of a command with its flags. Errors name the flags as they were typed."""
    return load_settings(settings_of(ctx), are_flags=True)
