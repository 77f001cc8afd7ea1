"""What an import puts on a disk, without an archive: part of a tree that another world has made."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from bough.cache.tree.address import DiskFile, PointRecord
from bough.types import Boundary, Mark
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.world import World


@dataclass
class Imported:
    """What has been put: files, which have no user of their own, and restore points."""

    files: list[DiskFile] = field(default_factory=list)
    points: list[PointRecord] = field(default_factory=list)


def bring(
    disk: FakeDisk, model: str, chats: Sequence[Sequence[int]], salt: str, chance: random.Random, loss: float = 0.1
) -> Imported:
    """Serve chats in a world of their own, and put what its disk has then on this one; some of it is lost on the way."""
    donor = FakeDisk(disk.page_tokens)
    world = World(MODELS[model], disk.page_tokens, disk=donor)
    for chat in chats:
        world.run(chat, boundaries=[Boundary(1 + len(chat) // 2, Mark.SYSTEM_END)], salt=salt)
    world.cache.upkeep.flush()
    imported = Imported()
    for address, (content, nbytes, last_used) in donor.platter.files.items():
        if chance.random() >= loss and disk.has_room(nbytes):
            file = disk.put(address, lambda content=content: content, nbytes, last_used=last_used, has_user=False)  # type: ignore[misc]
            imported.files.append(file)
    for record in donor.platter.points.values():
        if chance.random() >= loss:
            disk.put_new_point(record)
            imported.points.append(record)
    disk.work()
    return imported
