"""Grafting: content that an import has put on disk becomes part of the live tree of its salt, while requests run.

No page is read. Prefixes come first, and the tree is whole after each of them: rows of full attention come together with
their edge, window rows and states together with the restore point that needs them. The content of the tree stays as it is:
imported files fill what is missing. Until the tree uses it an imported file has no user; files that stay without one are
dropped at the end. Either the graft or, if that never begins, the import does so: the first to claim the imported tree.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bough.cache.residency import Residency, SaltTrie
from bough.cache.residency.placing import AddedEdges, HeldRows, cover
from bough.cache.restore import add_recorded_point, descend, page_on_disk, state_on_disk
from bough.cache.steps import Steps
from bough.cache.tree.address import DiskFile, PointRecord
from bough.cache.tree.node import Node
from bough.cache.tree.state import Group, Kind, Page
from bough.errors import EngineError
from bough.tokens import TOKEN_BYTES, cut, num_tokens

NO_STEP = -1


@dataclass(frozen=True)
class Step:
    """Tokens that follow those of the step `parent`, and what an import has put on disk for the prefix up to their `end`.

    The parent is a whole page and comes earlier in the list, or it is NO_STEP.
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
    """All steps of an import, in the order in which they can be added. Any thread may make one; that takes a while."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps
        self.order = sorted(range(len(steps)), key=lambda index: steps[index].end)
        self.files = [file for step in steps for file in step.files]
        self._claimed = threading.Lock()  # taken by the first claim, and never released
        self._alike: dict[tuple[int, bytes], list[Step]] = defaultdict(list)
        for step in steps:
            self._alike[step.parent, step.tokens[:TOKEN_BYTES]].append(step)

    def claim(self) -> bool:
        """Whether the caller is the first to ask: it alone adds the files, or drops them. Any thread may ask."""
        return self._claimed.acquire(blocking=False)

    def alike(self, step: Step) -> Sequence[Step]:
        """The steps that may begin as this one does, itself included."""
        return self._alike[step.parent, step.tokens[:TOKEN_BYTES]]


class Graft:
    """One import's way into the tree of a salt."""

    def __init__(self, residency: Residency, salt: str, imported: ImportedTree) -> None:
        assert residency.memory.disk is not None
        self._disk, self._memory = residency.memory.disk, residency.memory
        self._forest, self._evictor, self._saver = residency.forest, residency.evictor, residency.saver
        self._groups = {group.index: group for group in residency.memory.groups}
        self._clock_offset = residency.clock.offset  # added to a time on disk, it gives one of this run's clock
        self._salt, self._imported, self._steps = salt, imported, imported.steps
        self._nodes: dict[int, Node] = {}  # for a step that is in the tree, a node on its path
        self._added = AddedEdges(residency.evictor, residency.saver)

    def run(self) -> Steps[None]:
        """Add everything that the tree can use, and drop the rest; does nothing if the import has been given up."""
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
        if index == NO_STEP:
            return trie.root
        node, end = self._nodes.get(index), self._steps[index].end
        if node is None:
            return None
        if not trie.has(node) or node.end < end:
            found = trie.match(self._path(index))
            if found.length < end:
                return None
            node = found.node
        self._nodes[index] = node = node.at(end)
        return node

    def _path(self, index: int) -> bytes:
        """All tokens up to the end of a step."""
        parts = []
        while index != NO_STEP:
            parts.append(self._steps[index].tokens)
            index = self._steps[index].parent
        return b"".join(reversed(parts))

    def _add_rows(self, index: int) -> None:
        """Bring the tokens of a step into the tree, if the rows of all new ones come with them, and fill holes."""
        step, trie = self._steps[index], self._forest.open(self._salt)
        files, node = self._usable(step, Kind.FULL), self._find(trie, step.parent)
        if node is not None:
            node = self._add_edge(trie, node, step, files)
        if node is not None:
            self._nodes[index] = node
            for file in files:
                self._fill(trie, node, file)
        self._evictor.forget_if_empty(trie)

    def _usable(self, step: Step, kind: Kind) -> list[DiskFile]:
        """The files of a step that are still on disk, and of a group of this kind."""
        return [
            file
            for file in step.files
            if (group := self._groups.get(file.address.group)) is not None
            and group.kind is kind
            and (file.address.start < file.address.end) == (kind is not Kind.RECURRENT)
            and file.is_saved
            and self._disk.has(file)
        ]

    def _add_edge(self, trie: SaltTrie, node: Node, step: Step, files: Sequence[DiskFile]) -> Node | None:
        """Return the node in which a step ends, below its parent's; created if its rows were imported, None if not."""
        found = descend(node, step.start, step.tokens)
        if not found.rest:
            return found.node
        if not self._has_rows(step, files, found.offset):
            return None
        last_used = max((file.last_used for file in files), default=0.0) + self._clock_offset
        try:
            return self._added.add(trie, found.node, found.offset, found.rest, last_used)
        except (EngineError, MemoryError):  # the edge cannot be split
            return None

    def _has_rows(self, step: Step, files: Sequence[DiskFile], start: int) -> bool:
        """Whether files hold the rows from `start` to a step's end. Without full attention it needs a restore point."""
        held = {file.address.group for file in files if file.address.start <= start}
        full = {group.index for group in self._memory.full}
        return full <= held if full else bool(step.points)

    def _fill(self, trie: SaltTrie, node: Node, file: DiskFile) -> None:
        """Let the tree use the rows of a file that it lacks, in every node with such rows."""
        group, used = self._groups[file.address.group], self._clock_offset + file.last_used
        for at in node.upwards(file.address.start):
            missing = list(at.missing_between(group, file.address.start, file.address.end, trie.page_tokens))
            for low, high in missing:
                self._add_page(trie, at, group, HeldRows(file, low, high))
            if missing:
                at.has_holes = trie.lacks_rows(at)
            if missing or at.last_used < used:
                at.last_used = max(at.last_used, used)
                self._evictor.offer(trie, at)

    def _add_page(self, trie: SaltTrie, node: Node, group: Group, rows: HeldRows[DiskFile]) -> Page:
        page = page_on_disk(group, rows.start, rows.end, rows.source)
        self._count_use(trie, rows.source)
        trie.add_page(node, page)
        return page

    def _count_use(self, trie: SaltTrie, file: DiskFile) -> None:
        if file.num_users == 0:
            trie.memory.count_file(file)
        self._disk.use(file)

    def _take_point(self, index: int, record: PointRecord) -> None:
        """Make a restore point, if its content is in the tree or comes with it; else drop it from the index."""
        trie = self._forest.open(self._salt)
        node = self._find(trie, index)
        is_known = node is not None and record.address.end in node.points
        if not is_known and (node is None or not self._add_point(trie, node, index, record)):
            self._disk.drop_point(record.address)
        if node is not None:
            self._added.remove_if_empty(trie, node)
        self._evictor.forget_if_empty(trie)

    def _add_point(self, trie: SaltTrie, node: Node, index: int, record: PointRecord) -> bool:
        states = {file.address.group: file for file in self._usable(self._steps[index], Kind.RECURRENT)}
        found = {group: self._find_window(trie, node, index, group) for group in self._memory.windows}
        if any(group.index not in states for group in self._memory.recurrent) or None in found.values():
            return False
        point = add_recorded_point(trie, node, record)
        for group in self._memory.recurrent:
            self._count_use(trie, states[group.index])
            point.states[group] = state_on_disk(group, states[group.index])
        for group, rows in found.items():
            for holder, each in rows or ():
                self._add_page(trie, holder, group, each).users.add(point)
                self._evictor.offer(trie, holder)
            trie.hold_window(node, point, group)
        self._evictor.offer(trie, node)
        return True

    def _find_window(
        self, trie: SaltTrie, node: Node, index: int, group: Group
    ) -> list[tuple[Node, HeldRows[DiskFile]]] | None:
        """The window rows that the tree lacks for a restore point at a step's end, by node; None if some are missing."""
        end = self._steps[index].end
        start, rows = group.first_needed(end), list[tuple[Node, HeldRows[DiskFile]]]()
        offered = list(self._offered(index, group))
        for at in node.upwards(start):
            for low, high in at.missing_between(group, start, end, trie.page_tokens):
                parts = cover(offered, low, high)
                if parts is None:
                    return None
                rows += [(at, part) for part in parts]
        return rows

    def _offered(self, index: int, group: Group) -> Iterator[HeldRows[DiskFile]]:
        """Window rows of imported files on the path of a step that a restore point at its end needs."""
        first = group.first_needed(self._steps[index].end)
        while index != NO_STEP and self._steps[index].end > first:
            step = self._steps[index]
            for other in self._imported.alike(step):
                shared = min(num_tokens(step.tokens), num_tokens(other.tokens))
                if cut(other.tokens, 0, shared) == cut(step.tokens, 0, shared):
                    for file in self._usable(other, Kind.WINDOW):
                        if file.address.group == group.index:
                            yield HeldRows(file, file.address.start, min(file.address.end, step.start + shared))
            index = step.parent
