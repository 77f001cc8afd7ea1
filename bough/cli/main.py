"""The entry point of the command: registers the sub-commands and reports their errors.

Exit codes: 0 success, 1 a BoughError or an error of the system (a full disk, an unreadable folder), 2 wrong usage, 130
stopped by Ctrl-C. Any other exception is a bug and shows its traceback; `--debug` shows the traceback of every error.

A command's module is imported when that command is used: `bough run` with a server does not wait for the runner's imports,
and `bough --help` does not wait for any.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Annotated, Any

import typer

from bough.cli.groups import PlainCommand, PlainGroup
from bough.cli.terminal.screen import Screen
from bough.errors import BoughError
from bough.system.light_imports import make_imports_light

INTERRUPTED = 130
COMMANDS = {
    "run": ("bough.cli.run:run", "Answer a prompt, or chat."),
    "serve": (
        "bough.cli.server:serve",
        "Serve models over HTTP, with the APIs of Ollama, OpenAI and Anthropic, until Ctrl-C.",
    ),
    "pull": ("bough.cli.models:pull", "Fetch a model."),
    "list": ("bough.cli.models:list_models", "List the models on this machine, and their other names."),
    "show": ("bough.cli.models:show", "Show the properties of a model, and what the engine can do with it."),
    "rm": ("bough.cli.models:remove", "Delete models."),
    "cp": ("bough.cli.models:copy", "Give a model another name."),
    "create": ("bough.cli.create:create", "Make a model from one that is here, with a Modelfile."),
    "ps": ("bough.cli.server:ps", "List the models that the server has loaded."),
    "stop": ("bough.cli.server:stop", "Unload models from the server."),
    "logs": ("bough.cli.logs:logs", "Show the last lines of the server's log."),
    "tree": (
        "bough.cli.tree:tree",
        "Draw the tree: each edge with its text and its tier, what is kept and what is in use.",
    ),
    "explain": ("bough.cli.tree:explain", "Show how much of a prompt is cached, and where it diverges from the tree."),
    "launch": ("bough.cli.launch:launch", "Start a coding agent or a chat page so that it uses the running server."),
    "cache": ("bough.cli.cache.app:app", "Show, check, delete, export and import the trees on disk."),
    "bench": ("bough.cli.bench:app", "Measure Bough on this machine, next to simpler ways and other servers."),
    "replay": ("bough.cli.replay:replay", "Replay recorded requests against the cache, without a model."),
    "doctor": ("bough.cli.doctor:doctor", "Check the installation, the folders, the models, the trees and the server."),
    "version": ("bough.cli.doctor:show_version", "Show the versions of Bough, Python, and the libraries that run models."),
}
"""What `bough --help` says of each command, and where it is: a function, or the app of its sub-commands."""


class LaterCommand(PlainCommand):
    """A command that is imported when it is used; before, it has a name and a line of help."""

    def __init__(self, name: str, place: str, help: str) -> None:
        super().__init__(name, help=help)
        self._place = place

    def load(self) -> Any:
        """Import the command, or the group of its sub-commands."""
        module, _, name = self._place.partition(":")
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, typer.Typer):
            group = typer.main.get_group(found)
            group.name = self.name
            return group
        alone = typer.Typer(add_completion=False)
        alone.command(self.name, cls=PlainCommand)(found)
        return typer.main.get_command(alone)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent=parent, **extra)


class Commands(PlainGroup):
    """The group of all commands. It turns exceptions into messages and exit codes."""

    def __init__(self, **options: Any) -> None:
        later = {name: LaterCommand(name, *each) for name, each in COMMANDS.items()}
        super().__init__(**options | {"commands": later})

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
        from bough.system.distribution import VERSION  # importlib.metadata, which no other command's start needs

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
