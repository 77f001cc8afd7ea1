"""`bough launch`: start a tool so that it uses a running server, or print what that takes.

The tool replaces this process: its keys, signals and exit code are its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from bough.cli import options
from bough.cli.client import Client, find_client
from bough.cli.launch.tools import AGENT_CONTEXT_TOKENS, TOOLS, Served, Start, Tool
from bough.cli.terminal.columns import align
from bough.cli.terminal.screen import Screen
from bough.config import Settings, load_settings
from bough.errors import RequestError

_MODEL_FLAGS = ("--model", "-m")


def launch(
    name: Annotated[
        str | None, typer.Argument(metavar="[TOOL]", help=f"{', '.join(TOOLS)}; not given: list them.", show_default=False)
    ] = None,
    further: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS]", help="Further arguments of the tool.", show_default=False)
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="The model; not given: the server's.")] = None,
    prints: Annotated[bool, typer.Option("--print", help="Print the shell lines, and start nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the settings as JSON, and start nothing.")] = False,
    url: options.Url = None,
) -> None:
    """Start a coding agent or a chat page so that it uses the running server.

    It is told the server by variables and flags: no file of the tool is changed.
    """
    screen = Screen()
    if name is None:
        return _list_tools(screen, as_json)
    tool = TOOLS.get(name)
    if tool is None:
        raise RequestError(f"{name!r} is no tool that can be launched; there are: {', '.join(TOOLS)}")
    settings = load_settings()
    with find_client(settings, url) or Client(settings) as client:
        served = _find_served(client, settings, tool, model)
        for note in _find_problems(client, tool, served, further or []):
            screen.note(note)
    start = tool.prepare(served).add(further or [])
    path = shutil.which(tool.program)
    if as_json:
        return screen.write_line(json.dumps(_describe(tool, served, start, path), indent=2, ensure_ascii=False))
    if prints or path is None:
        for line in start.write_shell():
            screen.write_line(line)
        if prints:
            return None
        raise RequestError(f"{tool.title} is not installed: `{tool.install}` installs it; the lines above start it")
    return _run(path, start)


def _list_tools(screen: Screen, as_json: bool) -> None:
    found = [(tool, shutil.which(tool.program)) for tool in TOOLS.values()]
    if as_json:
        plain = [{"name": tool.name, "title": tool.title, "path": path, "install": tool.install} for tool, path in found]
        return screen.write_line(json.dumps(plain, indent=2))
    rows = [(tool.name, tool.title, path or f"not installed: {tool.install}") for tool, path in found]
    for line in align([("TOOL", "", "PROGRAM"), *rows], screen.width):
        screen.write_line(line)
    return None


def _find_served(client: Client, settings: Settings, tool: Tool, model: str | None) -> Served:
    """The server and a model of it that generates text. Raises BoughError if there is none."""
    about = client.get("/api/tags")  # refused here if a key is missing; `/health` would only tell less
    chosen = model or str(client.get("/health")["model"])
    shown = client.post("/api/show", model=chosen)
    if "completion" not in shown["capabilities"]:
        there = ", ".join(each["name"].removesuffix(":latest") for each in about["models"])
        raise RequestError(f"{chosen} does not generate text, so {tool.title} cannot use it; there are: {there}")
    context = next(value for key, value in shown["model_info"].items() if key.endswith(".context_length"))
    folder = settings.data_folder / "launch" / tool.name
    return Served(client.url, chosen.removesuffix(":latest"), int(context), settings.api_key or "", folder)


def _find_problems(client: Client, tool: Tool, served: Served, further: Sequence[str]) -> Iterator[str]:
    """What will not work well: a short context, and a model in the tool's own arguments that the server does not have."""
    if tool.is_agent and served.context_tokens < AGENT_CONTEXT_TOKENS:
        yield (
            f"warning: {served.model} has a context of {served.context_tokens:,} tokens; {tool.title} needs"
            f" {AGENT_CONTEXT_TOKENS:,} or more for its instructions and a few files"
        )
    named = _find_model_flag(further)
    if named is None or named in tool.own_names:
        return
    wanted = named.removeprefix(tool.prefix)
    if not client.has_model(wanted):
        yield (
            f"warning: the server has no model {wanted!r}: `bough cp {served.model} {wanted}` lets {served.model} answer to"
            f" this name, `bough serve --alias 'claude-*={served.model}'` to all that begin so"
        )


def _find_model_flag(args: Sequence[str]) -> str | None:
    """The model that the tool's own arguments name."""
    for number, word in enumerate(args, start=1):
        flag, has_value, value = word.partition("=")
        if flag in _MODEL_FLAGS:
            return value if has_value else next(iter(args[number:]), None)
    return None


def _describe(tool: Tool, served: Served, start: Start, path: str | None) -> Mapping[str, Any]:
    return {
        "tool": tool.name,
        "path": path,
        "install": tool.install,
        "url": served.url,
        "model": served.model,
        "context_tokens": served.context_tokens,
        "command": list(start.command),
        "env": dict(start.env),
        "unset": list(start.unset),
        "folder": None if start.folder is None else str(start.folder),
    }


def _run(path: str, start: Start) -> None:
    """Become the tool. Where a process cannot be replaced, wait for it and exit with its code."""
    env = {name: value for name, value in os.environ.items() if name not in start.unset} | dict(start.env)
    if start.folder is not None:
        start.folder.mkdir(parents=True, exist_ok=True)
        os.chdir(start.folder)
    sys.stdout.flush()
    if os.name == "posix":
        os.execve(path, list(start.command), env)
    raise typer.Exit(subprocess.run([path, *start.command[1:]], env=env, check=False).returncode)
