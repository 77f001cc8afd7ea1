"""Loading from disk: the content that a plan needs and that the tree has on disk alone.

A page that cannot be read, or is not what it should be, is a miss: the tree loses it, and the plan is made again with less.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bough.cache.disk import Disk, DiskMiss
from bough.cache.disk.reader import Read
from bough.cache.residency.loading import Loader, TierLoad
from bough.cache.residency.memory import SaltTrie, saved_file
from bough.cache.tree.address import DiskFile
from bough.cache.tree.node import Hold
from bough.cache.tree.plan import LiveRows, NeededItem, plan
from bough.cache.tree.state import Kind, Page, Tier
from bough.errors import EngineError

log = logging.getLogger(__name__)


class DiskLoad(TierLoad[DiskFile, bytearray]):
    """Brings up what one request needs from disk, below the hold of its lane; measures the disk."""

    def __init__(self, loader: Loader, trie: SaltTrie, disk: Disk, hold: Hold, total: int) -> None:
        super().__init__(loader, trie, disk.reader, total)
        loader.loads.add(self)
        self._disk, self._hold = disk, hold
        self._before = self._seen
        self._live, self._offset = LiveRows.nothing(loader.groups), 0
        self._is_started = False
        self._wanted_bytes = 0  # since the last start
        self._missing_bytes = 0  # what is not there yet of those
        self._arrived_bytes = 0  # up to the last start

    def make_room_for(self, items: Sequence[NeededItem], offset: int) -> int | None:
        """Reserve the memory of these items; returns None, or an offset below `offset` that needs less.

        Comes before making room for the lane: that may fill the host.
        """
        if self.make_room(self._loader.loaded_bytes(items)):
            return None
        if self._memory.load_tier is Tier.HOST:
            left = self._loader.evictor.free_host_bytes(self._trie)
            for each in items:
                left -= each.item.content_bytes
                if left < 0:
                    return each.start
        return offset // 2

    def start(self, items: Sequence[NeededItem], live: LiveRows, offset: int) -> None:
        """Want these items, for which there is room, so that a lane with these rows can stand at `offset`."""
        self._live, self._offset = live, offset
        self._wanted_bytes = self._missing_bytes = total_bytes(items)
        if not self._is_started:
            first = min((each.start for each in items), default=0)
            self._without = self._plan(first)
            self._is_started = True
        self._want(items)

    def stop(self) -> None:
        """Give back what is reserved, before planning again."""
        self._arrived_bytes += self._wanted_bytes - self._missing_bytes
        self._wanted_bytes = self._missing_bytes = 0
        self.reserve(0)

    def advance(self) -> int | None:
        """Put what has arrived into the tree; returns how deep the lane can stand now, or None if it has to wait.

        That is the offset that was asked for when all is there, and less if something is missing or waiting is no longer
        worth it.
        """
        if (at := self._plan(self._offset)) < self._offset:
            return at  # what was on disk may have been cleared meanwhile
        items = self._on_disk()
        if items and (self._has_news(items) or total_bytes(items) < self._missing_bytes):  # or others have it in memory
            lost = self._take(items)
            if lost is not None:
                return lost
            items = self._on_disk()
            self._want(items)
        missing = [each for each in items if not self._has_arrived(each)]  # once: more may arrive at any moment
        if missing and not self._should_wait(missing):
            return min(self._give_up(missing), self._offset - 1)  # its own items may be on disk as well
        return None if items else self._offset

    def reached(self) -> int:
        """How deep a lane could stand with what is in the tree now."""
        if (at := self._plan(self._offset)) < self._offset:
            return at  # something was cleared meanwhile
        items = self._on_disk()
        return self._reached_without(items) if items else self._offset

    def _plan(self, limit: int) -> int:
        return plan(self._loader.groups, self._hold.node.path(), self._hold.offset, self._live, limit)

    def _on_disk(self) -> list[NeededItem]:
        return self._loader.on_disk(self._hold.node.path(), self._live, self._offset)

    def _want(self, items: Sequence[NeededItem]) -> None:
        self.reserve(min(self.reserved_bytes, self._loader.loaded_bytes(items)))
        self._missing_bytes = min(self._missing_bytes, total_bytes(items))
        files = [saved_file(each.item) for each in items]
        self._reads.want([file for file in files if file is not None])

    def _has_news(self, items: Sequence[NeededItem]) -> bool:
        """Whether anything has arrived, or some item has lost its file."""
        return self._reads.num_done > 0 or any(saved_file(each.item) is None for each in items)

    def _take(self, items: Sequence[NeededItem]) -> int | None:
        """Put what has arrived into the tree, for a limited time; returns where the first item starts that failed."""
        self._loader.note_reading(self._reader.progress())
        until_s = self._take_until()
        for each in items:
            file = saved_file(each.item)
            read = self._reads.find(file) if file is not None else None
            if file is not None and read is None:
                continue
            if not self._place(each, read):
                return each.start
            if self._loader.clock() > until_s:
                break
        return None

    def _place(self, each: NeededItem, read: Read[DiskFile, bytearray] | None) -> bool:
        """Put one item into the tree; False if that failed."""
        try:
            if read is None:
                raise DiskMiss("missing", "another part of it could not be read")
            data = self._disk.take(read)
            if not self.take_room(self._loader.loaded_bytes([each])):  # a branch may have cut a page into two blocks
                return False
            fresh = self._trie.memory.load(each.item, read.file, data)
        except (DiskMiss, ValueError):
            self._lose(each)
            return False
        except (EngineError, MemoryError) as error:
            log.warning("rows %s could not be loaded: %s", each.item.span, error)
            self._loader.counts.failed_loads += 1
            return False
        self._missing_bytes = max(0, self._missing_bytes - each.item.content_bytes)
        self._trie.replace(each.node, each.item, fresh)
        self._note_arrived(each.item.content_bytes)
        return True

    def _lose(self, each: NeededItem) -> None:
        self._loader.counts.misses += 1
        if isinstance(each.item, Page):
            self._trie.drop_page(each.node, each.item)
        else:
            self._trie.drop_point(each.node, each.node.points[each.item.offset])

    def _has_arrived(self, each: NeededItem) -> bool:
        file = saved_file(each.item)
        return file is None or self._reads.find(file) is not None

    def _should_wait(self, items: Sequence[NeededItem]) -> bool:
        """Whether these items, which have not arrived, should still be waited for."""
        left_bytes = max(0, total_bytes(items) - self._reads.partial_bytes)
        arrived_bytes = self._arrived_bytes + self._wanted_bytes - left_bytes  # other requests' loads included
        reached = self._reached_without(items)
        return self._is_worth_waiting(reached, self._offset, left_bytes, arrived_bytes, is_sure=True)

    def _reached_without(self, items: Sequence[NeededItem]) -> int:
        """How deep a lane could stand without these items: where states or windows are missing, as deep as before."""
        if items[0].item.group.kind is not Kind.FULL:
            return self._without
        return self._plan(items[0].start)

    def _give_up(self, items: Sequence[NeededItem]) -> int:
        """Stop waiting for these items; returns how deep the lane can stand without them."""
        self._loader.counts.slow_loads += 1
        self._loader.note_slow(self._before, self._reader.progress())
        self._note_arrived(0)
        return self._reached_without(items)


def total_bytes(items: Sequence[NeededItem]) -> int:
    """The content of these items: what there is to move."""
    return sum(each.item.content_bytes for each in items)
