"""Restoring: the tree as an earlier run left it on disk, built again from the index alone.

No page is read: content stays on disk until a request needs it. A page's address names the page border before it by a
digest, so the index is walked from the root, border by border. First the edges are built, then pages, states and restore
points are attached to them. Entries that the walk does not reach, because a page before them is missing, are dropped.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from bough.cache.disk import Disk
from bough.cache.residency import Residency, SaltForest, SaltTrie
from bough.cache.residency.evictor import Evictor
from bough.cache.residency.memory import Memory
from bough.cache.residency.policy import is_empty_leaf
from bough.cache.tree.address import Address, DiskFile, PointRecord
from bough.cache.tree.node import Hold, Node, Point, Reason
from bough.cache.tree.state import Group, Kind, Page, State, Tier
from bough.system.processes import without_gc
from bough.tokens import common_prefix, cut, num_tokens

_NO_USERS: set[Point | Hold] = set()  # of pages of full attention, which never have any


@dataclass
class _Border:
    """Files and restore points that the index has between one page border and the next."""

    files: list[DiskFile] = field(default_factory=list)
    points: list[PointRecord] = field(default_factory=list)

    def blocks(self) -> dict[bytes, _Border]:
        """The token strings that follow, without those that are the beginning of another, each with its own entries."""
        if not self.points and all(file.address.tokens == self.files[0].address.tokens for file in self.files[1:]):
            return {self.files[0].address.tokens: self}
        found: dict[bytes, _Border] = {}
        last = b""
        entries: list[DiskFile | PointRecord] = [*self.files, *self.points]
        for each in sorted(entries, key=lambda each: each.address.tokens, reverse=True):
            tokens = each.address.tokens  # in this order, a beginning comes right after all that begin with it
            if not (found and last.startswith(tokens)):
                last = tokens
            border = found.setdefault(last, _Border())
            if isinstance(each, DiskFile):
                border.files.append(each)
            else:
                border.points.append(each)
        return found


def _begins_at(address: Address, offset: int) -> bool:
    return address.end - num_tokens(address.tokens) == offset


@dataclass(frozen=True)
class _PathPart:
    """Borders on one path, and a hold at the path's end."""

    hold: Hold
    borders: list[_Border]


def restore(residency: Residency) -> None:
    """Build the tries that the disk holds, as far as its budget goes. The forest must be empty."""
    disk, forest = residency.memory.disk, residency.forest
    assert disk is not None and not forest.tries
    with without_gc():
        for trie in _build_tries(disk, forest, residency.memory, residency.clock.offset):
            _finish_trie(trie, residency.evictor)
            forest.add(trie)
    while disk.claimed_bytes > disk.budget_bytes and residency.evictor.evict_one(Tier.DISK):
        pass


def _build_tries(disk: Disk, forest: SaltForest, memory: Memory, clock_offset: float) -> Iterator[SaltTrie]:
    roots: dict[bytes, dict[bytes, _Border]] = defaultdict(lambda: defaultdict(_Border))
    for file in disk.files():
        file.num_users = 0
        roots[file.address.root][file.address.before].files.append(file)
    for record in disk.points():
        roots[record.address.root][record.address.before].points.append(record)
    for root, borders in roots.items():
        trie = forest.make(root)
        parts = _Edges(disk, trie, borders).build()
        _Contents(disk, trie, memory, clock_offset).attach(parts)
        for border in borders.values():  # those that were not reached
            _drop_border(disk, border)
        yield trie


