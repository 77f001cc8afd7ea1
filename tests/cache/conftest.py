"""A fresh folder to open disks on, for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bough.cache.disk import Disk
from tests.cache.disk.shelf import Shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "trees" / "tree")


@pytest.fixture
def disk(shelf: Shelf) -> Iterator[Disk]:
    """An open disk, whose books must be right in the end."""
    with shelf.open() as disk:
        yield disk
        disk.check()
        assert disk.flush(10) or disk.counts.failed_writes
        disk.check()
        assert disk.used_bytes == shelf.page_bytes()
