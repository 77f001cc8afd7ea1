"""`bough launch`: start a tool so that it uses a running server, or print what that takes.

The tool replaces this process: its keys, signals and exit code are its own. No file of a tool is written or changed:
variables and flags hold for the started process only. Every tool is given the name of the served model, so that no request
asks for a name that the server does not have.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from bough.cli import options
from bough.cli.client import Client, find_client, find_url
from bough.cli.terminal.columns import align
from bough.cli.terminal.screen import Screen
from bough.config import Settings, load_settings
from bough.errors import RequestError

AGENT_CONTEXT_TOKENS = 16_384
"""Below this, the instructions of a coding agent and a few files do not fit."""

_ANY_KEY = "bough"  # for tools that insist on a key where the server needs none
_CLAUDE_FAMILIES = ("OPUS", "SONNET", "HAIKU", "FABLE")
_MOST_OUTPUT_SHARE = 4  # an answer may take a quarter of the context, as it does without a limit
_MODEL_FLAGS = ("--model", "-m")


@dataclass(frozen=True)
class ServedModel:
    """The server and model that a tool will use. `key` is empty if there is none; the tool may write into `folder`.

    `knows_tools` says whether the model's chat template has a place for tools. If not, Bough writes them at the beginning.
    """

    url: str
    model: str
    context_tokens: int
    key: str
    folder: Path
    knows_tools: bool


@dataclass(frozen=True)
class ToolCommand:
    """How to start a tool: variables to set and to `unset`, and the `folder` to start it in."""

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    unset: Sequence[str] = ()
    folder: Path | None = None

    def write_shell(self) -> list[str]:
        """Lines for a POSIX shell that do the same."""
        lines = [f"unset {' '.join(self.unset)}"] if self.unset else []
        lines += [f"export {name}={shlex.quote(value)}" for name, value in self.env.items()]
        if self.folder is not None:
            folder = shlex.quote(str(self.folder))
            lines.append(f"mkdir -p {folder} && cd {folder}")
        return [*lines, shlex.join(self.command)]


@dataclass(frozen=True)
class Tool:
    """A tool: its program, how to install it, and how to start it.

    It maps the names in `own_names` to the served model by itself, and expects `prefix` before all other names.
    """

    name: str
    title: str
    program: str
    install: str
    prepare: Callable[[ServedModel], ToolCommand]
    is_agent: bool = True
    own_names: frozenset[str] = frozenset()
    prefix: str = ""


def _prepare_claude(served: ServedModel) -> ToolCommand:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    families = (f"ANTHROPIC_DEFAULT_{family}_MODEL" for family in _CLAUDE_FAMILIES)
    env = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key or _ANY_KEY,
        **dict.fromkeys((*models, *families), served.model),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(served.context_tokens),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with every request, at the very start of the prompt
        "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",  # a countdown
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if served.knows_tools:  # templates write the tools after the system text, where every changed file would show
        env["CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS"] = "1"
    elsewhere = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY")
    return ToolCommand(["claude", "--exclude-dynamic-system-prompt-sections"], env, elsewhere)


def _prepare_codex(served: ServedModel) -> ToolCommand:
    provider = {"name": "Bough", "base_url": f"{served.url}/v1", "wire_api": "responses"}
    if served.key:
        provider["env_key"] = "BOUGH_API_KEY"
    config: dict[str, object] = {f"model_providers.bough.{name}": value for name, value in provider.items()}
    config |= {"model_provider": "bough", "model_context_window": served.context_tokens}
    config |= {"web_search": "disabled", "features.multi_agent": False}  # tools of kinds that only OpenAI's server has
    flags = [word for name, value in config.items() for word in ("-c", f"{name}={json.dumps(value)}")]  # JSON is TOML here
    return ToolCommand(["codex", *flags, "--model", served.model], {"BOUGH_API_KEY": served.key} if served.key else {})


def _prepare_opencode(served: ServedModel) -> ToolCommand:
    limit = {"context": served.context_tokens, "output": served.context_tokens // _MOST_OUTPUT_SHARE}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Bough",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key or _ANY_KEY},
        "models": {served.model: {"name": served.model, "limit": limit}},
    }
    model = f"bough/{served.model}"
    config = {"provider": {"bough": provider}, "model": model, "small_model": model}
    return ToolCommand(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config, ensure_ascii=False)})


def _prepare_aider(served: ServedModel) -> ToolCommand:
    model, url = f"openai/{served.model}", f"{served.url}/v1"
    flags = ["--model", model, "--weak-model", model, "--openai-api-base", url, "--no-show-model-warnings"]
    return ToolCommand(["aider", *flags], {"OPENAI_API_BASE": url, "OPENAI_API_KEY": served.key or _ANY_KEY})


def _prepare_openwebui(served: ServedModel) -> ToolCommand:
    env = {
        "OPENAI_API_BASE_URLS": f"{served.url}/v1",
        "OPENAI_API_KEYS": served.key or _ANY_KEY,
        "ENABLE_OLLAMA_API": "False",  # it would list the same models twice
        "DEFAULT_MODELS": served.model,
        "ENABLE_PERSISTENT_CONFIG": "False",  # else only the first start would heed these variables
        "WEBUI_AUTH": "False",
        "DATA_DIR": str(served.folder),
    }
    if not served.knows_tools:  # its own tools would be thousands of tokens in every chat
        env["DEFAULT_MODEL_METADATA"] = json.dumps({"capabilities": {"builtin_tools": False}})
    command = ["open-webui", "serve", "--host", "127.0.0.1"]
    return ToolCommand(command, env, folder=served.folder)  # where it makes its secret key


_NPM = "npm install -g"
_INSTALL_AIDER = "python -m pip install aider-install && aider-install"
_CLAUDE_NAMES = frozenset({"default", "best", "opusplan", *(name.lower() for name in _CLAUDE_FAMILIES)})

TOOLS = {
    each.name: each
    for each in (
        Tool(
            "claude", "Claude Code", "claude", f"{_NPM} @anthropic-ai/claude-code", _prepare_claude, own_names=_CLAUDE_NAMES
        ),
        Tool("codex", "Codex", "codex", f"{_NPM} @openai/codex", _prepare_codex),
        Tool("opencode", "opencode", "opencode", f"{_NPM} opencode-ai", _prepare_opencode, prefix="bough/"),
        Tool("aider", "aider", "aider", _INSTALL_AIDER, _prepare_aider, prefix="openai/"),
        Tool("openwebui", "Open WebUI", "open-webui", "pip install open-webui", _prepare_openwebui, is_agent=False),
    )
}


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
    with find_client(settings, url) or Client(find_url(settings), settings.api_key) as client:
        served = _find_served(client, settings, tool, model)
        for note in _find_problems(client, tool, served, further or []):
            screen.note(note)
    start = tool.prepare(served)
    start = replace(start, command=[*start.command, *(further or [])])
    path = shutil.which(tool.program)
    if as_json:
        return screen.write_line(json.dumps(_describe(tool, served, start, path), indent=2, ensure_ascii=False))
    if prints or path is None:
        screen.write_lines(start.write_shell())
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
    screen.write_lines(align([("TOOL", "", "PROGRAM"), *rows], screen.width))
    return None


def _find_served(client: Client, settings: Settings, tool: Tool, model: str | None) -> ServedModel:
    """The server and one of its models that generates text. Raises BoughError if there is none."""
    about = client.get("/api/tags")  # refused if a key is missing; `/health` would only have fewer fields
    chosen = model or str(client.get("/health")["model"])
    shown = client.post("/api/show", model=chosen)
    if "completion" not in shown["capabilities"]:
        there = ", ".join(each["name"].removesuffix(":latest") for each in about["models"])
        raise RequestError(f"{chosen} does not generate text, so {tool.title} cannot use it; there are: {there}")
    context = next(value for key, value in shown["model_info"].items() if key.endswith(".context_length"))
    folder = settings.data_folder / "launch" / tool.name
    knows_tools, name = "tools" in shown["capabilities"], chosen.removesuffix(":latest")
    return ServedModel(client.url, name, int(context), settings.api_key or "", folder, knows_tools)


def _find_problems(client: Client, tool: Tool, served: ServedModel, further: Sequence[str]) -> Iterator[str]:
    """Warnings for a short context, and for a model in the tool's own arguments that the server does not have."""
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
    for word, following in zip_longest(args, args[1:]):
        flag, has_value, value = word.partition("=")
        if flag in _MODEL_FLAGS:
            return value if has_value else following
    return None


def _describe(tool: Tool, served: ServedModel, start: ToolCommand, path: str | None) -> Mapping[str, Any]:
    return {
        "tool": tool.name,
        "path": path,
        "install": tool.install,
        "url": served.url,
        "model": served.model,
        "context_tokens": served.context_tokens,
        **asdict(start),
        "folder": None if start.folder is None else str(start.folder),
    }


def _run(path: str, start: ToolCommand) -> None:
    env = {name: value for name, value in os.environ.items() if name not in start.unset} | dict(start.env)
    if start.folder is not None:
        start.folder.mkdir(parents=True, exist_ok=True)
        os.chdir(start.folder)
    sys.stdout.flush()
    os.execve(path, list(start.command), env)
