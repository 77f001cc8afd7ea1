"""The prefix trie: which token prefixes we hold state for.

A node owns one edge, the tokens in [start, end) counted from the root, and what it holds for each group. Nodes exist where
paths part and where they end. This module never looks inside a page; it cuts, joins and releases pages through its memory.

Always true between calls (`check` asserts it):
- a child starts where its parent ends, and is found under its first token;
- no two siblings start with the same token, and only the root's edge is empty;
- each row of a full-attention edge is held by exactly one page of that node, or the node is marked as having holes;
- pages lie inside their edge and inside one page border, sorted, without overlap;
- a window page has at least one user, and every user is on a path through its node;
- points lie in (start, end], holds too (at 0 for the root), and a hold knows its node;
- the memory has been told of every change (`note`, `forget`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from bough.cache.tree.node import Hold, Node, Point, Reason, needs
from bough.cache.tree.state import PAGE_TOKENS, Group, Kind, Page, PageStore, State, Tier
from bough.errors import EngineError
from bough.tokens import common_prefix, cut, num_tokens, pack

MAX_UNBRANCHED = 64
"""A match may cross this many edges where no path parts. If it crosses more, they are merged when a session closes."""

Publish = Callable[[Group, int, int], Iterable[Page]]
"""Makes the pages that hold these rows, one after the other."""


@dataclass(frozen=True)
class Match:
    """The longest prefix of some tokens that the trie knows. It may end inside the last node's edge."""

    length: int
    path: list[Node]  # below the root; the last node may be matched in part
    node: Node  # where the match ends: the path's last node, or the root

    def is_kept(self, end: int) -> bool:
        """Whether all tokens up to `end` were found, with a restore point there that was asked to be kept."""
        point = self.node.points.get(end)
        return self.length >= end and point is not None and point.kept


def _start(page: Page) -> int:
    return page.start


class TrieMemory(PageStore, Protocol):
    """The memory of one trie, and the one observer of its changes: it counts pages and nodes, and numbers the nodes."""

    def note(self, node: Node) -> None:
        """A node is new, or something of it has changed."""

    def forget(self, node: Node) -> None:
        """A node is being removed, or merged into another."""

    def forget_point(self, point: Point) -> None:
        """A restore point was dropped; its states are released one by one."""

    def check_nodes(self, nodes: Iterable[Node]) -> None:
        """Assert that what was noted is how these nodes of the trie, all but the root, are."""


M = TypeVar("M", bound=TrieMemory)


class NoMemory:
    """The memory of a trie that holds no pages: token prefixes alone."""

    groups = ()

    def _ignore(self, noted: object) -> None:
        """Nothing is counted."""

    note = forget = forget_point = check_nodes = _ignore

    def _refuse(self, *args: Any, **named: Any) -> NoReturn:
        raise AssertionError("this trie holds no pages")

    device_bytes = cut = can_join = join = release = _refuse


