"""The command as a whole: what it says of itself, and what becomes of errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bough.cli.main import COMMANDS
from bough.errors import BoughError, EngineError
from bough.system.distribution import VERSION

FULL = Path("/dev/full")


def raising(error: BaseException):
    def load(*args, **settings):
        raise error

    return load


def test_the_version_is_that_of_the_package(invoke):
    assert invoke("--version").stdout == f"bough {VERSION}\n"


def test_on_windows_one_line_says_what_to_do():
    """Nothing that is imported before that line may need what Windows lacks."""
    script = (
        "import sys, rich.console, typer\n"
        "sys.modules |= dict.fromkeys(('fcntl', 'resource', 'readline', 'termios'))\n"
        "sys.platform = 'win32'\n"
        "from bough.cli.main import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stderr == "error: Bough runs on Linux and macOS; on Windows install it in WSL2\n"


def test_help_lists_every_command(invoke):
    result = invoke("--help")

    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("run", "pull", "list", "show", "rm", "bench"))


def test_an_error_is_one_line_without_a_traceback(invoke, monkeypatch):
    monkeypatch.setattr("bough.cli.backends.local.load", raising(EngineError("it broke [in two]")))

    result = invoke("run", "hello you")

    assert result.exit_code == 1
    assert result.stderr == "error: it broke [in two]\n"


def test_an_error_of_the_system_is_one_line_without_a_traceback(invoke, monkeypatch):
    monkeypatch.setattr("bough.cli.backends.local.load", raising(OSError(28, "No space left on device", "history")))

    result = invoke("run", "hello you")

    assert result.exit_code == 1
    assert result.stderr == "error: [Errno 28] No space left on device: 'history'\n"


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_output_to_a_full_disk_is_one_line(home):
    with FULL.open("w") as full:
        done = subprocess.run([sys.executable, "-m", "bough", "list", "--json"], stdout=full, stderr=subprocess.PIPE)

    assert done.returncode == 1
    assert done.stderr == b"error: [Errno 28] No space left on device\n"


def test_debug_shows_where_an_error_came_from(invoke, monkeypatch):
    monkeypatch.setattr("bough.cli.backends.local.load", raising(EngineError("it broke")))

    assert isinstance(invoke("--debug", "run", "hello you").exception, BoughError)


def test_ctrl_c_exits_with_130_and_says_nothing(invoke, monkeypatch):
    monkeypatch.setattr("bough.cli.backends.local.load", raising(KeyboardInterrupt()))

    result = invoke("run", "hello you")

    assert (result.exit_code, result.stderr) == (130, "")


def test_an_unknown_option_is_bad_usage(invoke):
    assert invoke("list", "--nonsense").exit_code == 2


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself_and_no_switch_shows_a_type(invoke, name):
    own = invoke(name, "--help", env={"COLUMNS": "300"}).stdout

    assert COMMANDS[name][1].removesuffix(".") in own
    assert "--help" in own and "<bool>" not in own


def test_a_misspelt_command_is_answered_with_the_one_that_was_meant(invoke):
    result = invoke("rn")

    assert result.exit_code == 2
    assert "No such command 'rn'. Did you mean 'run'?" in result.stderr


def test_help_imports_no_command(home):
    code = "import sys; from bough.cli.main import app; app(['--help'], standalone_mode=False); "
    code += "print({'httpx', 'bough.models', 'bough.cache', 'bough.config'} & set(sys.modules), file=sys.stderr)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (done.stderr, "explain" in done.stdout) == ("set()\n", True)


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["list"]])
def test_quick_commands_load_neither_torch_nor_transformers(home, words):
    code = (
        "import sys; from bough.cli.main import app; app(sys.argv[1:], standalone_mode=False); "
        "print({'torch', 'transformers', 'matplotlib'} & set(sys.modules), file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)

    assert done.stderr.splitlines()[-1] == "set()"


def test_a_reader_that_goes_away_causes_no_noise(home):
    command = [sys.executable, "-m", "bough", "list", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()

        assert process.stderr.read() == b""
