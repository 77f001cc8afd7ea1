"""The members of an archive: read, changed, and written again."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bough.cache.admin.archive_file import read_head
from bough.cache.store.format import Object, encode, read_object


@dataclass(frozen=True)
class Member:
    name: str
    content: bytes
    modified: float = 0.0


def read_members(archive: Path) -> list[Member]:
    """All members, the head first."""
    with tarfile.open(archive) as opened:
        return [Member(info.name, opened.extractfile(info).read(), info.mtime) for info in opened]  # type: ignore[union-attr]


def write_members(archive: Path, members: Sequence[Member]) -> None:
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as made:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.size, info.mtime = len(member.content), int(member.modified)
            made.addfile(info, io.BytesIO(member.content))


def change_object(archive: Path, number: int, change: Callable[[Object], Object]) -> None:
    """Change the object of a member, and seal it again."""
    keys, members = read_head(archive).keys, read_members(archive)
    found = change(read_object(keys, members[number].content))
    members[number] = Member(members[number].name, encode(keys, found.address, found.sections))
    write_members(archive, members)
