"""The command's entry: its sub-commands, and what becomes of errors.

Exit codes: 0 well, 1 an error that Bough raises on purpose or the system reports (a full disk, a folder that may not be
read), 2 bad usage, 130 stopped by Ctrl-C. A traceback is shown for mistakes of ours, and with `--debug`.

Nothing imported here brings in torch or transformers: the runner loads them with a model, so that `bough list` is quick.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bough.cli.bench import app as bench_app
from bough.cli.cache.app import app as cache_app
from bough.cli.models import list_models, pull, remove, show
from bough.cli.replay import replay
from bough.cli.run import run
from bough.cli.server import explain, ps, serve, stop, tree
from bough.cli.terminal.screen import Screen
from bough.errors import BoughError

INTERRUPTED = 130


class Commands(TyperGroup):
    """The group of all commands: errors end here."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            _let_output_go()
            raise typer.Exit(1) from error
        except (BoughError, OSError) as error:
            _let_output_go()
            if ctx.params.get("debug"):
                raise
            Screen().error(str(error))
            raise typer.Exit(1) from error


def _let_output_go() -> None:
    """If nobody takes our output any more, what Python still holds of it must not fail when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bough {version('bough')}")
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


app.command("run")(run)
app.command("serve")(serve)
app.command("pull")(pull)
app.command("list")(list_models)
app.command("show")(show)
app.command("rm")(remove)
app.command("ps")(ps)
app.command("stop")(stop)
app.command("tree")(tree)
app.command("explain")(explain)
app.add_typer(cache_app, name="cache")
app.add_typer(bench_app, name="bench")
app.command("replay")(replay)


def main() -> None:
    """Run the command with this process's arguments."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that lacks a letter shows "?"
    app(prog_name="bough")


if __name__ == "__main__":
    main()
