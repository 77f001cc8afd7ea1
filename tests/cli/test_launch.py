"""`bough launch`: tools are started with what they need to use a real server, or that is printed."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bough.cli.launch import TOOLS, ServedModel, ToolCommand
from bough.models import ModelFiles
from tests.server.in_process import make_words_folder, serving
from tests.server.servers import Address

EXIT_CODE = 7
SERVED = ServedModel("http://box:1", "qwen3:4b", 32_768, "", Path("/folder"), knows_tools=True)
WITH_KEY = replace(SERVED, key="a key")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    home = tmp_path_factory.mktemp("launch")
    with serving(ModelFiles("tiny", make_words_folder(home / "tiny")), home, aliases="claude-*=tiny") as server:
        yield server


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder of programs. Those that `add_program` makes tell how they were started."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def add_program(folder: Path, name: str) -> Path:
    tell = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]))"
    (folder / name).write_text(f"#!{sys.executable}\n{tell}; sys.exit({EXIT_CODE})\n")
    (folder / name).chmod(0o700)
    return folder / name


def run(command: list[str]) -> tuple[list[str], dict[str, str], str, str]:
    """The arguments, the variables and the folder that a started tool has told, and the notes before it."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_CODE, done.stderr
    args, env, folder = json.loads(done.stdout)
    return args, env, folder, done.stderr


def test_a_tool_takes_the_place_of_the_command_and_asks_the_server_for_its_model(served, programs, home, monkeypatch):
    add_program(programs, "claude")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the key of another server")

    args, env, folder, notes = run(
        [sys.executable, "-m", "bough", "launch", "claude", "--url", served.url, "--", "-p", "it's me", "--model", "opus"]
    )

    assert args == ["--exclude-dynamic-system-prompt-sections", "-p", "it's me", "--model", "opus"]
    assert (env["ANTHROPIC_BASE_URL"], env["CLAUDE_CODE_ATTRIBUTION_HEADER"]) == (served.url, "0")
    assert {value for name, value in env.items() if name.endswith("_MODEL")} == {"tiny"}
    assert env["ANTHROPIC_AUTH_TOKEN"] and "ANTHROPIC_API_KEY" not in env
    assert folder == str(Path.cwd())
    assert notes.startswith(
        "warning: tiny has a context of 2,048 tokens; Claude Code needs 16,384 or more for its instructions"
    )
    assert notes.count("\n") == 1


def test_a_tool_that_writes_files_is_started_in_a_folder_of_ours(served, programs, home):
    add_program(programs, "open-webui")

    args, env, folder, notes = run([sys.executable, "-m", "bough", "launch", "openwebui", "--url", served.url])

    assert args == ["serve", "--host", "127.0.0.1"]
    assert folder == env["DATA_DIR"] == str(home / "data" / "launch" / "openwebui")
    assert notes == ""


def test_a_tool_that_is_not_installed_is_an_error_with_a_hint_and_the_lines_that_start_it(invoke, served, programs):
    result = invoke("launch", "aider", "--url", served.url)

    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("aider --model openai/tiny ")
    assert "error: aider is not installed: `python -m pip install aider-install && aider-install`" in result.stderr


@pytest.mark.parametrize("name", TOOLS)
def test_every_tool_is_printed_with_the_server_and_its_model(invoke, served, programs, name):
    add_program(programs, TOOLS[name].program)

    printed = invoke("launch", name, "--print", "--url", served.url, "--", "more").stdout
    found = json.loads(invoke("launch", name, "--json", "--url", served.url, "--", "more").stdout)

    assert served.url in printed and "tiny" in printed
    assert printed.splitlines()[-1].endswith(" more")
    assert (found["url"], found["model"], found["context_tokens"]) == (served.url, "tiny", 2048)
    assert (found["command"][-1], found["path"]) == ("more", str(programs / TOOLS[name].program))


@pytest.mark.parametrize(
    ("args", "is_told"),
    [
        (["codex", "--", "--model=gpt-9"], True),
        (["codex", "--", "-m", "gpt-9"], True),
        (["aider", "--", "--model", "openai/gpt-9"], True),
        (["aider", "--", "--model", "openai/tiny"], False),
        (["claude", "--", "--model", "claude-sonnet-9"], False),  # an alias of the server
        (["claude", "--", "--model", "sonnet"], False),  # the tool turns it into the served model
    ],
)
def test_a_model_in_the_arguments_that_the_server_does_not_have_is_told(invoke, served, programs, args, is_told):
    result = invoke("launch", "--print", "--url", served.url, *args)

    assert ("the server has no model 'gpt-9': `bough cp tiny gpt-9`" in result.stderr) == is_told


