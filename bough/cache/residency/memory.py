"""Memory: what the tree holds in each tier, counted, and how content moves between tiers.

`Memory` has the totals; each trie has an `Account` in it, through which it cuts, joins and releases pages, so that every
byte is counted. A page on disk has no content here; it is cut without being read, because the halves share the file.

On the device, a page in a block counts by its block: once, however many pages of the trie are in it. All pages of a block
belong to one trie, because lanes never take rows from one salt to another. Everything else counts by its own bytes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from bough.cache.disk import Disk
from bough.cache.residency.census import Census, TrieCensus
from bough.cache.store import SharedStore
from bough.cache.tree.address import Address, DiskFile
from bough.cache.tree.forest import Forest
from bough.cache.tree.node import Point
from bough.cache.tree.state import (
    PAGE_TOKENS,
    Block,
    Buffer,
    ContentStore,
    Group,
    Item,
    Kind,
    Page,
    PageStore,
    Range,
    State,
    Tier,
)
from bough.cache.tree.trie import Trie
from bough.errors import EngineError

Held = TypeVar("Held", Page, State)


@dataclass(frozen=True)
class Tiers:
    """The tiers below the device: an engine that can move content, host memory (0: none), a disk, and a shared store.

    `problem` says why there is no disk although one was wanted, `shared_problem` the same of the shared store.
    """

    store: ContentStore
    host_bytes: int = 0
    disk: Disk | None = None
    problem: str = ""
    shared: SharedStore | None = None
    shared_problem: str = ""

    @property
    def has_host(self) -> bool:
        return self.host_bytes > 0 and self.store.has_host


class Memory:
    """The bytes of all tries, by tier, the stores that hold them, and the groups of the model by their kind.

    `row_bytes` is for one token, with full attention alone; other groups need restore points (`needs_points`).
    `disk` and `shared`, the store that machines share, are None without one, and after close. `host_budget_bytes` is 0
    where there is no host tier. Content that is read goes to `load_tier`, from where a lane adopts it. `reserved_bytes` are
    promised to what is being read; they count as used from the moment of the promise.
    """

    def __init__(self, store: PageStore, tiers: Tiers | None = None, page_tokens: int = PAGE_TOKENS) -> None:
        self.groups: Sequence[Group] = store.groups
        self.full = [group for group in store.groups if group.kind is Kind.FULL]
        self.windows = [group for group in store.groups if group.kind is Kind.WINDOW]
        self.recurrent = [group for group in store.groups if group.kind is Kind.RECURRENT]
        self.row_bytes = sum(group.bytes_per_token for group in self.full)
        self.needs_points = len(self.full) < len(store.groups)
        self.page_tokens = page_tokens
        self.store = store
        self.tiers = tiers
        self.disk = tiers.disk if tiers else None
        self.shared = tiers.shared if tiers else None
        self.host_budget_bytes = tiers.host_bytes if tiers and tiers.has_host else 0
        self.load_tier = Tier.HOST if self.host_budget_bytes else Tier.DEVICE
        self.num_bytes = dict.fromkeys(Tier, 0)
        self.reserved_bytes = dict.fromkeys(Tier, 0)
        self.census = Census()

    def open_account(self) -> Account:
        return Account(self)

    def root_id(self, salt: str) -> bytes:
        """The id of a salt on disk; empty without a disk."""
        return b"" if self.disk is None else self.disk.root(salt)

    @property
    def content(self) -> ContentStore:
        """The engine's store, where it can move content between tiers."""
        assert self.tiers is not None
        return self.tiers.store

    @property
    def tree_bytes(self) -> int:
        """Bytes of the tree on the device."""
        return self.num_bytes[Tier.DEVICE]

    @property
    def writable_disk(self) -> Disk | None:
        """The disk, unless it is only read."""
        return None if self.disk is None or self.disk.read_only else self.disk

    def used_bytes(self, tier: Tier) -> int:
        """Bytes of the tree in a tier, and those that are promised to what is being read."""
        return self.num_bytes[tier] + self.reserved_bytes[tier]

    def point_bytes(self, offset: int) -> int:
        """The most that a restore point at `offset` takes, beside the rows of full attention."""
        return sum(group.needed_bytes(offset) for group in (*self.windows, *self.recurrent))

    def load_bytes(self, item: Item) -> int:
        """The memory that an item will take in `load_tier`: on the device perhaps a whole block."""
        return item.content_bytes if self.load_tier is Tier.HOST else self.store.device_bytes(item)

    def file_bytes(self, items: Iterable[Item]) -> int:
        """The most that the files of these items would take on disk."""
        assert self.disk is not None
        disk, content = self.disk, self.content
        return sum(disk.file_bytes(content.packed_bytes(item), self._address_tokens(item)) for item in items)

    def _address_tokens(self, item: Item) -> int:
        """How many tokens the address of an item has: from the last page border on, or all without full attention."""
        end = item.span[1]
        return (end - 1) % self.page_tokens + 1 if self.full else end

    def detach_disk(self, items: Iterable[Item]) -> None:
        """Forget the disk and the shared store; what was written there stays there."""
        self.disk = self.shared = None
        for item in items:
            item.files = {}
        self.num_bytes[Tier.DISK] = 0

    def check(self, items: Sequence[Item]) -> None:
        """Assert that what is counted is what these items hold, tier by tier, and that the budgets hold."""
        for tier in (Tier.DEVICE, Tier.HOST):
            assert memory_bytes(item for item in items if item.tier is tier) == self.num_bytes[tier]
        assert not any(isinstance(item, Page) and item.block for item in items if item.tier is not Tier.DEVICE)
        for item in items:
            is_saved = any(low <= item.span[0] and item.span[1] <= high for low, high in item.files.values())
            assert is_saved or item.tier is not Tier.DISK
        files = Counter(file for item in items for file in item.files)
        assert all(file.num_users == number for file, number in files.items())
        assert sum(file.nbytes for file in files) == self.num_bytes[Tier.DISK]
        assert self.tiers is None or self.used_bytes(Tier.HOST) <= self.tiers.host_bytes
        assert self.disk is None or self.disk.claimed_bytes <= self.disk.budget_bytes


