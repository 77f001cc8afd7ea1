"""Restoring: what is on disk becomes part of the tree, after a start or an import, from what the index says alone.

No page is read: content stays on disk until a request needs it. A page's address names the page border before it by a
digest, so files are followed from the root, border by border. First the edges are built, then pages, states and restore
points are attached to them, where the tree lacks them: what it has in memory stays as it is. Entries that are not reached,
because a page before them is missing, and those that the tree does not need, are dropped. All of it is one step.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from bough.cache.disk import Disk
from bough.cache.residency import Residency, SaltTrie
from bough.cache.residency.placing import AddedEdges
from bough.cache.tree.address import Address, DiskFile, PointRecord
from bough.cache.tree.node import Hold, Node, Point, Reason
from bough.cache.tree.state import Group, Kind, Page, State, Tier
from bough.errors import EngineError
from bough.system.processes import without_gc
from bough.tokens import cut, num_tokens

_NO_USERS: set[Point | Hold] = set()  # of pages of full attention, which never have any


@dataclass
class _Border:
    """Files and restore points that begin between one page border and the next."""

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
    files, points = defaultdict[bytes, list[DiskFile]](list), defaultdict[bytes, list[PointRecord]](list)
    for file in disk.files():
        files[file.address.root].append(file)
    for record in disk.points():
        points[record.address.root].append(record)
    with without_gc():
        for root in files.keys() | points.keys():
            trie = forest.make(root)
            _Attaching(residency, disk, trie, AddedEdges(trie, trie.split)).attach(files[root], points[root])
            forest.add(trie)
    while disk.claimed_bytes > disk.budget_bytes and residency.evictor.evict_one(Tier.DISK):
        pass


def attach(residency: Residency, salt: str, files: Sequence[DiskFile], points: Sequence[PointRecord]) -> None:
    """Add to the tree of a salt what an import has put on disk, and drop what the tree does not need.

    Costs about as much for each file as a start does. Files that were dropped or cleared meanwhile are left out.
    """
    disk, trie = residency.memory.disk, residency.forest.open(salt)
    assert disk is not None
    added = AddedEdges(trie, partial(residency.saver.split_edge, trie))
    _Attaching(residency, disk, trie, added).attach([file for file in files if file.is_saved and disk.has(file)], points)
    residency.saver.save_split()
    residency.evictor.forget_if_empty(trie)


class _Edges:
    """Adds the edges to a trie that lead along some borders, which are taken out as they are reached."""

    def __init__(self, disk: Disk, trie: SaltTrie, added: AddedEdges, borders: dict[bytes, _Border]) -> None:
        self._disk, self._trie, self._added, self._borders = disk, trie, added, borders
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
        if not self._add_part(hold, b"".join(tokens), run):
            return []
        branches = list[tuple[bytes, Hold]]()
        for block, own in blocks.items() if border is not None else ():
            end = _hold_at(hold.node, hold.offset)
            if self._add_part(end, block, [own]):
                branches.append((self._disk.keys.after(digest, block), _hold_at(end.node, end.offset)))
        return branches

    def _take(self, digest: bytes, offset: int) -> _Border | None:
        """What there is after the border with this digest, at `offset`, without entries that claim another offset."""
        border = self._borders.pop(digest, None)
        if border is None:
            return None
        files = [each for each in border.files if _begins_at(each.address, offset)]
        points = [each for each in border.points if _begins_at(each.address, offset)]
        return _Border(files, points) if files or points else None

    def _add_part(self, hold: Hold, tokens: bytes, borders: list[_Border]) -> bool:
        """Add the tokens that the trie lacks below a hold, and move the hold to their end; False if that cannot be done."""
        self._parts.append(_PathPart(hold, borders))
        end, found = hold.offset + num_tokens(tokens), self._trie.match(tokens, start=hold)
        node = found.node
        if found.length < end:
            try:
                node = self._added.add(node, found.length, cut(tokens, found.length - hold.offset))
            except (EngineError, MemoryError):  # the edge cannot be split
                borders.clear()
                return False
        hold.move(node, end)
        return True


def _hold_at(node: Node, offset: int) -> Hold:
    hold = Hold(node, offset)
    node.holds.add(hold)
    return hold


def _start(page: Page) -> int:
    return page.start


class _Attaching:
    """Attaches files and restore points to one trie, along edges that are added for them."""

    def __init__(self, residency: Residency, disk: Disk, trie: SaltTrie, added: AddedEdges) -> None:
        self._disk, self._trie, self._added = disk, trie, added
        self._memory, self._evictor = residency.memory, residency.evictor
        self._groups = {group.index: group for group in residency.memory.groups}
        self._clock_offset = residency.clock.offset  # added to a time on disk, it gives one of this run's clock
        self._broken: list[tuple[Node, Point]] = []  # restore points that cannot be restored
        self._states: dict[tuple[Node, int], list[State]] = defaultdict(list)
        self._windows: set[Node] = set()  # with new rows of windows

    def attach(self, files: Sequence[DiskFile], points: Sequence[PointRecord]) -> None:
        """Attach everything that has a place, and drop the rest."""
        borders: dict[bytes, _Border] = defaultdict(_Border)
        for file in files:
            borders[file.address.before].files.append(file)
        for record in points:
            borders[record.address.before].points.append(record)
        parts = _Edges(self._disk, self._trie, self._added, borders).build()
        unplaced = {record.address for record in points}
        for part in parts:
            for border in part.borders:
                if len(border.files) > 1:
                    border.files.sort(key=lambda file: file.address.start - file.address.end)  # the longest first
                for file in border.files:
                    self._attach(part.hold.node, file)
        for part in parts:
            for border in part.borders:
                for record in border.points:
                    self._add_point(part.hold.node, record)
                    unplaced.discard(record.address)
            part.hold.node.holds.discard(part.hold)
        self._drop_useless()
        self._disk.drop_unused(files)
        for address in unplaced:
            self._disk.drop_point(address)
        self._finish([part.hold.node for part in parts])

    def _attach(self, end: Node, file: DiskFile) -> None:
        address, group = file.address, self._groups.get(file.address.group)
        if group is None or (address.start < address.end) != (group.kind is not Kind.RECURRENT):
            return
        node, used = end.at(address.end), self._clock_offset + file.last_used
        node.hits = max(node.hits, file.hits)
        if group.kind is Kind.RECURRENT:
            state = State(group, address.end, None, 0, Tier.DISK, {file: (address.end, address.end)})
            self._states[node, address.end].append(state)
            self._use(file)
            node.last_used = max(node.last_used, used)
        else:
            self._attach_rows(node, group, file, used)

    def _use(self, file: DiskFile) -> None:
        if not file.num_users:
            self._trie.memory.count_file(file)
        self._disk.use(file)

    def _attach_rows(self, node: Node, group: Group, file: DiskFile, used: float) -> None:
        """Make pages of the rows that neither the tree nor a longer file has, in every node with such rows."""
        start, end = file.address.start, file.address.end
        for at in node.upwards(start):
            low = max(start, at.start)
            pages = at.pages.setdefault(group, [])
            if not pages or pages[-1].end <= low:  # the usual case
                ranges = [(low, min(end, at.end))]
            else:
                ranges = list(at.missing_between(group, low, end, self._memory.page_tokens))
            for first, last in ranges:
                users = set[Point | Hold]() if group.kind is Kind.WINDOW else _NO_USERS
                insort(pages, Page(group, first, last, None, 0, users, Tier.DISK, {file: (first, last)}), key=_start)
                self._use(file)
            at.last_used = max(at.last_used, used)
            if group.kind is Kind.WINDOW and ranges:
                self._windows.add(at)

    def _add_point(self, end: Node, record: PointRecord) -> None:
        """Make a restore point, if there is none; one that lacks a state or window rows is noted as broken."""
        node, offset, memory = end.at(record.address.end), record.address.end, self._memory
        if (known := node.points.get(offset)) is not None:
            self._trie.keep_point(node, known, known.kept or record.is_kept)
            return
        point = self._trie.add_point(node, offset, Reason(record.reason), kept=record.is_kept)
        point.superseded, point.indexed = record.is_superseded, record
        for state in self._states.pop((node, offset), []):
            if state.group in point.states:  # an archive may have it more than once
                self._trie.memory.release(state)
            else:
                point.states[state.group] = state
        is_whole = all(group in point.states for group in memory.recurrent)
        for group in memory.windows:
            self._trie.hold_window(node, point, group)
            missing = node.missing_on_path(group, group.first_needed(offset), offset, memory.page_tokens)
            is_whole = is_whole and next(missing, None) is None
        if not is_whole:
            self._broken.append((node, point))

    def _drop_useless(self) -> None:
        """Drop broken restore points, states of none, and the window rows that no restore point needs."""
        for node, point in self._broken:  # not before all are there: they may share window rows
            self._trie.drop_point(node, point)
        for states in self._states.values():
            for state in states:
                self._trie.memory.release(state)
        for node in self._windows:
            for group in self._memory.windows:
                for page in [page for page in node.pages.get(group, ()) if not page.users]:
                    self._trie.drop_page(node, page)

    def _finish(self, ends: Iterable[Node]) -> None:
        """Mark holes, remove new leaves that hold nothing, give parents the uses of their children, offer all."""
        nodes = set[Node]()
        for end in ends:
            while end.parent is not None and end not in nodes:
                nodes.add(end)
                end = end.parent
        for node in sorted(nodes, key=lambda node: -node.end):
            assert node.parent is not None
            if self._added.is_empty(node):
                self._trie.remove(node)
                nodes.discard(node)
                continue
            node.has_holes = self._trie.lacks_rows(node)
            node.hits = max(node.hits, sum(child.hits for child in node.children.values()))
            node.parent.last_used = max(node.parent.last_used, node.last_used)
        self._trie.version += 1
        for node in nodes:
            self._evictor.offer(self._trie, node)