def test_a_model_that_is_not_there_is_refused(invoke, served):
    result = invoke("launch", "claude", "--model", "nobody", "--url", served.url)

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: model 'nobody' not found; there are: ")


def test_without_a_tool_all_are_listed_and_no_server_is_needed(invoke, programs):
    path = add_program(programs, "codex")

    lines = invoke("launch").stdout.splitlines()

    assert [line.split()[0] for line in lines] == ["TOOL", *TOOLS]
    assert lines[2].endswith(str(path))
    assert lines[1].endswith("not installed: npm install -g @anthropic-ai/claude-code")
    assert [each["path"] for each in json.loads(invoke("launch", "--json").stdout)] == [None, str(path), None, None, None]


def test_an_unknown_tool_is_an_error_that_lists_them(invoke):
    result = invoke("launch", "emacs")

    assert result.exit_code == 1
    assert result.stderr == (
        "error: 'emacs' is no tool that can be launched; there are: claude, codex, opencode, aider, openwebui\n"
    )


def test_without_a_server_one_line_says_how_to_start_one(invoke, monkeypatch):
    monkeypatch.setenv("BOUGH_PORT", "9")

    result = invoke("launch", "claude", "--print")

    assert (result.exit_code, result.stderr) == (1, "error: no server at http://127.0.0.1:9; `bough serve` starts one\n")


def codex_config(start: ToolCommand) -> dict[str, Any]:
    flags = [value for flag, value in zip(start.command, start.command[1:], strict=False) if flag == "-c"]
    return tomllib.loads("\n".join(flags))


def test_codex_gets_a_provider_by_flags_that_are_toml():
    config = codex_config(TOOLS["codex"].prepare(SERVED))

    provider = config["model_providers"][config["model_provider"]]
    assert provider == {"name": "Bough", "base_url": "http://box:1/v1", "wire_api": "responses"}
    assert config["model_context_window"] == 32_768
    assert (config["web_search"], config["features"]) == ("disabled", {"multi_agent": False})


def test_opencode_gets_a_provider_whose_model_has_limits():
    config = json.loads(TOOLS["opencode"].prepare(SERVED).env["OPENCODE_CONFIG_CONTENT"])

    provider = config["provider"]["bough"]
    assert config["model"] == config["small_model"] == "bough/qwen3:4b"
    assert provider["options"]["baseURL"] == "http://box:1/v1"
    assert provider["models"]["qwen3:4b"]["limit"] == {"context": 32_768, "output": 8_192}


@pytest.mark.parametrize("name", TOOLS)
def test_a_key_goes_by_a_variable_and_never_into_the_arguments(name):
    start = TOOLS[name].prepare(WITH_KEY)

    assert any("a key" in value for value in start.env.values())
    assert not any("a key" in word for word in start.command)


def test_claude_code_is_kept_from_changing_its_system_text():
    with_tools, without = (TOOLS["claude"].prepare(replace(SERVED, knows_tools=each)) for each in (True, False))

    assert with_tools.env.items() >= {"CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS": "1"}.items()
    assert "CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS" not in without.env  # there the tools come first
    for start in (with_tools, without):
        assert (start.env["CLAUDE_CODE_TOTAL_TOKENS_REMINDER"], start.env["CLAUDE_CODE_ATTRIBUTION_HEADER"]) == ("off", "0")
        assert start.command == ["claude", "--exclude-dynamic-system-prompt-sections"]


def test_open_webuis_own_tools_are_off_for_a_model_without_tools():
    without, with_tools = (TOOLS["openwebui"].prepare(replace(SERVED, knows_tools=each)) for each in (False, True))

    assert json.loads(without.env["DEFAULT_MODEL_METADATA"]) == {"capabilities": {"builtin_tools": False}}
    assert "DEFAULT_MODEL_METADATA" not in with_tools.env


def test_printed_lines_start_a_tool_as_the_command_would(programs, tmp_path):
    path = add_program(programs, "tool")
    folder = tmp_path / "a folder's"
    start = ToolCommand([str(path), "--flag", 'it\'s "so"; $HOME'], {"NAME": "a'b $PATH\nc"}, ["OTHER"], folder)

    args, env, where, _ = run(
        ["/bin/sh", "-c", "\n".join(["PATH=/bin:/usr/bin OTHER=1; export OTHER", *start.write_shell()])]
    )

    assert (args, where) == (["--flag", 'it\'s "so"; $HOME'], str(folder))
    assert env["NAME"] == "a'b $PATH\nc" and "OTHER" not in env
