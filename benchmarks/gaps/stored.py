"""Trees on disk that no request has computed, for views and archives: page files of the right size, with random content.

They are written under salts of their own, so that no request ever reads them as state. Files are synced all at once, which
takes a tenth of the time.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bough.cache.admin.trees import list_trees
from bough.cache.disk import Disk, page_files
from bough.cache.tree.address import Address
from bough.tokens import TOKEN_BYTES, pack

NUM_HEADS = 100
HEAD_TOKENS = 8
BRANCH_TOKENS = 2

_TREES = "trees"
_IDS = range(1000, 40_000)
_FLUSH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class TreeFacts:
    """What a tree on disk has to be for the server to take it as its own."""

    name: str
    model: str
    fingerprint: str
    page_tokens: int
    token_bytes: int  # of state, for each token


def read_facts(cache_folder: Path) -> TreeFacts:
    """The facts of the only tree in a cache folder, which holds at least one page."""
    (tree,) = list_trees(cache_folder / _TREES)
    facts = TreeFacts(tree.name, tree.model, tree.fingerprint, tree.page_tokens, 0)
    with open_tree(cache_folder, facts) as disk:
        page = next(file for file in disk.files() if file.address.start < file.address.end)
        token_bytes = disk.payload_bytes(page) // (page.address.end - page.address.start)
    return TreeFacts(tree.name, tree.model, tree.fingerprint, tree.page_tokens, token_bytes)


@contextmanager
def open_tree(cache_folder: Path, facts: TreeFacts) -> Iterator[Disk]:
    """The tree of this model in a cache folder, made if it is not there; its files are synced when it is closed."""
    with (
        _synced_at_the_end(),
        Disk(
            cache_folder / _TREES / facts.name,
            fingerprint=facts.fingerprint,
            model=facts.model,
            page_tokens=facts.page_tokens,
            budget_bytes=1 << 60,
            floor_bytes=0,
        ) as disk,
    ):
        yield disk


@contextmanager
def _synced_at_the_end() -> Iterator[None]:
    sync = page_files.sync
    page_files.sync = lambda descriptor: None
    try:
        yield
    finally:
        page_files.sync = sync
        os.sync()  # the system must not be busy writing them when the measuring begins


def write_conversations(cache_folder: Path, facts: TreeFacts, salt: str, total_bytes: int, pages_each: int = 8) -> int:
    """Write conversations of whole pages until they take so many bytes together; returns how many bytes that is."""
    chance, size = random.Random(4), facts.page_tokens * facts.token_bytes
    num_conversations = -(-total_bytes // (size * pages_each))
    with open_tree(cache_folder, facts) as disk:
        writing = _Writing(disk, salt, facts.token_bytes)
        for number in range(num_conversations):
            ids = [number, *chance.choices(_IDS, k=pages_each * facts.page_tokens - 1)]  # no two begin alike
            for start in range(0, len(ids), facts.page_tokens):
                writing.put(ids[: start + facts.page_tokens], start)
    return num_conversations * pages_each * size


def write_branches(cache_folder: Path, facts: TreeFacts, salt: str, num_nodes: int) -> None:
    """Write a tree of so many nodes: short heads, each with as many branches."""
    chance = random.Random(5)
    with open_tree(cache_folder, facts) as disk:
        writing = _Writing(disk, salt, facts.token_bytes)
        for number in range(NUM_HEADS):
            head = [number, *chance.choices(_IDS, k=HEAD_TOKENS - 1)]
            writing.put(head, 0)
            for branch in range(num_nodes // NUM_HEADS - 1):
                writing.put([*head, branch, *chance.choices(_IDS, k=BRANCH_TOKENS - 1)], HEAD_TOKENS)


class _Writing:
    """Pages of one salt on their way to a disk."""

    def __init__(self, disk: Disk, salt: str, token_bytes: int) -> None:
        self._disk, self._root, self._token_bytes = disk, disk.root(salt), token_bytes
        self._content = memoryview(os.urandom(disk.page_tokens * token_bytes))

    def put(self, ids: Sequence[int], start: int) -> None:
        """Write the page of the last ids of a path, from `start` on; they lie within one page."""
        disk, packed = self._disk, pack(ids)
        border = (len(ids) - 1) // disk.page_tokens
        before = disk.digests(self._root, packed)[border]
        tokens = packed[border * disk.page_tokens * TOKEN_BYTES :]
        num_bytes = (len(ids) - start) * self._token_bytes
        content = self._content[:num_bytes]
        disk.put(Address(self._root, before, tokens, 0, start, len(ids)), lambda: content, num_bytes)
        if disk.pending_bytes >= _FLUSH_BYTES:
            disk.flush()