class _Footprint(NamedTuple):
    """The tier of an item, and the memory that it takes there."""

    tier: Tier
    nbytes: int
    block: Block | None

    @classmethod
    def of(cls, item: Item) -> _Footprint:
        return cls(item.tier, item.nbytes, item.block if isinstance(item, Page) else None)


class Account:
    """The pages and states of one trie: what is counted here is counted in the memory too."""

    def __init__(self, memory: Memory) -> None:
        self.groups = memory.groups
        self.census = TrieCensus(memory.census)
        self.note, self.forget, self.check_nodes = self.census.note, self.census.forget, self.census.check
        self.num_bytes = dict.fromkeys(Tier, 0)
        self.reserved_bytes = dict.fromkeys(Tier, 0)
        self._memory = memory
        self._store = memory.store
        self._saving: deque[Item] = deque()  # items with a newer file queued, in the order of writing
        self._pages_in: Counter[Block] = Counter()  # how many pages of this trie are in each block

    def _count(self, tier: Tier, nbytes: int) -> None:
        self.num_bytes[tier] += nbytes
        self._memory.num_bytes[tier] += nbytes

    def _count_in(self, footprint: _Footprint) -> None:
        """Count an item that has come to this trie, or to another tier."""
        tier, nbytes, block = footprint
        if block is not None:
            nbytes = 0 if self._pages_in[block] else block.nbytes
            self._pages_in[block] += 1
        self._count(tier, nbytes)

    def _count_out(self, footprint: _Footprint) -> None:
        """Stop counting an item that was there."""
        tier, nbytes, block = footprint
        if block is not None:
            self._pages_in[block] -= 1
            nbytes = 0 if self._pages_in[block] else block.nbytes
            if nbytes:
                del self._pages_in[block]
        self._count(tier, -nbytes)

    def has_pages_in(self, block: Block) -> bool:
        """Whether a block counts for this trie already."""
        return block in self._pages_in

    def reserve(self, tier: Tier, nbytes: int) -> None:
        """Promise more bytes to what is being read for this trie; fewer, if negative."""
        self.reserved_bytes[tier] += nbytes
        self._memory.reserved_bytes[tier] += nbytes

    def used_bytes(self, tier: Tier) -> int:
        """Bytes of this trie in a tier, and those that are promised to what is being read for it."""
        return self.num_bytes[tier] + self.reserved_bytes[tier]

    def add(self, item: Held) -> Held:
        """Count a page or state that has just come to the tree."""
        if item.tier is not Tier.DISK:
            self._count_in(_Footprint.of(item))
        return item

    def device_bytes(self, item: Item) -> int:
        return self._store.device_bytes(item)

    def cut(self, page: Page, at: int) -> tuple[Page, Page]:
        self.cancel_writes(page)
        if page.tier is Tier.DISK:
            left, right = empty_page(page.group, page.start, at), empty_page(page.group, at, page.end)
        else:
            before = _Footprint.of(page)
            left, right = self._store.cut(page, at)
            self._count_out(before)
        for half in (left, right):
            self.add(half)
            shared = {file: _intersect(held, half.span) for file, held in page.files.items()}
            half.files = {file: (low, high) for file, (low, high) in shared.items() if low < high}
        for file in page.files:
            file.num_users += (file in left.files) + (file in right.files) - 1
        page.files = {}
        return left, right

    def can_join(self, left: Page, right: Page) -> bool:
        return self._store.can_join(left, right)

    def join(self, left: Page, right: Page) -> Page:
        self.cancel_writes(left)
        self.cancel_writes(right)
        before = _Footprint.of(left), _Footprint.of(right)
        joined = self._store.join(left, right)
        for footprint in before:
            self._count_out(footprint)
        joined.files = left.files | right.files
        for file in left.files.keys() & right.files.keys():
            joined.files[file] = (left.files[file][0], right.files[file][1])
            file.num_users -= 1
        left.files, right.files = {}, {}
        return self.add(joined)

    def cancel_writes(self, item: Item) -> None:
        """Cancel the writes of an item that is about to be consumed; what it becomes is saved again."""
        for file in [file for file in item.files if is_pending(file)]:
            del item.files[file]
            self._drop(file)

    def hand_over(self, old: Item, fresh: Item) -> None:
        """Give the users and files of an item to a fresh one with the same content, and release its memory."""
        self.cancel_writes(old)  # they would read memory that is released here
        if isinstance(old, Page) and isinstance(fresh, Page):
            fresh.users = old.users
        fresh.files, old.files = old.files, {}
        self.release(old)

    def release(self, item: Item) -> None:
        """Release an item: its memory and its files."""
        if item.tier is not Tier.DISK:
            self._count_out(_Footprint.of(item))
            self._store.release(item)
        self.drop_files(item)

    def forget_point(self, point: Point) -> None:
        """Remove a dropped restore point from the index on disk."""
        if point.indexed is not None and self._memory.disk is not None:
            self._memory.disk.drop_point(point.indexed.address)

    def drop_files(self, item: Item) -> None:
        for file in item.files:
            self._drop(file)
        item.files = {}

    def demote_to_host(self, item: Item) -> bool:
        """Move an item from the device to the host; False if the engine has no memory for it there."""
        assert item.tier is Tier.DEVICE
        before = _Footprint.of(item)
        try:
            self._memory.content.to_host(item)
        except (EngineError, MemoryError):
            return False
        self._count_out(before)
        self._count_in(_Footprint.of(item))
        return True

    def demote_to_disk(self, item: Item) -> None:
        """Release the memory of an item whose content is in a saved file."""
        assert saved_file(item) is not None and item.tier is not Tier.DISK
        self._count_out(_Footprint.of(item))
        self._store.release(item)
        item.tier, item.nbytes = Tier.DISK, 0
        if isinstance(item, Page):
            item.rows = item.block = None
        else:
            item.data = None

    def save(self, item: Item, address: Address, last_used: float) -> DiskFile:
        """Queue a write of an item to disk; its older files stay until that is done."""
        disk, content = self._memory.disk, self._memory.content
        assert disk is not None
        file = disk.put(address, partial(content.pack, item), content.packed_bytes(item), last_used=last_used)
        if file in item.files:  # the same rows were saved before
            self._drop(file)
        elif not file.has_failed and file.num_users == 1:  # else it is counted already
            self._count(Tier.DISK, file.nbytes)
        if not file.has_failed:
            item.files[file] = item.span
            self._saving.append(item)
        return file

    def count_file(self, file: DiskFile) -> None:
        """Count a file that the disk has already, and that the trie uses from now on."""
        self._count(Tier.DISK, file.nbytes)

    def drop_replaced(self) -> None:
        """Drop the files that newer ones have replaced, and those that failed, as far as writing has come."""
        while self._saving and not any(is_pending(file) for file in self._saving[0].files):
            self.drop_useless(self._saving.popleft())

    def drop_useless(self, item: Item) -> None:
        """Drop the files of an item that failed, and those that a better saved one makes useless.

        The best file holds just these rows; the next best holds others too. An item that is on disk alone, and was lost
        there, keeps its failed files: it is found to be a miss when it is read.
        """
        best = own_file(item, saved=True) or saved_file(item)
        if best is None and item.tier is Tier.DISK:
            return
        for file in list(item.files):
            is_worse = best is not None and file is not best and (file.is_saved or _is_own(item, best))
            if file.has_failed or is_worse:
                del item.files[file]
                self._drop(file)

    def _drop(self, file: DiskFile) -> None:
        assert self._memory.disk is not None and file.num_users > 0
        self._memory.disk.drop(file)
        if file.num_users == 0:
            self._count(Tier.DISK, -file.nbytes)

    def load(self, item: Item, file: DiskFile, data: Buffer) -> Item:
        """A new item with the content of this file, to replace the given one.

        Raises ValueError if the content does not fit, EngineError or MemoryError if there is no memory; the given item is
        then as it was, else it is void.
        """
        assert item.tier is Tier.DISK
        fresh: Item
        if isinstance(item, State):
            fresh = self.unpack_state(item.group, item.offset, data)
        else:
            fresh = self.unpack_rows(item.group, (file.address.start, file.address.end), data, item.span)
        self.hand_over(item, fresh)
        return fresh

    def unpack_rows(self, group: Group, held: Range, data: Buffer, wanted: Range) -> Page:
        """A new page with the wanted rows of those that are packed in `data`; raises as `load` does."""
        page = self._memory.content.unpack_page(group, *held, data, self._memory.load_tier)
        page = self._keep_side(page, wanted[0], is_left=False)
        return self.add(self._keep_side(page, wanted[1], is_left=True))

    def unpack_state(self, group: Group, offset: int, data: Buffer) -> State:
        """A new state of what is packed in `data`; raises as `load` does."""
        return self.add(self._memory.content.unpack_state(group, offset, data, self._memory.load_tier))

    def _keep_side(self, page: Page, at: int, *, is_left: bool) -> Page:
        """One side of `at` of a fresh page; the rest is released, and all of it if cutting fails."""
        if not page.start < at < page.end:
            return page
        try:
            left, right = self._store.cut(page, at)
        except BaseException:
            self._store.release(page)
            raise
        kept, rest = (left, right) if is_left else (right, left)
        self._store.release(rest)
        return kept


