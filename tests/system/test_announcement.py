"""How commands find a running server, and are not led to another program."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from bough.system.announcement import ANNOUNCEMENT_FILE, Announcement, announcing, make_announcement, read_announcement


def test_a_server_is_found_while_it_is_announced_and_not_afterwards(tmp_path: Path) -> None:
    announcement = make_announcement("http://127.0.0.1:1")

    with announcing(tmp_path, announcement):
        assert read_announcement(tmp_path) == announcement
        assert stat.S_IMODE((tmp_path / ANNOUNCEMENT_FILE).stat().st_mode) == 0o600

    assert read_announcement(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_ends_leaves_the_announcement_of_its_successor(tmp_path: Path) -> None:
    successor = make_announcement("http://127.0.0.1:2")

    with announcing(tmp_path, make_announcement("http://127.0.0.1:1")):
        (tmp_path / ANNOUNCEMENT_FILE).write_text(json.dumps(vars(successor)))

    assert read_announcement(tmp_path) == successor


def test_a_process_that_has_died_is_not_found(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (tmp_path / ANNOUNCEMENT_FILE).write_text(json.dumps({"pid": child.pid, "url": "http://127.0.0.1:1", "nonce": "n"}))

    assert read_announcement(tmp_path) is None


def test_a_damaged_announcement_is_none(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"pid": "x", "url": 1, "nonce": 2}', '{"pid": -1, "url": "u", "nonce": "n"}', "\x00"):
        (tmp_path / ANNOUNCEMENT_FILE).write_text(text)
        assert read_announcement(tmp_path) is None


def test_only_who_knows_the_nonce_can_prove_it(tmp_path: Path) -> None:
    ours, other = Announcement(os.getpid(), "u", "one"), Announcement(os.getpid(), "u", "two")

    assert ours.prove("challenge") != other.prove("challenge")
    assert ours.prove("challenge") != ours.prove("another")


def test_a_server_that_ends_announces_the_one_before_it_again_if_that_still_runs(tmp_path: Path) -> None:
    first, second = make_announcement("http://127.0.0.1:1"), make_announcement("http://127.0.0.1:2")

    with announcing(tmp_path, first):
        with announcing(tmp_path, second):
            assert read_announcement(tmp_path) == second
        assert read_announcement(tmp_path) == first
        assert stat.S_IMODE((tmp_path / ANNOUNCEMENT_FILE).stat().st_mode) == 0o600

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_others_could_have_written_is_not_used(tmp_path: Path) -> None:
    announcement = make_announcement("http://127.0.0.1:1")
    file = tmp_path / ANNOUNCEMENT_FILE

    with announcing(tmp_path, announcement):
        file.chmod(0o620)
        assert read_announcement(tmp_path) is None
        file.chmod(0o602)
        assert read_announcement(tmp_path) is None
        file.chmod(0o600)
        assert read_announcement(tmp_path) == announcement


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who can give a file to another user")
def test_a_file_of_another_user_is_not_used(tmp_path: Path) -> None:
    with announcing(tmp_path, make_announcement("http://127.0.0.1:1")):
        os.chown(tmp_path / ANNOUNCEMENT_FILE, 12_345, -1)

        assert read_announcement(tmp_path) is None


def test_a_link_or_a_pipe_is_not_read(tmp_path: Path) -> None:
    file, elsewhere = tmp_path / ANNOUNCEMENT_FILE, tmp_path / "elsewhere"
    elsewhere.write_text(json.dumps(vars(make_announcement("http://127.0.0.1:1"))))
    elsewhere.chmod(0o600)

    file.symlink_to(elsewhere)
    assert read_announcement(tmp_path) is None
    file.unlink()
    os.mkfifo(file, 0o600)
    assert read_announcement(tmp_path) is None  # and does not wait for somebody to write into it
