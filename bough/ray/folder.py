"""The folder of a replica: the one with the lowest number that no other process of this machine holds.

A replica that starts after another has ended takes over its folder, and so its tree.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path

from bough.cache.disk import DiskBusy
from bough.cache.disk.lock import FolderLock
from bough.config import Settings


@dataclass(frozen=True)
class ReplicaFolder:
    """A folder that this process holds until it ends."""

    path: Path
    lock: FolderLock

    @property
    def name(self) -> str:
        return self.path.name


def claim_folder(base: Path) -> ReplicaFolder:
    """Take `base/replica-K` with the lowest K that is free."""
    for number in count():
        path = base / f"replica-{number}"
        path.mkdir(parents=True, exist_ok=True)
        try:
            return ReplicaFolder(path, FolderLock(path))
        except DiskBusy:
            continue
    raise AssertionError("there is always a number that is free")


def name_replica(folder: ReplicaFolder, address: str, num_machines: int) -> str:
    """The name of a replica: that of its folder, and its machine's address if there are several, which may have the same
    folders. It has no colon: in the names of roots that ends the replica's.
    """
    return folder.name if num_machines <= 1 else f"{folder.name}@{address.replace(':', '-')}"


@dataclass(frozen=True)
class ReplicaSettings(Settings):
    """The settings of one replica: its trees are in its own folder; all else is shared with the others of its machine."""

    own_folder: Path = Path()

    @property
    def trees_folder(self) -> Path:
        return self.own_folder / "trees"


def settings_for(settings: Settings, folder: ReplicaFolder) -> ReplicaSettings:
    """The settings with the folder of this replica."""
    given = {each.name: getattr(settings, each.name) for each in fields(Settings)}
    return ReplicaSettings(**given, own_folder=folder.path)