class _Edges:
    """Builds the edges of one trie, from the borders of its index, which are taken out as they are reached."""

    def __init__(self, disk: Disk, trie: SaltTrie, borders: dict[bytes, _Border]) -> None:
        self._disk, self._trie, self._borders = disk, trie, borders
        self._parts: list[_PathPart] = []

    def build(self) -> list[_PathPart]:
        pending = [(self._disk.digests(self._trie.root_id, b"")[0], _hold_at(self._trie.root, 0))]
        while pending:
            digest, hold = pending.pop()
            pending += self._follow(digest, hold)
        return self._parts

    def _follow(self, digest: bytes, hold: Hold) -> list[tuple[bytes, Hold]]:
        """Go on from a border while the path does not part; returns the borders after the blocks where it does."""
        tokens: list[bytes] = []
        run: list[_Border] = []
        offset = hold.offset
        border = self._take(digest, offset)
        while border is not None and len(blocks := border.blocks()) == 1:
            run.append(border)
            tokens += blocks
            digest = self._disk.keys.after(digest, tokens[-1])
            offset += num_tokens(tokens[-1])
            border = self._take(digest, offset)
        self._extend(hold, b"".join(tokens))
        self._parts.append(_PathPart(hold, run))
        branches = blocks.items() if border is not None else ()
        return [self._branch(hold, digest, block, own) for block, own in branches]

    def _take(self, digest: bytes, offset: int) -> _Border | None:
        """The border with this digest, at `offset`; entries that claim another offset are dropped."""
        border = self._borders.pop(digest, None)
        if border is None:
            return None
        strange = _Border(
            [each for each in border.files if not _begins_at(each.address, offset)],
            [each for each in border.points if not _begins_at(each.address, offset)],
        )
        if strange.files or strange.points:
            border.files = [each for each in border.files if _begins_at(each.address, offset)]
            border.points = [each for each in border.points if _begins_at(each.address, offset)]
            _drop_border(self._disk, strange)
        return border if border.files or border.points else None

    def _branch(self, hold: Hold, digest: bytes, block: bytes, own: _Border) -> tuple[bytes, Hold]:
        """Add one of several blocks that follow a border, with its entries."""
        end = _hold_at(hold.node, hold.offset)
        self._extend(end, block)
        self._parts.append(_PathPart(end, [own]))
        return self._disk.keys.after(digest, block), _hold_at(end.node, end.offset)

    def _extend(self, hold: Hold, tokens: bytes) -> None:
        """Add the tokens that the trie lacks below a hold, and move the hold to their end."""
        end, found = hold.offset + num_tokens(tokens), descend(hold.node, hold.offset, tokens)
        node = found.node
        if found.rest and found.offset == node.end and node.is_leaf and not node.is_root:
            self._trie.grow(node, found.rest)
        elif found.rest:
            parent = self._trie.split(node, found.offset) if found.offset < node.end else node
            node = self._trie.append(parent, found.rest)
        hold.move(node, end)


@dataclass(frozen=True)
class Divergence:
    """Where tokens leave the tree: at an offset of a node, and the rest of the tokens."""

    node: Node
    offset: int
    rest: bytes


def descend(node: Node, offset: int, tokens: bytes) -> Divergence:
    """Follow tokens from an offset of a node down the tree."""
    while tokens:
        shared = common_prefix(cut(node.edge, offset - node.start), tokens)
        offset, tokens = offset + shared, cut(tokens, shared)
        child = node.children.get(memoryview(tokens).cast("i")[0]) if tokens and offset == node.end else None
        if child is None:
            break
        node = child
    return Divergence(node, offset, tokens)


def _hold_at(node: Node, offset: int) -> Hold:
    hold = Hold(node, offset)
    node.holds.add(hold)
    return hold


def _drop_border(disk: Disk, border: _Border) -> None:
    for file in border.files:
        _drop_file(disk, file)
    for record in border.points:
        disk.drop_point(record.address)


def _start(page: Page) -> int:
    return page.start


def _drop_file(disk: Disk, file: DiskFile) -> None:
    file.num_users = 1
    disk.drop(file)


