"""Restoring: the tree as an earlier run left it on disk, built again from the index alone.

No page is read: content stays on disk until a request needs it. A page's address names the page border before it by a
digest, so the index is walked from the root, border by border. First the edges are built, then pages, states and restore
points are attached to them. What the walk does not reach, because something before it is missing, is dropped.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bough.cache.disk import Disk
from bough.cache.disk.rows import PointRecord
from bough.cache.residency import Clock, Residency, SaltForest, SaltTrie
from bough.cache.residency.evictor import Evictor
from bough.cache.tree.address import Address, DiskFile
from bough.cache.tree.node import IndexedPoint, Node, Pin, Point, Reason
from bough.cache.tree.state import Group, Kind, Page, State, Tier
from bough.cache.tree.tokens import common_prefix, cut, num_tokens
from bough.system.processes import without_gc

_NO_USERS: set[Point | Pin] = set()  # of pages of full attention, which never have any


@dataclass
class _Border:
    """What the index knows to follow one page border: files and restore points before the next."""

    files: list[DiskFile] = field(default_factory=list)
    points: list[PointRecord] = field(default_factory=list)

    def split_off(self, offset: int) -> _Border:
        """Take out what does not begin at `offset` and end with its tokens."""
        strange = _Border(
            [each for each in self.files if not _lies_at(each.address, offset)],
            [each for each in self.points if not _lies_at(each.address, offset)],
        )
        if strange.files or strange.points:
            self.files = [each for each in self.files if _lies_at(each.address, offset)]
            self.points = [each for each in self.points if _lies_at(each.address, offset)]
        return strange

    def blocks(self) -> dict[bytes, _Border]:
        """The token strings that follow, without those that are the beginning of another, each with what lies on it."""
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


def _lies_at(address: Address, offset: int) -> bool:
    return address.end - num_tokens(address.tokens) == offset


@dataclass(frozen=True)
class _PathPart:
    """Some borders that lie on one path, and a pin at the path's end."""

    pin: Pin
    borders: list[_Border]

    def node_of(self, address: Address) -> Node:
        """The node in which an address ends."""
        node = self.pin.node
        while address.end <= node.start:
            assert node.parent is not None
            node = node.parent
        return node


def restore(forest: SaltForest, residency: Residency, clock: Clock) -> None:
    """Build the tries that the disk holds, as far as its budget goes. The forest must be empty."""
    disk = residency.memory.disk
    assert disk is not None and not forest.tries
    with without_gc():
        for trie in _build_tries(disk, forest, residency.memory.groups, clock):
            _settle(trie, residency.evictor)
            forest.add(trie)
    while disk.claimed_bytes > disk.budget_bytes and residency.evictor.evict_one(Tier.DISK):
        pass


def _build_tries(disk: Disk, forest: SaltForest, groups: Sequence[Group], clock: Clock) -> Iterator[SaltTrie]:
    roots: dict[bytes, dict[bytes, _Border]] = defaultdict(lambda: defaultdict(_Border))
    for file in disk.files():
        file.num_users = 0
        roots[file.address.root][file.address.before].files.append(file)
    for record in disk.points():
        roots[record.address.root][record.address.before].points.append(record)
    for root, borders in roots.items():
        trie = forest.make(root)
        parts = _Edges(disk, trie, borders).build()
        _Contents(disk, trie, groups, clock.offset).attach(parts)
        for border in borders.values():  # those that were not reached
            _drop_border(disk, border)
        yield trie


