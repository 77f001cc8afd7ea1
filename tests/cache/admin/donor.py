"""What an import puts on a disk, without an archive: part of a tree that another world has made."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bough.cache.admin.archive_format import Chain
from bough.cache.graft import ImportedTree
from bough.types import Boundary, Mark
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.world import World


def bring(
    disk: FakeDisk, model: str, chats: Sequence[Sequence[int]], salt: str, chance: random.Random, loss: float = 0.1
) -> ImportedTree:
    """Serve chats in a world of their own, and put what its disk has then on this one; some of it is lost on the way."""
    donor = FakeDisk(disk.page_tokens)
    world = World(MODELS[model], disk.page_tokens, disk=donor)
    for chat in chats:
        world.run(chat, boundaries=[Boundary(1 + len(chat) // 2, Mark.SYSTEM_END)], salt=salt)
    world.cache.upkeep.flush()
    chain = Chain(disk.keys, disk.root(salt), [*donor.platter.files, *donor.platter.points])  # type: ignore[arg-type]
    for address, (content, nbytes, last_used) in donor.platter.files.items():
        step = chain.find(address)
        if step is not None and chance.random() >= loss and disk.has_room(nbytes):
            file = disk.put(address, lambda content=content: content, nbytes, last_used=last_used, has_user=False)  # type: ignore[misc]
            chain.steps[step].files.append(file)
    for record in donor.platter.points.values():
        if (step := chain.find(record.address)) is not None and chance.random() >= loss:
            disk.put_new_point(record)
            chain.steps[step].points.append(record)
    disk.work()
    return ImportedTree(chain.steps)
