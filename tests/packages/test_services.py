"""The files in packaging/: each can be parsed, and starts the server with flags and settings that there are."""

from __future__ import annotations

import json
import os
import plistlib
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from bough.cli.main import app
from bough.config import Settings, load_settings

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
UNITS = sorted(PACKAGING.glob("systemd/*/bough.service"))


def read_unit(file: Path) -> dict[str, list[str]]:
    """The values of each key of the section Service; a key may come several times."""
    values: dict[str, list[str]] = {}
    section = file.read_text(encoding="utf-8").partition("[Service]\n")[2].partition("\n[")[0]
    for line in section.splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            values.setdefault(key, []).append(value)
    return values


def read_compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((PACKAGING / "compose.yaml").read_text(encoding="utf-8"))
    return found


def read_steps() -> list[tuple[str, str]]:
    """The instructions of the Containerfile, each with its arguments."""
    text = (PACKAGING / "Containerfile").read_text(encoding="utf-8")
    joined = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")
    return [
        (step, " ".join(rest.split())) for step, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def expect_serve(words: list[str]) -> None:
    """These words must start a server: `bough serve` with flags that it has."""
    assert Path(words[0]).name == "bough" and words[1] == "serve", words
    group: Any = typer.main.get_command(app)
    serve = group.get_command(None, "serve")
    serve.make_context("serve", words[2:])


def settings_in(environ: dict[str, str]) -> Settings:
    """What the variables that begin with BOUGH_ set. An unknown name or a value out of range is an error."""
    ours = {name: value for name, value in environ.items() if name.startswith("BOUGH_")}
    assert ours
    return load_settings(environ=ours, file=Path(os.devnull))


def test_the_container_listens_for_other_hosts_and_keeps_all_in_its_volume() -> None:
    steps = read_steps()
    words = shlex.split(next(rest for step, rest in steps if step == "ENV"))
    settings = settings_in(dict(word.split("=", 1) for word in words))
    (volume,) = (rest for step, rest in steps if step == "VOLUME")
    assert settings.host == "0.0.0.0"
    assert settings.data_folder.is_relative_to(volume) and settings.cache_folder.is_relative_to(volume)
    assert ("EXPOSE", str(settings.port)) in steps and ("USER", "bough") in steps


def test_the_container_starts_a_server() -> None:
    commands = {step: rest for step, rest in read_steps() if step in ("ENTRYPOINT", "CMD")}
    expect_serve([*json.loads(commands["ENTRYPOINT"]), *json.loads(commands["CMD"])])


def test_the_container_installs_the_torch_that_the_project_asks_for() -> None:
    (wanted,) = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"][
        "torch"
    ]
    assert any(f"'{wanted}'" in rest for step, rest in read_steps() if step == "RUN")


def test_what_the_container_is_built_from_reaches_it() -> None:
    sent = [line for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")]
    assert {each[1:] for each in sent} == {"bough", "pyproject.toml", "setup.py", "README.md", "LICENSE"}
    assert all((ROOT / each[1:]).exists() for each in sent)


def test_open_webui_reaches_bough_by_a_name_that_it_answers_to() -> None:
    services = read_compose()["services"]
    bough, webui = services["bough"], services["open-webui"]
    settings = settings_in(bough["environment"])
    host, port = re.fullmatch(r"http://(\w+):(\d+)", webui["environment"]["OLLAMA_BASE_URL"]).groups()  # type: ignore[union-attr]
    assert host in services and settings.allowed_hosts == host and int(port) == settings.port
    assert (PACKAGING / bough["build"]["context"] / bough["build"]["dockerfile"]).exists()


def test_compose_opens_ports_to_this_machine_alone() -> None:
    ports = [port for service in read_compose()["services"].values() for port in service["ports"]]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.parent.name)
def test_a_unit_starts_a_server_that_has_time_to_end(file: Path) -> None:
    unit = read_unit(file)
    expect_serve(shlex.split(unit["ExecStart"][0]))
    assert int(unit["TimeoutStopSec"][0]) > Settings().stop_after
    assert unit["NoNewPrivileges"] == ["yes"]


def test_the_unit_of_a_machine_keeps_all_in_folders_that_systemd_makes() -> None:
    unit = read_unit(PACKAGING / "systemd" / "system" / "bough.service")
    settings_in(dict(each.split("=", 1) for each in unit["Environment"]))
    assert "BOUGH_DATA_FOLDER=%S/bough" in unit["Environment"] and unit["StateDirectory"] == ["bough"]
    assert "BOUGH_CACHE_FOLDER=%C/bough" in unit["Environment"] and unit["CacheDirectory"] == ["bough"]
    assert unit["ProtectSystem"] == ["strict"] and unit["DynamicUser"] == ["yes"]


def test_launchd_starts_a_server_that_has_time_to_end() -> None:
    agent = plistlib.loads((PACKAGING / "launchd" / "bough.plist").read_bytes())
    shell, _, script = agent["ProgramArguments"]
    words = shlex.split(script.partition(">>")[0])
    assert shell == "/bin/sh" and words[0] == "exec"
    expect_serve(words[1:])
    assert agent["ExitTimeOut"] > Settings().stop_after and agent["Umask"] == 0o077
