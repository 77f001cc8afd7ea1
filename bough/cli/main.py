"""The entry point of the command: registers the sub-commands and reports their errors.

Exit codes: 0 success, 1 a BoughError or an error of the system (a full disk, an unreadable folder), 2 wrong usage, 130
stopped by Ctrl-C. Any other exception is a bug and shows its traceback; `--debug` shows the traceback of every error.

A command's module is imported when that command is used: `bough run` with a server does not wait for the runner's imports.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bough.cli.terminal.screen import Screen
from bough.errors import BoughError
from bough.system.distribution import VERSION
from bough.system.light_imports import make_imports_light

INTERRUPTED = 130
COMMANDS = {
    "run": "bough.cli.run:run",
    "serve": "bough.cli.server:serve",
    "pull": "bough.cli.models:pull",
    "list": "bough.cli.models:list_models",
    "show": "bough.cli.models:show",
    "rm": "bough.cli.models:remove",
    "cp": "bough.cli.models:copy",
    "ps": "bough.cli.server:ps",
    "stop": "bough.cli.server:stop",
    "tree": "bough.cli.tree:tree",
    "explain": "bough.cli.tree:explain",
    "launch": "bough.cli.launch:launch",
    "cache": "bough.cli.cache.app:app",
    "bench": "bough.cli.bench:app",
    "replay": "bough.cli.replay:replay",
    "doctor": "bough.cli.doctor:doctor",
    "version": "bough.cli.doctor:show_version",
}
"""The module of each command, and in it a function or the group of its sub-commands."""


class Commands(TyperGroup):
    """The group of all commands. It imports them when they are used, and turns exceptions into messages and exit codes."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            self.commands[cmd_name] = _import_command(cmd_name)
        return self.commands.get(cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            _discard_blocked_output()
            raise typer.Exit(1) from error
        except (BoughError, OSError) as error:
            _discard_blocked_output()
            if ctx.params.get("debug"):
                raise
            Screen().error(str(error))
            raise typer.Exit(1) from error


def _import_command(name: str) -> Any:
    module, _, found = COMMANDS[name].partition(":")
    function = getattr(importlib.import_module(module), found)
    if isinstance(function, typer.Typer):
        group = typer.main.get_group(function)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    alone.command(name)(function)
    return typer.main.get_command(alone)


def _discard_blocked_output() -> None:
    """Flush standard output; if that fails, discard it, so that Python does not fail again when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bough {VERSION}")
        raise typer.Exit()


app = typer.Typer(
    name="bough",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def bough(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error came from.")] = False,
) -> None:
    """Run language models that remember: conversations share the state of their common prefixes in one tree."""


def main() -> None:
    """Run the command with this process's arguments."""
    if sys.platform == "win32":
        sys.exit("error: Bough runs on Linux and macOS; on Windows install it in WSL2")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # show "?" for characters that the terminal cannot encode
    make_imports_light()
    app(prog_name="bough")


if __name__ == "__main__":
    main()
