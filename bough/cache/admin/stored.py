"""A tree on disk, looked at without its model: restored from the index, as the model's process would, and never changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.cache.disk import Disk, NotOwner
from bough.cache.disk.folder import translate_errors
from bough.cache.disk.index import open_read_only, read_meta
from bough.cache.disk.rows import decode_groups
from bough.cache.prefix_cache import PrefixCache
from bough.cache.residency import Tiers
from bough.cache.tree.address import DiskFile
from bough.cache.tree.state import Group, Kind


@dataclass(frozen=True)
class _NoContent:
    """The engine's part, where nothing is ever in memory: it knows the groups, and is asked for nothing else."""

    groups: Sequence[Group]
    has_host: bool = False


@contextmanager
def open_stored(folder: Path, fingerprint: str, page_tokens: int, ttl_s: float | None = None) -> Iterator[PrefixCache]:
    """The cache that a process with the model would begin with, to be viewed and explained; it has no lanes.

    The tree may be in use. Raises DiskError if it cannot be read.
    """
    with translate_errors(folder), open_read_only(folder) as connection:
        groups = decode_groups(read_meta(connection).get("groups", ""))
    looking = NotOwner(f"{folder} is only looked at", "only looked at")
    with Disk.open(
        folder, fingerprint=fingerprint, page_tokens=page_tokens, budget_bytes=0, ttl_s=ttl_s, not_owner=looking
    ) as disk:
        store: Any = _NoContent(groups or _guess_groups(disk.files()))
        cache = PrefixCache(store, [], page_tokens=page_tokens, tiers=Tiers(store, disk=disk), ttl_s=ttl_s)
        cache.restore()
        yield cache


def _guess_groups(files: Iterable[DiskFile]) -> list[Group]:
    """The groups of an index that does not tell them: a file without rows is a state, and all rows are taken for needed."""
    kinds = {file.address.group: Kind.RECURRENT if file.address.start == file.address.end else Kind.FULL for file in files}
    return [Group(index, kind) for index, kind in sorted(kinds.items())]