class _Edges:
    """Builds the edges of one trie, from the borders of its index, which are taken out as they are reached."""

    def __init__(self, disk: Disk, trie: SaltTrie, borders: dict[bytes, _Border]) -> None:
        self._disk, self._trie, self._borders = disk, trie, borders
        self._parts: list[_PathPart] = []

    def build(self) -> list[_PathPart]:
        pending = [(self._disk.digests(self._trie.root_id, b"")[0], _pin(self._trie.root, 0))]
        while pending:
            digest, pin = pending.pop()
            pending += self._follow(digest, pin)
        return self._parts

    def _follow(self, digest: bytes, pin: Pin) -> list[tuple[bytes, Pin]]:
        """Go on from a border while the path does not part; returns the borders after the blocks where it does."""
        tokens: list[bytes] = []
        run: list[_Border] = []
        offset = pin.offset
        border = self._take(digest, offset)
        while border is not None and len(blocks := border.blocks()) == 1:
            run.append(border)
            tokens += blocks
            digest = self._disk.keys.after(digest, tokens[-1])
            offset += num_tokens(tokens[-1])
            border = self._take(digest, offset)
        self._extend(pin, b"".join(tokens))
        self._parts.append(_PathPart(pin, run))
        branches = blocks.items() if border is not None else ()
        return [self._branch(pin, digest, block, own) for block, own in branches]

    def _take(self, digest: bytes, offset: int) -> _Border | None:
        """The border with this digest, at `offset`, without what claims to lie elsewhere, which is dropped."""
        border = self._borders.pop(digest, None)
        if border is None:
            return None
        elsewhere = border.split_off(offset)
        _drop_border(self._disk, elsewhere)
        return border if border.files or border.points else None

    def _branch(self, pin: Pin, digest: bytes, block: bytes, own: _Border) -> tuple[bytes, Pin]:
        """Add one of several blocks that follow a border, with what lies on it."""
        end = _pin(pin.node, pin.offset)
        self._extend(end, block)
        self._parts.append(_PathPart(end, [own]))
        return self._disk.keys.after(digest, block), _pin(end.node, end.offset)

    def _extend(self, pin: Pin, tokens: bytes) -> None:
        """Add what the trie lacks of these tokens below a pin, and move the pin to their end."""
        place = descend(pin.node, pin.offset, tokens)
        node = self._add(place.node, place.offset, place.rest) if place.rest else place.node
        pin.move(node, pin.offset + num_tokens(tokens))

    def _add(self, node: Node, at: int, tokens: bytes) -> Node:
        if at < node.end:
            node = self._trie.split(node, at)
        elif node.is_leaf and not node.is_root:
            self._trie.grow(node, tokens)
            return node
        return self._trie.append(node, tokens)


@dataclass(frozen=True)
class Place:
    """Where some tokens leave the tree: at an offset of a node, and what is left of them."""

    node: Node
    offset: int
    rest: bytes


def descend(node: Node, offset: int, tokens: bytes) -> Place:
    """Follow tokens from an offset of a node down the tree."""
    while tokens:
        shared = common_prefix(cut(node.edge, offset - node.start), tokens)
        offset, tokens = offset + shared, cut(tokens, shared)
        child = node.children.get(memoryview(tokens).cast("i")[0]) if tokens and offset == node.end else None
        if child is None:
            break
        node = child
    return Place(node, offset, tokens)


def _pin(node: Node, offset: int) -> Pin:
    pin = Pin(node, offset)
    node.pins.add(pin)
    return pin


def _drop_border(disk: Disk, border: _Border) -> None:
    for file in border.files:
        _drop_file(disk, file)
    for record in border.points:
        disk.drop_point(record.address)


def _drop_file(disk: Disk, file: DiskFile) -> None:
    file.num_users = 1
    disk.drop(file)


