"""What an import puts on a disk, without an archive: part of a tree that another world has made."""

from __future__ import annotations

import random
from collections.abc import Sequence

from bough.cache.admin.manifest import Chain
from bough.cache.graft import ImportedStep, ImportedTree
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
    world.cache.flush()
    addresses = [*donor.platter.files, *donor.platter.points]
    chain = Chain(disk.keys, disk.root(salt), addresses)  # type: ignore[arg-type]
    ends = {chain.find(address): address.end for address in addresses}
    steps = [ImportedStep(step.parent, step.tokens, ends.get(index, 0)) for index, step in enumerate(chain.steps)]
    for address, (content, nbytes, last_used) in donor.platter.files.items():
        step = chain.find(address)
        if step is not None and chance.random() >= loss and disk.has_room(nbytes):
            file = disk.put(address, lambda content=content: content, nbytes, last_used=last_used, has_user=False)  # type: ignore[misc]
            steps[step].files.append(file)
    for record in donor.platter.points.values():
        if (step := chain.find(record.address)) is not None and chance.random() >= loss:
            disk.put_new_point(record)
            steps[step].points.append(record)
    disk.work()
    return ImportedTree(steps)
