"""The tools that `bough launch` starts, and what each needs to use a server: variables, flags, a folder. Pure.

No file of a tool is written or changed: what is set here holds for the process that is started, and for nothing else. Every
tool is told the name of the served model, so that no request asks for a name that the server does not have.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

AGENT_CONTEXT_TOKENS = 16_384
"""Below this, the instructions of a coding agent and a few files do not fit."""

_ANY_KEY = "bough"  # for tools that insist on a key where the server wants none
_CLAUDE_FAMILIES = ("OPUS", "SONNET", "HAIKU", "FABLE")
_MOST_OUTPUT_SHARE = 4  # an answer may take a quarter of the context, as it does without a limit


@dataclass(frozen=True)
class Served:
    """What a tool is pointed at. `key` is empty if there is none; `folder` is where a tool may keep what it writes."""

    url: str
    model: str
    context_tokens: int
    key: str
    folder: Path


@dataclass(frozen=True)
class Start:
    """How a tool is started. `unset` are variables that would lead it elsewhere; `folder` is where it is started."""

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    unset: Sequence[str] = ()
    folder: Path | None = None

    def add(self, args: Sequence[str]) -> Start:
        """The same with further arguments."""
        return Start([*self.command, *args], self.env, self.unset, self.folder)

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
    """A tool: its program, how it is installed, and how it is started.

    `own_names` are names of models that it knows itself and turns into the served one; `prefix` stands before other names.
    """

    name: str
    title: str
    program: str
    install: str
    prepare: Callable[[Served], Start]
    is_agent: bool = True
    own_names: frozenset[str] = frozenset()
    prefix: str = ""


def _prepare_claude(served: Served) -> Start:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    families = (f"ANTHROPIC_DEFAULT_{family}_MODEL" for family in _CLAUDE_FAMILIES)
    env = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key or _ANY_KEY,
        **dict.fromkeys((*models, *families), served.model),
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(served.context_tokens),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it changes with every request, at the very start of the prompt
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    elsewhere = ("ANTHROPIC_API_KEY", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY")
    return Start(["claude"], env, elsewhere)


def _prepare_codex(served: Served) -> Start:
    provider = {"name": "Bough", "base_url": f"{served.url}/v1", "wire_api": "responses"}
    if served.key:
        provider["env_key"] = "BOUGH_API_KEY"
    config: dict[str, object] = {f"model_providers.bough.{name}": value for name, value in provider.items()}
    config |= {"model_provider": "bough", "model_context_window": served.context_tokens}
    config |= {"web_search": "disabled", "features.multi_agent": False}  # tools of kinds that only OpenAI's server has
    flags = [word for name, value in config.items() for word in ("-c", f"{name}={json.dumps(value)}")]  # JSON is TOML here
    return Start(["codex", *flags, "--model", served.model], {"BOUGH_API_KEY": served.key} if served.key else {})


def _prepare_opencode(served: Served) -> Start:
    limit = {"context": served.context_tokens, "output": served.context_tokens // _MOST_OUTPUT_SHARE}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Bough",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key or _ANY_KEY},
        "models": {served.model: {"name": served.model, "limit": limit}},
    }
    model = f"bough/{served.model}"
    config = {"provider": {"bough": provider}, "model": model, "small_model": model}
    return Start(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(config, ensure_ascii=False)})


def _prepare_aider(served: Served) -> Start:
    model, url = f"openai/{served.model}", f"{served.url}/v1"
    flags = ["--model", model, "--weak-model", model, "--openai-api-base", url, "--no-show-model-warnings"]
    return Start(["aider", *flags], {"OPENAI_API_BASE": url, "OPENAI_API_KEY": served.key or _ANY_KEY})


def _prepare_openwebui(served: Served) -> Start:
    env = {
        "OPENAI_API_BASE_URLS": f"{served.url}/v1",
        "OPENAI_API_KEYS": served.key or _ANY_KEY,
        "ENABLE_OLLAMA_API": "False",  # it would list the same models twice
        "DEFAULT_MODELS": served.model,
        "ENABLE_PERSISTENT_CONFIG": "False",  # else only the first start would heed these variables
        "WEBUI_AUTH": "False",
        "DATA_DIR": str(served.folder),
    }
    return Start(["open-webui", "serve", "--host", "127.0.0.1"], env, folder=served.folder)  # its secret key is made there


_CLAUDE_NAMES = frozenset({"default", "best", "opusplan", *(name.lower() for name in _CLAUDE_FAMILIES)})

TOOLS = {
    each.name: each
    for each in (
        Tool(
            "claude",
            "Claude Code",
            "claude",
            "npm install -g @anthropic-ai/claude-code",
            _prepare_claude,
            own_names=_CLAUDE_NAMES,
        ),
        Tool("codex", "Codex", "codex", "npm install -g @openai/codex", _prepare_codex),
        Tool("opencode", "opencode", "opencode", "npm install -g opencode-ai", _prepare_opencode, prefix="bough/"),
        Tool(
            "aider",
            "aider",
            "aider",
            "python -m pip install aider-install && aider-install",
            _prepare_aider,
            prefix="openai/",
        ),
        Tool("openwebui", "Open WebUI", "open-webui", "pip install open-webui", _prepare_openwebui, is_agent=False),
    )
}
"""Every tool by the name that the command takes."""
