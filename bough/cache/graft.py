"""Grafting: what an import has put on disk becomes part of the live tree of its salt, while requests run.

No page is read. Prefixes come before what follows them, and the tree is whole after each of them: rows of full attention
come together with their edge, window rows and states together with the restore point that needs them. What the tree holds
already stays as it is: imported files fill what is missing. Until it has a place in the tree an imported file has no user;
those that find none are dropped at the end. Either the graft or, if that never begins, the import sees to this: whoever
claims the imported tree first.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bough.cache.disk.rows import PointRecord
from bough.cache.residency import Clock, Residency, SaltForest, SaltTrie
from bough.cache.restore import Place, descend, page_on_disk
from bough.cache.steps import Steps
from bough.cache.tree.address import DiskFile
from bough.cache.tree.node import IndexedPoint, Node, Reason
from bough.cache.tree.state import Group, Kind, Page, State, Tier
from bough.cache.tree.tokens import TOKEN_BYTES, cut, num_tokens
from bough.errors import EngineError

NO_PARENT = -1


@dataclass(frozen=True)
class ImportedStep:
    """Tokens that follow those of the step `parent`, which stands earlier in the list, or NO_PARENT; and what an import has
    put on disk for the prefix that ends with them, at the offset `end`.
    """

    parent: int
    tokens: bytes
    end: int
    files: list[DiskFile] = field(default_factory=list)
    points: list[PointRecord] = field(default_factory=list)

    @property
    def start(self) -> int:
        return self.end - num_tokens(self.tokens)


class ImportedTree:
    """All steps of an import, in the order in which they can be taken up. Any thread may make one, which costs a while."""

    def __init__(self, steps: Sequence[ImportedStep]) -> None:
        self.steps = steps
        self.order = sorted(range(len(steps)), key=lambda index: steps[index].end)
        self.files = [file for step in steps for file in step.files]
        self._claimed = threading.Lock()  # taken by the first claim, and never released
        self._alike: dict[tuple[int, bytes], list[ImportedStep]] = defaultdict(list)
        for step in steps:
            self._alike[step.parent, step.tokens[:TOKEN_BYTES]].append(step)

    def claim(self) -> bool:
        """Whether the caller is the first to ask: it alone takes the files up, or drops them. Any thread may ask."""
        return self._claimed.acquire(blocking=False)

    def alike(self, step: ImportedStep) -> Sequence[ImportedStep]:
        """The steps that may begin as this one does, itself included."""
        return self._alike[step.parent, step.tokens[:TOKEN_BYTES]]


@dataclass(frozen=True)
class _Rows:
    """Rows [start, end) that a file holds for a certain path."""

    file: DiskFile
    start: int
    end: int


class Graft:
    """One import's way into the tree of a salt."""

    def __init__(self, forest: SaltForest, residency: Residency, clock: Clock, salt: str, imported: ImportedTree) -> None:
        assert residency.memory.disk is not None
        self._disk = residency.memory.disk
        self._forest, self._evictor, self._saver = forest, residency.evictor, residency.saver
        self._groups = {group.index: group for group in residency.memory.groups}
        self._clock_offset = clock.offset  # added to a time on disk, it gives one of this run's clock
        self._salt, self._imported, self._steps = salt, imported, imported.steps
        self._places: dict[int, Node] = {}  # for a step that is in the tree, a node on its path
        self._own: set[Node] = set()

    def run(self) -> Steps[None]:
        """Take up everything that has a place in the tree, and drop the rest; nothing, if the import has been given up."""
        if not self._imported.claim():
            return
        files = iter(self._imported.files)
        try:
            for index in self._imported.order:
                self._add_rows(index)
                self._saver.save_split()  # of an edge that was split for it
                yield
            for index in self._imported.order:
                for record in self._steps[index].points:
                    self._take_point(index, record)
                    yield
            for file in files:
                self._disk.drop_unused([file])
                yield
        finally:
            self._disk.drop_unused(files)  # if it was given up, there are some left

    def _find(self, trie: SaltTrie, index: int) -> Node | None:
        """The node in which a step ends, if the tree has its path."""
        if index == NO_PARENT:
            return trie.root
        node, end = self._places.get(index), self._steps[index].end
        if node is None:
            return None
        if not trie.holds(node) or node.end < end:
            found = trie.match(self._path(index))
            node = found.node if found.length == end else None
        while node is not None and end <= node.start:
            node = node.parent
        if node is not None:
            self._places[index] = node
        return node

    def _path(self, index: int) -> bytes:
        """All tokens up to the end of a step."""
        parts = []
        while index != NO_PARENT:
            parts.append(self._steps[index].tokens)
            index = self._steps[index].parent
        return b"".join(reversed(parts))

    def _add_rows(self, index: int) -> None:
        """Bring the tokens of a step into the tree, if the rows of all that is new come with them, and fill holes."""
        step, trie = self._steps[index], self._forest.open(self._salt)
        files, node = self._usable(step, Kind.FULL), self._find(trie, step.parent)
        if node is not None:
            node = self._reach(trie, node, step, files)
        if node is not None:
            self._places[index] = node
            for file in files:
                self._fill(trie, node, file)
        self._evictor.forget_if_empty(trie)

    def _usable(self, step: ImportedStep, kind: Kind) -> list[DiskFile]:
        """The files of a step that are still on disk, and of a group of this kind."""
        files = []
        for file in step.files:
            address, group = file.address, self._groups.get(file.address.group)
            is_of_kind = group is not None and group.kind is kind
            if is_of_kind and (address.start < address.end) == (kind is not Kind.RECURRENT):
                files.append(file)
        return [file for file in files if file.is_saved and self._disk.has(file)]

    def _reach(self, trie: SaltTrie, node: Node, step: ImportedStep, files: Sequence[DiskFile]) -> Node | None:
        """The node in which a step ends, below one in which its parent does; made if its rows are here, else None."""
        place = descend(node, step.start, step.tokens)
        if not place.rest:
            return place.node
        if not self._has_rows(step, files, place.offset):
            return None
        try:
            return self._extend(trie, place, max((file.last_used for file in files), default=0.0) + self._clock_offset)
        except (EngineError, MemoryError):  # the edge cannot be split
            return None

    def _has_rows(self, step: ImportedStep, files: Sequence[DiskFile], start: int) -> bool:
        """Whether files hold the rows from `start` to a step's end. Without full attention it takes a restore point."""
        starts = [file.address for file in files if file.address.start <= start]
        full = [group.index for group in self._groups.values() if group.kind is Kind.FULL]
        return all(any(address.group == group for address in starts) for group in full) if full else bool(step.points)

    def _extend(self, trie: SaltTrie, place: Place, used: float) -> Node:
        """Add the tokens that the tree lacks. Their rows follow at once."""
        node = place.node
        if place.offset < node.end:
            tail, node = node, trie.split(node, place.offset)
            self._saver.note_split(trie, tail)
            self._evictor.offer(trie, tail)
            self._evictor.offer(trie, node)
        elif node in self._own and node.is_leaf:
            trie.grow(node, place.rest)
            return node
        child = trie.append(node, place.rest, used)
        child.hits = 1
        self._own.add(child)
        return child

    def _fill(self, trie: SaltTrie, node: Node, file: DiskFile) -> None:
        """Let the tree use the rows of a file that it lacks, in every node that they lie in."""
        group, used = self._groups[file.address.group], self._clock_offset + file.last_used
        at: Node | None = node
        while at is not None and at.parent is not None and at.end > file.address.start:
            missing = list(at.missing_between(group, file.address.start, file.address.end, trie.page_tokens))
            for low, high in missing:
                self._add_page(trie, at, group, _Rows(file, low, high))
            if missing:
                at.has_holes = self._has_holes(at, trie.page_tokens)
            if missing or at.last_used < used:
                at.last_used = max(at.last_used, used)
                self._evictor.offer(trie, at)
            at = at.parent

    def _add_page(self, trie: SaltTrie, node: Node, group: Group, rows: _Rows) -> Page:
        page = page_on_disk(group, rows.start, rows.end, rows.file)
        self._count_use(trie, rows.file)
        trie.add_page(node, page)
        return page

    def _count_use(self, trie: SaltTrie, file: DiskFile) -> None:
        if file.num_users == 0:
            trie.memory.count_file(file)
        self._disk.use(file)

    def _has_holes(self, node: Node, page_tokens: int) -> bool:
        full = (group for group in self._groups.values() if group.kind is Kind.FULL)
        return any(any(node.missing_between(group, node.start, node.end, page_tokens)) for group in full)

    def _take_point(self, index: int, record: PointRecord) -> None:
        """Make a restore point, if all that it needs is in the tree or comes with it; else the index forgets it."""
        trie = self._forest.open(self._salt)
        node = self._find(trie, index)
        is_known = node is not None and record.address.end in node.points
        if not is_known and (node is None or not self._add_point(trie, node, index, record)):
            self._disk.drop_point(record.address)
        if node is not None and node in self._own and node.is_leaf and not node.points and not any(node.items()):
            self._evictor.remove(trie, node)  # it was there for this point alone
        self._evictor.forget_if_empty(trie)

    def _add_point(self, trie: SaltTrie, node: Node, index: int, record: PointRecord) -> bool:
        states = self._find_states(index)
        windows = [group for group in self._groups.values() if group.kind is Kind.WINDOW]
        found = [self._find_window(trie, node, index, group) for group in windows]
        if states is None or any(rows is None for rows in found):
            return False
        point = trie.add_point(node, record.address.end, Reason(record.reason), kept=record.is_kept)
        point.superseded = record.is_superseded
        point.indexed = IndexedPoint(record.address, point.reason, point.kept, point.superseded, record.last_used)
        for file in states:
            group, at = self._groups[file.address.group], record.address.end
            self._count_use(trie, file)
            point.states[group] = State(group, at, None, 0, Tier.DISK, {file: (at, at)})
        for group, rows in zip(windows, found, strict=True):
            for holder, each in rows or ():
                self._add_page(trie, holder, group, each).users.add(point)
                self._evictor.offer(trie, holder)
            trie.hold_window(node, point, group)
        self._evictor.offer(trie, node)
        return True

    def _find_states(self, index: int) -> list[DiskFile] | None:
        """One file for each recurrent group at a step's end; None if one is missing."""
        files = {file.address.group: file for file in self._usable(self._steps[index], Kind.RECURRENT)}
        wanted = [group.index for group in self._groups.values() if group.kind is Kind.RECURRENT]
        return [files[group] for group in wanted] if all(group in files for group in wanted) else None

    def _find_window(self, trie: SaltTrie, node: Node, index: int, group: Group) -> list[tuple[Node, _Rows]] | None:
        """The window rows that the tree lacks for a restore point at a step's end, by node; None if some are nowhere."""
        end = self._steps[index].end
        start, rows = group.first_needed(end), list[tuple[Node, _Rows]]()
        offered = list(self._offered(index, group))
        at: Node | None = node
        while at is not None and at.parent is not None and at.end > start:
            for low, high in at.missing_between(group, start, end, trie.page_tokens):
                parts = _cover(offered, low, high)
                if parts is None:
                    return None
                rows += [(at, part) for part in parts]
            at = at.parent
        return rows

    def _offered(self, index: int, group: Group) -> Iterator[_Rows]:
        """Window rows of imported files on the path of a step, as far as a restore point at its end needs them."""
        first = group.first_needed(self._steps[index].end)
        while index != NO_PARENT and self._steps[index].end > first:
            step = self._steps[index]
            for other in self._imported.alike(step):
                shared = min(num_tokens(step.tokens), num_tokens(other.tokens))
                if cut(other.tokens, 0, shared) == cut(step.tokens, 0, shared):
                    for file in self._usable(other, Kind.WINDOW):
                        if file.address.group == group.index:
                            yield _Rows(file, file.address.start, min(file.address.end, step.start + shared))
            index = step.parent


def _cover(offered: Sequence[_Rows], low: int, high: int) -> list[_Rows] | None:
    """Rows [low, high) from what is offered, each part from the one that reaches furthest; None if some are missing."""
    parts = []
    while low < high:
        best = max((rows for rows in offered if rows.start <= low < rows.end), key=lambda rows: rows.end, default=None)
        if best is None:
            return None
        parts.append(_Rows(best.file, low, min(high, best.end)))
        low = parts[-1].end
    return parts