def memory_bytes(items: Iterable[Item]) -> int:
    """The memory of these items: blocks once, and everything else by its own bytes."""
    footprints = [_Footprint.of(item) for item in items]
    blocks = {each.block for each in footprints if each.block is not None}
    return sum(block.nbytes for block in blocks) + sum(each.nbytes for each in footprints if each.block is None)


def empty_page(group: Group, start: int, end: int) -> Page:
    """Rows [start, end) as a page whose content is on disk."""
    return Page(group, start, end, None, 0, tier=Tier.DISK)


def is_pending(file: DiskFile) -> bool:
    """Whether a file is still to be written."""
    return not file.is_saved and not file.has_failed


def _intersect(first: Range, second: Range) -> Range:
    return max(first[0], second[0]), min(first[1], second[1])


def saved_file(item: Item) -> DiskFile | None:
    """A file that is safely on disk and holds all of the item."""
    return covering_file(item, saved=True)


def own_file(item: Item, *, saved: bool = False) -> DiskFile | None:
    """A file of just this item, and nothing else, saved or being written; a saved one, if asked."""
    for file in item.files:
        if _is_own(item, file) and not file.has_failed and (file.is_saved or not saved):
            return file
    return None


def _is_own(item: Item, file: DiskFile) -> bool:
    return (file.address.start, file.address.end) == item.span == item.files[file]


def covering_file(item: Item, *, saved: bool = False) -> DiskFile | None:
    """A file that holds all of the item, saved or being written; a saved one, if asked."""
    start, end = item.span
    for file, (low, high) in item.files.items():
        if low <= start and end <= high and not file.has_failed and (file.is_saved or not saved):
            return file
    return None


SaltTrie = Trie[Account]
"""A trie whose pages are counted: one salt's part of the cache."""

SaltForest = Forest[Account]
