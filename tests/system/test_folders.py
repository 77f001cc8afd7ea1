"""Whether a folder can be written."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from bough.system.folders import why_not_writable


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
