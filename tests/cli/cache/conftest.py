"""Trees on disk for the tests of `bough cache`: `grow` makes one; the functions fill, read and damage it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bough.cache.admin.trees import TreeInfo, list_trees
from bough.cache.disk import Disk
from bough.cache.tree.address import POINT, Address
from bough.config import load_settings
from bough.models.fingerprint import tree_folder
from bough.tokens import cut, pack
from tests.cache.disk.shelf import get, put_point

PAGE_TOKENS = 4
PRINT_1, PRINT_2 = "1f" * 32, "2f" * 32

Grow = Callable[..., Path]


@pytest.fixture
def trees(home: Path) -> Path:
    return home / "cache" / "trees"


@pytest.fixture
def grow(home: Path) -> Grow:
    """Makes a tree with some pages and one state, and returns its folder."""

    def make(model: str = "small", fingerprint: str = PRINT_1, *, num_pages: int = 3, salt: str = "") -> Path:
        folder = tree_folder(load_settings(), model, fingerprint)
        with open_disk(folder, model, fingerprint) as disk:
            fill(disk, num_pages, salt)
        return folder

    return make


def open_disk(folder: Path, model: str = "small", fingerprint: str = PRINT_1) -> Disk:
    return Disk(folder, fingerprint=fingerprint, model=model, page_tokens=PAGE_TOKENS, budget_bytes=2**30, floor_bytes=0)


def fill(disk: Disk, num_pages: int, salt: str = "") -> None:
    tokens = pack(range(1, num_pages * PAGE_TOKENS + 1))
    root = disk.root(salt)
    digests = disk.digests(root, tokens)
    end = num_pages * PAGE_TOKENS
    for page in range(num_pages):
        start = page * PAGE_TOKENS
        rows = cut(tokens, start, start + PAGE_TOKENS)
        put(disk, Address(root, digests[page], rows, 0, start, start + PAGE_TOKENS), content(page))
    last = cut(tokens, end - PAGE_TOKENS)
    put(disk, Address(root, digests[num_pages - 1], last, 1, end, end), b"state" * 20)
    point = Address(root, digests[num_pages - 1], last, POINT, end, end)
    put_point(disk, point, reason=1, is_kept=True, is_superseded=False, last_used=1.0)
    assert disk.flush(10)


def put(disk: Disk, address: Address, payload: bytes) -> None:
    disk.put(address, lambda: payload, len(payload))


def content(page: int) -> bytes:
    return bytes([page]) * 1000


def contents(folder: Path, salt: str = "", fingerprint: str = PRINT_1) -> list[bytes]:
    """What a salt has in a tree, in the order of the prefix."""
    with open_disk(folder, fingerprint=fingerprint) as disk:
        return [bytes(get(disk, disk_file)) for disk_file in disk.files() if disk_file.address.root == disk.root(salt)]


def page_files(folder: Path) -> list[Path]:
    return sorted(file for file in (folder / "pages").rglob("*") if file.is_file())


def damage(file: Path) -> None:
    found = bytearray(file.read_bytes())
    found[-1] ^= 1
    file.write_bytes(found)


def only_tree(trees: Path) -> TreeInfo:
    (tree,) = list_trees(trees)
    return tree
