"""The entry point of the command: registers the sub-commands and reports their errors.

Exit codes: 0 success, 1 a BoughError or an error of the system (a full disk, an unreadable folder), 2 wrong usage, 130
stopped by Ctrl-C. Any other exception is a bug and shows its traceback; `--debug` shows the traceback of every error.

No module imported here imports torch or transformers, so that `bough list` starts quickly. The runner imports them when it
loads a model.
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
from bough.cli.doctor import doctor, tell_version
from bough.cli.models import list_models, pull, remove, show
from bough.cli.replay import replay
from bough.cli.run import run
from bough.cli.server import explain, ps, serve, stop, tree
from bough.cli.terminal.screen import Screen
from bough.errors import BoughError

INTERRUPTED = 130


class Commands(TyperGroup):
    """The group of all commands. It turns exceptions into messages and exit codes."""

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


def _discard_blocked_output() -> None:
    """Flush standard output; if that fails, discard it, so that Python does not fail again when it exits."""
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
app.command("doctor")(doctor)
app.command("version")(tell_version)


def main() -> None:
    """Run the command with this process's arguments."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # show "?" for characters that the terminal cannot encode
    app(prog_name="bough")


if __name__ == "__main__":
    main()
