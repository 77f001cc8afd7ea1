"""Whether a folder can be written, and files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from bough.system.folders import why_not_writable, write_private


def test_a_folder_that_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    assert why_not_writable(tmp_path) == ""
    assert why_not_writable(tmp_path / "not" / "yet" / "made") == ""
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    assert why_not_writable(tmp_path / "file") == why_not_writable(tmp_path / "file" / "folder") == "Not a directory"


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_the_reason_is_that_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(**options: object) -> object:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)

    assert why_not_writable(tmp_path) == os.strerror(number)


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_private(tmp_path / "file", "before")

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_private(tmp_path / "file", "after", ".writing-")

    assert (tmp_path / "file").read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
