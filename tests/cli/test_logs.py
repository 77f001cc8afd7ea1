"""`bough logs`: what the server on this machine has logged."""

from __future__ import annotations

import logging
import signal
import stat
import subprocess
import sys

import pytest

from bough.cli.logs import log_name
from bough.server import log_format
from bough.server.log_format import set_up_logs, writing_log_file

log = logging.getLogger("bough.test")


@pytest.fixture
def file(home):
    return home / "cache" / "logs" / log_name(11435)


def test_what_is_logged_is_in_a_file_that_only_its_owner_can_read(invoke, file):
    set_up_logs(as_json=False)
    with writing_log_file(file, as_json=False):
        for number in range(5):
            log.info("request %d", number)
        try:
            raise ValueError("broken")
        except ValueError:
            log.exception("it failed")
    log.info("after it was closed")

    lines = invoke("logs").stdout.splitlines()
    last = invoke("logs", "-n", "2").stdout.splitlines()

    assert [line.partition(" request ")[2] for line in lines[:5]] == list("01234")
    assert "error: it failed" in lines[5] and lines[-1] == "ValueError: broken"
    assert last == lines[-2:] and "after" not in lines[-1]
    assert (stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (0o600, 0o700)


def test_a_full_file_is_replaced_and_its_lines_are_still_shown(invoke, file, monkeypatch):
    monkeypatch.setattr(log_format, "LOG_FILE_BYTES", 200)
    with writing_log_file(file, as_json=True):
        for number in range(5):
            log.warning("warning %d", number)

    lines = invoke("logs", "--port", "11435").stdout.splitlines()

    assert len(list(file.parent.iterdir())) == 3
    assert [f"warning {number}" in line for number, line in enumerate(lines, start=5 - len(lines))] == [True] * len(lines)


def test_without_a_log_the_folder_is_named(invoke, file):
    result = invoke("logs", "--port", "1")

    assert (result.exit_code, result.stderr) == (
        1,
        f"error: no server has written a log in {file.parent}; `bough serve` does\n",
    )


def test_a_log_is_followed_into_the_next_file_until_ctrl_c(file):
    file.parent.mkdir(parents=True)
    file.write_text("first\nhal")
    command = [sys.executable, "-m", "bough", "logs", "-f", "-n", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"first\n"
        with file.open("a") as output:
            output.write("f\n")
        assert process.stdout.readline() == b"half\n"
        with file.open("a") as output:
            output.write("the rest\n")
        file.rename(file.with_name("older"))
        file.write_text("the next file\n")
        assert process.stdout.readline() == b"the rest\n"
        assert process.stdout.readline() == b"the next file\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