class Trie(Generic[M]):
    """A compressed trie over token ids with pages and restore points on its edges, and the memory that these take.

    `root_id` stands for the salt in addresses. `version` grows with every change of the
    edges, and of what can be restored along them: while it stays, so does a match and what is planned along it. `chains`
    are the ends of paths that have too many unbranched edges; a session that closes merges these.
    """

    def __init__(self, memory: M, page_tokens: int = PAGE_TOKENS, *, root_id: bytes = b"") -> None:
        self.memory = memory
        self.page_tokens = page_tokens
        self.salt = ""
        self.root_id = root_id
        self.root = Node(None, 0, b"")
        self.version = 0
        self.chains: set[Node] = set()

    def match(self, tokens: Iterable[int] | bytes, start: Hold | None = None) -> Match:
        """Find the longest known prefix of `tokens`, or of the tokens up to the hold `start` and these.

        Changes no node; a path with too many unbranched edges is noted in `chains`.
        """
        packed = pack(tokens)
        view = memoryview(packed).cast("i")
        total = len(view)
        node, at = (self.root, 0) if start is None else (start.node, start.offset)
        path, inside = node.path(), at - node.start
        length = common_prefix(cut(node.edge, inside, inside + total), packed)  # of `tokens`
        while at + length == node.end and length < total:
            child = node.children.get(view[length])
            if child is None:
                break
            node = child
            path.append(node)
            length += common_prefix(node.edge, packed, length)
        if len(path) > MAX_UNBRANCHED and sum(len(each.children) == 1 for each in path) > MAX_UNBRANCHED:
            self.chains.add(node)
        return Match(at + length, path, node)

    def append(self, parent: Node, tokens: Iterable[int] | bytes, now: float = 0.0) -> Node:
        """Add a child with this edge below `parent`, which must not have one that starts with the same token."""
        child = Node(parent, parent.end, pack(tokens), now)
        assert child.edge and child.first_token not in parent.children
        parent.children[child.first_token] = child
        self.version += 1
        self.memory.note(child)
        return child

    def grow(self, leaf: Node, tokens: Iterable[int] | bytes) -> None:
        assert leaf.is_leaf and not leaf.is_root
        leaf.edge += pack(tokens)
        self.version += 1
        self.memory.note(leaf)

    def split(self, node: Node, at: int) -> Node:
        """Part the edge at `at`: the node stays the lower part, the new upper part is returned.

        The page across the cut becomes two; restore points and holds at or before it go to the upper part.
        """
        assert node.parent is not None and node.start < at < node.end
        self.version += 1
        self._cut_across(node, at)  # first: if this fails, the trie is as it was
        head = Node(node.parent, node.start, cut(node.edge, 0, at - node.start), node.last_used)
        head.previous_used, head.hits, head.has_holes = node.previous_used, node.hits, node.has_holes
        head.number = node.number
        node.parent.children[head.first_token] = head
        node.parent, node.start, node.edge = head, at, cut(node.edge, at - node.start)
        head.children[node.first_token] = node
        for group, pages in node.pages.items():
            head.pages[group] = [page for page in pages if page.end <= at]
            node.pages[group] = [page for page in pages if page.start >= at]
        for point in [point for point in node.points.values() if point.offset <= at]:
            head.points[point.offset] = node.points.pop(point.offset)
        for hold in [hold for hold in node.holds if hold.offset <= at]:
            hold.move(head, hold.offset)
        self.memory.note(head)
        self.memory.note(node)
        return head

    def _cut_across(self, node: Node, at: int) -> None:
        """Cut the pages that reach across `at`; halves without a user are released. If this fails, nothing is lost."""
        for pages in node.pages.values():
            index = bisect_left(pages, at, key=_start) - 1
            if index >= 0 and pages[index].end > at:
                users, halves = pages[index].users, self.memory.cut(pages[index], at)
                pages[index : index + 1] = [half for half in halves if self._is_needed(half, users)]
                self.memory.note(node)

    def _is_needed(self, page: Page, users: set[Point | Hold]) -> bool:
        if page.group.kind is not Kind.FULL:
            page.users = {user for user in users if needs(user, page)}
            if not page.users:
                self.memory.release(page)
                return False
        return True

    def merge(self, node: Node) -> Node:
        """Join a node with its only child, which is returned: rows joined, restore points and holds united.

        Only a session that closes does this: making room must leave the nodes that others hold where they are.
        """
        (child,) = node.children.values()
        assert node.parent is not None
        self.version += 1
        node.stamp += 1
        node.parent.children[node.first_token] = child
        border = node.end
        child.parent, child.start, child.edge = node.parent, node.start, node.edge + child.edge
        child.number = node.number
        child.has_holes = node.has_holes or child.has_holes
        child.hits = max(node.hits, child.hits)
        child.last_used = max(node.last_used, child.last_used)
        child.points = node.points | child.points
        for group, pages in node.pages.items():
            child.pages[group] = pages + child.pages.get(group, [])
            self._join_at(child, group, border)
        for hold in list(node.holds):
            hold.move(child, hold.offset)
        self.memory.forget(node)
        self.memory.note(child)
        return child

    def add_page(self, node: Node, page: Page) -> None:
        """Add a page to a node; neighbours inside the same page border are joined with it."""
        self.version += 1
        pages = node.pages.setdefault(page.group, [])
        pages.insert(bisect_left(pages, page.start, key=_start), page)
        self._join_at(node, page.group, page.end)
        self._join_at(node, page.group, page.start)
        self.memory.note(node)

    def _join_at(self, node: Node, group: Group, border: int) -> None:
        """Join the two pages that meet at `border`, except at a page border, on disk, and where the memory cannot."""
        pages = node.pages[group]
        index = bisect_left(pages, border, key=_start)
        if border % self.page_tokens == 0 or not 0 < index < len(pages):
            return
        left, right = pages[index - 1], pages[index]
        are_neighbours = left.end == right.start == border and left.tier is right.tier is not Tier.DISK
        if are_neighbours and self.memory.can_join(left, right):
            try:
                joined = self.memory.join(left, right)
            except (EngineError, MemoryError):
                return
            joined.users = left.users | right.users
            pages[index - 1 : index + 1] = [joined]

    def hold_window(self, node: Node, user: Point | Hold, group: Group, publish: Publish | None = None) -> None:
        """Make `user`, which is in `node`, a user of the window rows that it needs; publish those that are missing."""
        start = group.first_needed(user.offset)
        for at in node.upwards(start):
            if publish is not None:
                for low, high in list(at.missing_between(group, start, user.offset, self.page_tokens)):
                    for page in publish(group, low, high):
                        page.users.add(user)
                        self.add_page(at, page)
            for page in at.pages_between(group, start, user.offset):
                page.users.add(user)

    def release_window(self, node: Node, user: Point | Hold, group: Group) -> None:
        """End this use of window rows; pages without a user are released."""
        start = group.first_needed(user.offset)
        for at in node.upwards(start):
            for page in at.pages_between(group, start, user.offset):
                page.users.discard(user)
                if not page.users:
                    self.version += 1
                    at.pages[group].remove(page)
                    self._release_page(at, page)

    def add_point(self, node: Node, offset: int, reason: Reason, *, kept: bool = False) -> Point:
        """The restore point at `offset`, made if there is none; the stronger reason stays."""
        assert node.start < offset <= node.end
        self.version += 1
        point = node.points.get(offset)
        if point is None:
            point = node.points[offset] = Point(offset, reason)
        point.reason = max(point.reason, reason)
        point.superseded = False
        self.keep_point(node, point, point.kept or kept)
        return point

    def keep_point(self, node: Node, point: Point, kept: bool) -> None:
        """Set whether a restore point outlives its unkept peers."""
        point.kept = kept
        self.memory.note(node)

    def drop_point(self, node: Node, point: Point) -> None:
        """Forget a restore point with its states, and the window rows that only it needs."""
        self._drop_point(node, point)
        self.memory.note(node)

    def _drop_point(self, node: Node, point: Point) -> None:
        self.version += 1
        del node.points[point.offset]
        self.memory.forget_point(point)
        for state in point.states.values():
            self.memory.release(state)
        for group in self.memory.groups:
            if group.kind is Kind.WINDOW:
                self.release_window(node, point, group)

    def trim(self, leaf: Node, to: int) -> None:
        """Drop the rows and points beyond `to`; something of the edge stays."""
        assert leaf.is_leaf and leaf.start < to < leaf.end
        assert leaf.held_here_to <= to
        self.version += 1
        self._cut_across(leaf, to)  # first: if this fails, nothing is lost
        for point in [point for point in leaf.points.values() if point.offset > to]:
            self._drop_point(leaf, point)
        for pages in leaf.pages.values():
            while pages and pages[-1].start >= to:
                self.memory.release(pages.pop())
        leaf.edge = cut(leaf.edge, 0, to - leaf.start)
        self.memory.note(leaf)

    def remove(self, leaf: Node) -> Node:
        """Remove a leaf with all it holds, and return its parent."""
        parent = leaf.parent
        if parent is None or leaf.children:
            raise ValueError("only a leaf can be removed, never the root or an inner node")
        assert not leaf.holds
        self.version += 1
        for point in list(leaf.points.values()):
            self._drop_point(leaf, point)
        for pages in leaf.pages.values():
            for page in pages:
                self.memory.release(page)
        self.memory.forget(leaf)
        del parent.children[leaf.first_token]
        leaf.parent = None
        leaf.stamp += 1
        return parent

    def replace(self, node: Node, old: Page | State, new: Page | State) -> None:
        """Put a page or state with the same content in place of the old one."""
        if isinstance(old, Page) and isinstance(new, Page):
            pages = node.pages[old.group]
            pages[pages.index(old)] = new
        elif isinstance(old, State) and isinstance(new, State):
            node.points[old.offset].states[old.group] = new
        self.memory.note(node)

    def drop_page(self, node: Node, page: Page) -> None:
        """Drop one page that failed to load: its rows are missing until a lane publishes them again."""
        self.version += 1
        node.pages[page.group].remove(page)
        node.has_holes = node.has_holes or page.group.kind is Kind.FULL
        self._release_page(node, page)

    def _release_page(self, node: Node, page: Page) -> None:
        self.memory.release(page)
        self.memory.note(node)

    def walk(self, top: Node | None = None) -> Iterator[Node]:
        """Every node, the root first, or a node and all below it; parents before children."""
        stack = [self.root if top is None else top]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children.values()))

    def lacks_rows(self, node: Node) -> bool:
        """Whether a row of full attention is missing in a node. Costs a look at all its pages."""
        full = (group for group in self.memory.groups if group.kind is Kind.FULL)
        return any(any(node.missing_between(group, node.start, node.end, self.page_tokens)) for group in full)

    def has(self, node: Node) -> bool:
        """Whether a node is still part of this trie, neither removed nor merged into another."""
        return node is self.root or (node.parent is not None and node.parent.children.get(node.first_token) is node)

    def held_part(self, path: Sequence[Node]) -> list[Node]:
        """The nodes of a path that are still here: making room may have dropped its end."""
        return [node for node in path if self.has(node)]

    def clear_leaf(self, node: Node) -> bool:
        """Remove the part of a leaf that no busy lane uses; False if the node is gone. Leave inner nodes as they are."""
        if node.is_root or not self.has(node):
            return False
        if node.is_leaf and not node.holds:
            self.remove(node)
            return False
        if node.is_leaf and node.held_here_to < node.end:
            self.trim(node, node.held_here_to)
        return True

    def check(self) -> None:
        self.memory.check_nodes(node for node in self.walk() if not node.is_root)
        for node in self.walk():
            for token, child in node.children.items():
                assert child.parent is node and child.start == node.end and child.first_token == token
            assert node.is_root == (num_tokens(node.edge) == 0)
            assert all(node.start < offset == point.offset <= node.end for offset, point in node.points.items())
            for hold in node.holds:
                assert hold.node is node and (node.start < hold.offset <= node.end or (node.is_root and hold.offset == 0))
            for group, pages in node.pages.items():
                self._check_pages(node, group, pages)
            assert node.has_holes or not self.lacks_rows(node)

    def _check_pages(self, node: Node, group: Group, pages: list[Page]) -> None:
        at = node.start
        for page in pages:
            assert page.group is group and at <= page.start < page.end <= node.end
            assert page.start // self.page_tokens == (page.end - 1) // self.page_tokens
            at = page.end
            if group.kind is Kind.WINDOW:
                assert page.users and all(needs(user, page) for user in page.users)
