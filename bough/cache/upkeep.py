"""Upkeep: what is done with all of the cache, or with one salt's part of it: clearing, saving, closing.

The tree belongs to the thread that runs the engine. `run` runs there what touches it, in steps between which requests go
on; the calling thread waits for the disk and for the shared store.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from bough.cache.finish import Finisher
from bough.cache.residency import Residency, SaltTrie
from bough.cache.residency.saving import SavePass, forget_disk
from bough.cache.steps import RunSteps, Steps, run_at_once

SEND_WITHIN_S = 60.0
"""How long `flush` waits for the shared store."""

SAVE_PASSES = 4
"""How often `save` looks for items that requests have left unsaved meanwhile."""


@dataclass(frozen=True)
class SaveResult:
    """Whether the disk took and wrote what it had room for, and how many items in memory it has no room for."""

    is_written: bool
    num_without_room: int = 0


class Upkeep:
    """Clears, saves and closes one cache."""

    def __init__(self, residency: Residency, finisher: Finisher) -> None:
        self._memory, self._forest, self._lanes = residency.memory, residency.forest, residency.lanes
        self._evictor, self._saver = residency.evictor, residency.saver
        self._finisher = finisher

    def clear(self, salt: str | None = None, run: RunSteps = run_at_once) -> None:
        """Forget everything that no busy lane stands on, or one salt's; delete all of it on disk and in the store.

        Waits for that on the calling thread; `run` runs what touches the tree. Raises DiskError or StoreError if content
        may be left, as on a disk that is only read.
        """
        shared = self._memory.shared
        with ExitStack() as waits:  # the store is waited for even if the disk fails
            wait_for_disk = run(lambda: self._clear(salt))
            if shared is not None:
                waits.callback(shared.clear(salt))
            wait_for_disk()

    def _clear(self, salt: str | None) -> Steps[Callable[[], None]]:
        """Forget everything, or one salt's; returns a function that waits for the disk."""
        if salt is None:
            self._finisher.reset_duel()
        yield from self._clear_memory(salt)
        disk = self._memory.disk
        if disk is None:
            return lambda: None
        for trie in self._tries(salt):
            forget_disk(trie)  # not interrupted: everything that has a file then is deleted
        return disk.clear(None if salt is None else disk.root(salt))

    def _clear_memory(self, salt: str | None = None) -> Steps[None]:
        """Clear idle lanes and drop everything that no busy lane stands on."""
        for slot in self._lanes.idle():
            if salt in (None, slot.salt):
                slot.clear()
        for trie in self._tries(salt):
            yield from self._evictor.clear(trie)

    def _tries(self, salt: str | None) -> list[SaltTrie]:
        """The tries of all salts, or of one."""
        found = None if salt is None else self._forest.find(salt)
        return [trie for trie in self._forest.tries.values() if found in (None, trie)]

    def flush(self, salt: str | None = None, run: RunSteps = run_at_once) -> bool:
        """Hand everything that the disk lacks to it, or one salt's, and wait until it is written; False if that failed.

        Waits on the calling thread, for uploads to the shared store too; `run` runs what touches the tree.
        """
        disk, shared = self._memory.disk, self._memory.shared
        is_sent = shared is None or shared.uploader.settle(SEND_WITHIN_S)
        if disk is None:
            return is_sent
        is_taken = not run(lambda: self._save_all(salt)).num_refused
        is_safe = disk.flush() and is_taken
        run(lambda: self._drop_replaced(salt))
        return disk.flush() and is_safe and is_sent  # the second time without files that newer ones replaced

    def save(self, salt: str, run: RunSteps) -> SaveResult:
        """Write everything of a salt that the disk lacks, while requests go on.

        Repeated a few times, because requests may cut a page that is not written yet: without its parts, pages after them
        could not be found from the root. A disk that is only read has no room for anything.
        """
        disk = self._memory.disk
        assert disk is not None
        if disk.read_only:
            return SaveResult(is_written=True, num_without_room=run(lambda: self._drop_replaced(salt)))
        for _ in range(SAVE_PASSES):
            done = run(lambda: self._save_all(salt))
            if not disk.settle(disk.root(salt)):
                return SaveResult(is_written=False)
            if not done.num_items:
                break
        num_without_room = run(lambda: self._drop_replaced(salt))
        return SaveResult(not done.num_refused, num_without_room)

    def _save_all(self, salt: str | None) -> Steps[SavePass]:
        num_items = num_refused = 0
        for trie in self._tries(salt):
            done = yield from self._saver.save_all(trie)
            num_items += done.num_items
            num_refused += done.num_refused
        return SavePass(num_items, num_refused)

    def _drop_replaced(self, salt: str | None) -> Steps[int]:
        """Drop files that newer ones have replaced; returns how many items the disk has no room for."""
        num_without_room = 0
        for trie in self._tries(salt):
            trie.memory.drop_replaced()
            num_without_room += yield from self._saver.count_without_room(trie)
        return num_without_room

    def detach_disk(self) -> None:
        """Release all memory, and forget disk and store; content that was written there stays there."""
        self._memory.detach_disk(self._forest.items())
        run_at_once(self._clear_memory)

    def close(self) -> None:
        """Write everything to disk and release all memory. Only at the end, when no lane is busy."""
        disk, shared = self._memory.disk, self._memory.shared
        if shared is not None:
            shared.close()  # first: it reads what is in memory
        if disk is not None:
            self.flush()
            disk.close()
        self.detach_disk()
