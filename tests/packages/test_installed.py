"""The wheel in an environment of its own, away from the repository: the command, and a server with its page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bough.config import load_settings
from bough.models import ModelFiles

pytestmark = [pytest.mark.package, pytest.mark.model]

WEB = Path(__file__).parents[2] / "bough" / "server" / "web"


class Installed:
    """An environment with the wheel in it. Its commands see the models of this user, and nothing else of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        hidden = ("PYTHONPATH", "VIRTUAL_ENV")
        self.environ = {name: text for name, text in os.environ.items() if name not in hidden and "BOUGH_" not in name}
        self.environ |= {
            "HOME": str(folder / "home"),
            "BOUGH_DATA_FOLDER": str(load_settings().data_folder),
            "BOUGH_CACHE_FOLDER": str(folder / "cache"),
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [str(self.folder / "venv" / "bin" / "bough"), *words]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=self.folder, env=self.environ, text=True, **output)  # type: ignore[call-overload]

    def run(self, *words: str) -> str:
        with self.start(*words) as process:
            output, _ = process.communicate()
        assert process.returncode == 0, output
        return output


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path, smollm2_files: ModelFiles) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    (folder / "home").mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    pip = [str(folder / "venv" / "bin" / "python"), "-m", "pip", "install", "--quiet", f"{wheel}[torch,server]"]
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(pip, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Installed(folder)


def test_the_command_tells_its_version(installed: Installed, wheel: Path) -> None:
    assert wheel.name.split("-")[1] in installed.run("version")


def test_doctor_finds_the_kernels_and_no_problem(installed: Installed) -> None:
    report = json.loads(installed.run("doctor", "--json"))
    assert [each for each in report["findings"] if each["level"] == "problem"] == []
    (kernels,) = (each for each in report["findings"] if each["topic"] == "kernels")
    assert kernels["level"] == "ok"


def test_a_question_is_answered(installed: Installed) -> None:
    assert "4" in installed.run("run", "--temperature", "0", "What is 2+2?")


@pytest.fixture(scope="module")
def url(installed: Installed) -> Iterator[str]:
    """A server, which must end well when it is asked to."""
    with installed.start("serve", "--port", "0") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        yield next(found.group() for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate()
        assert process.returncode == 0, rest


def test_the_server_is_healthy(url: str) -> None:
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200


def test_a_browser_gets_the_page_and_all_its_files(url: str) -> None:
    page = httpx.get(url, headers={"Accept": "text/html"})
    assert page.headers["content-type"].startswith("text/html") and page.content == (WEB / "index.html").read_bytes()
    files = [file for file in WEB.rglob("*") if file.is_file()]
    assert [
        file for file in files if httpx.get(f"{url}/web/{file.relative_to(WEB).as_posix()}").content != file.read_bytes()
    ] == []


def test_clients_get_an_answer(url: str) -> None:
    ask = {"model": "smollm2", "stream": False, "options": {"temperature": 0, "num_predict": 20}}
    answer = httpx.post(f"{url}/api/chat", json=ask | {"messages": [{"role": "user", "content": "Hi"}]}, timeout=120)
    assert answer.status_code == 200 and answer.json()["message"]["content"]