class _Contents:
    """Attaches files and restore points to the edges of one trie."""

    def __init__(self, disk: Disk, trie: SaltTrie, memory: Memory, clock_offset: float) -> None:
        self._disk, self._trie, self._memory = disk, trie, memory
        self._groups = {group.index: group for group in memory.groups}
        self._clock_offset = clock_offset  # added to a time on disk, it gives one of this run's clock
        self._broken: list[tuple[Node, Point]] = []  # restore points that cannot be restored
        self._states: dict[tuple[Node, int], list[State]] = defaultdict(list)

    def attach(self, parts: list[_PathPart]) -> None:
        """Attach everything; the holds of the parts are removed."""
        for part in parts:
            for border in part.borders:
                if len(border.files) > 1:
                    border.files.sort(key=lambda file: file.address.start - file.address.end)  # the longest first
                for file in border.files:
                    self._attach(part, file)
        for part in parts:
            for border in part.borders:
                for record in border.points:
                    self._add_point(part, record)
            part.hold.node.holds.discard(part.hold)
        for node, point in self._broken:  # not before all are there: they may share window rows
            self._trie.drop_point(node, point)
        for states in self._states.values():
            for state in states:
                self._trie.memory.release(state)  # of no restore point
        self._release_unused()

    def _attach(self, part: _PathPart, file: DiskFile) -> None:
        address, group = file.address, self._groups.get(file.address.group)
        if group is not None and (address.start < address.end) == (group.kind is not Kind.RECURRENT):
            node, used = part.hold.node.at(address.end), self._clock_offset + file.last_used
            if group.kind is Kind.RECURRENT:
                self._states[node, address.end].append(state_on_disk(group, file))
                file.num_users = 1
                node.last_used = max(node.last_used, used)
            else:
                self._attach_rows(node, group, file, used)
        if file.num_users:
            self._trie.memory.count_file(file)
        else:
            _drop_file(self._disk, file)

    def _attach_rows(self, node: Node, group: Group, file: DiskFile, used: float) -> None:
        """Make pages of the rows that a longer file does not hold already, in every node with such rows."""
        start, end = file.address.start, file.address.end
        for at in node.upwards(start):
            low = max(start, at.start)
            pages = at.pages.setdefault(group, [])
            if not pages or pages[-1].end <= low:  # the usual case
                ranges = [(low, min(end, at.end))]
            else:
                ranges = list(at.missing_between(group, low, end, self._memory.page_tokens))
            for first, last in ranges:
                insort(pages, page_on_disk(group, first, last, file), key=_start)
                file.num_users += 1
            at.last_used = max(at.last_used, used)

    def _add_point(self, part: _PathPart, record: PointRecord) -> None:
        """Make a restore point again; one that lacks a state or window rows is noted as broken."""
        node, offset, memory = part.hold.node.at(record.address.end), record.address.end, self._memory
        point = add_recorded_point(self._trie, node, record)
        point.states = {state.group: state for state in self._states.pop((node, offset), [])}
        is_whole = all(group in point.states for group in memory.recurrent)
        for group in memory.windows:
            self._trie.hold_window(node, point, group)
            missing = node.missing_on_path(group, group.first_needed(offset), offset, memory.page_tokens)
            is_whole = is_whole and next(missing, None) is None
        if not is_whole:
            self._broken.append((node, point))

    def _release_unused(self) -> None:
        """Drop the window rows that no restore point needs."""
        for node in self._trie.walk():
            for group, pages in node.pages.items():
                if group.kind is Kind.WINDOW:
                    for page in [page for page in pages if not page.users]:
                        self._trie.drop_page(node, page)


def page_on_disk(group: Group, start: int, end: int, file: DiskFile) -> Page:
    """Rows [start, end) of a file, as a page of the tree; window rows have no user yet."""
    users: set[Point | Hold] = set() if group.kind is Kind.WINDOW else _NO_USERS
    return Page(group, start, end, None, 0, users, Tier.DISK, {file: (start, end)})


def state_on_disk(group: Group, file: DiskFile) -> State:
    """The content of a file, as a state of the tree."""
    offset = file.address.end
    return State(group, offset, None, 0, Tier.DISK, {file: (offset, offset)})


def add_recorded_point(trie: SaltTrie, node: Node, record: PointRecord) -> Point:
    """Add a restore point as the disk's index has it, still without its content."""
    point = trie.add_point(node, record.address.end, Reason(record.reason), kept=record.is_kept)
    point.superseded = record.is_superseded
    point.indexed = record
    return point


def _finish_trie(trie: SaltTrie, evictor: Evictor) -> None:
    """Mark holes, remove leaves that hold nothing, give parents the recency of their children, offer all to eviction."""
    for node in reversed(list(trie.walk())):
        if node.parent is None:
            continue
        if is_empty_leaf(node) and not node.points:
            trie.remove(node)
            continue
        node.has_holes = trie.lacks_rows(node)
        node.hits = 1
        node.parent.last_used = max(node.parent.last_used, node.last_used)
    for node in trie.walk():
        evictor.offer(trie, node)