class _Contents:
    """Attaches files and restore points to the edges of one trie."""

    def __init__(self, disk: Disk, trie: SaltTrie, groups: Sequence[Group], clock_offset: float) -> None:
        self._disk, self._trie, self._memory = disk, trie, trie.memory
        self._page_tokens = trie.page_tokens
        self._groups = {group.index: group for group in groups}
        self._clock_offset = clock_offset  # added to a time on disk, it gives one of this run's clock
        self._broken: list[tuple[Node, Point]] = []  # restore points that something is missing of
        self._states: dict[tuple[Node, int], list[State]] = defaultdict(list)

    def attach(self, parts: list[_PathPart]) -> None:
        """Attach everything; the pins of the parts are removed."""
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
            part.pin.node.pins.discard(part.pin)
        for node, point in self._broken:  # not before all are there: they may share window rows
            self._trie.drop_point(node, point)
        for states in self._states.values():
            for state in states:
                self._memory.release(state)  # of no restore point
        self._release_unused()

    def _attach(self, part: _PathPart, file: DiskFile) -> None:
        address, group = file.address, self._groups.get(file.address.group)
        if group is not None and (address.start < address.end) == (group.kind is not Kind.RECURRENT):
            node, used = part.node_of(address), self._clock_offset + file.last_used
            if group.kind is Kind.RECURRENT:
                self._attach_state(node, group, file, used)
            else:
                self._attach_rows(node, group, file, used)
        if file.num_users:
            self._memory.count_file(file)
        else:
            _drop_file(self._disk, file)

    def _attach_state(self, node: Node, group: Group, file: DiskFile, used: float) -> None:
        offset = file.address.end
        self._states[node, offset].append(State(group, offset, None, 0, Tier.DISK, {file: (offset, offset)}))
        file.num_users = 1
        node.last_used = max(node.last_used, used)

    def _attach_rows(self, node: Node, group: Group, file: DiskFile, used: float) -> None:
        """Make pages of the rows that a longer file does not hold already, in every node that they lie in."""
        start, end = file.address.start, file.address.end
        at: Node | None = node
        while at is not None and at.parent is not None and start < end:
            low = max(start, at.start)
            pages = at.pages.setdefault(group, [])
            if not pages or pages[-1].end <= low:
                pages.append(page_on_disk(group, low, end, file))
                self._trie.count(pages=1)
                file.num_users += 1
            else:
                for first, last in list(at.missing_between(group, low, end, self._page_tokens)):
                    insort(pages, page_on_disk(group, first, last, file), key=lambda page: page.start)
                    self._trie.count(pages=1)
                    file.num_users += 1
            if used > at.last_used:
                at.last_used = used
            end, at = low, at.parent

    def _add_point(self, part: _PathPart, record: PointRecord) -> None:
        """Make a restore point again, if all that it needs is here."""
        address = record.address
        node = part.node_of(address)
        point = self._trie.add_point(node, address.end, Reason(record.reason), kept=record.is_kept)
        point.superseded = record.is_superseded
        point.indexed = IndexedPoint(address, point.reason, point.kept, point.superseded, record.last_used)
        point.states = {state.group: state for state in self._states.pop((node, address.end), [])}
        for group in self._groups.values():
            if group.kind is Kind.WINDOW:
                self._trie.hold_window(node, point, group)
        if not all(self._can_restore(node, point, group) for group in self._groups.values()):
            self._broken.append((node, point))

    def _can_restore(self, node: Node, point: Point, group: Group) -> bool:
        if group.kind is Kind.RECURRENT:
            return group in point.states
        if group.kind is Kind.FULL:
            return True
        at: Node | None = node
        start = group.first_needed(point.offset)
        while at is not None and at.parent is not None and at.end > start:
            if any(at.missing_between(group, start, point.offset, self._page_tokens)):
                return False
            at = at.parent
        return True

    def _release_unused(self) -> None:
        """Drop the window rows that no restore point needs."""
        for node in self._trie.walk():
            for group, pages in node.pages.items():
                if group.kind is Kind.WINDOW:
                    for page in [page for page in pages if not page.users]:
                        self._trie.drop_page(node, page)


def page_on_disk(group: Group, start: int, end: int, file: DiskFile) -> Page:
    """Rows [start, end) of a file, as a page of the tree; window rows have no user yet."""
    users: set[Point | Pin] = set() if group.kind is Kind.WINDOW else _NO_USERS
    return Page(group, start, end, None, 0, users, Tier.DISK, {file: (start, end)})


def _settle(trie: SaltTrie, evictor: Evictor) -> None:
    """Mark holes, remove leaves that hold nothing, give parents the recency of their children, offer all to eviction."""
    for node in reversed(list(trie.walk())):
        if node.parent is None:
            continue
        if node.is_leaf and not any(True for _ in node.items()) and not node.points:
            trie.remove(node)
            continue
        node.has_holes = any(
            group.kind is Kind.FULL and any(node.missing_between(group, node.start, node.end, trie.page_tokens))
            for group in trie.memory.groups
        )
        node.hits = 1
        node.parent.last_used = max(node.parent.last_used, node.last_used)
    for node in trie.walk():
        evictor.offer(trie, node)
