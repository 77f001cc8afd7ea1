"""Paths: the nodes from the root down to one of them, what they hold together, and the addresses of that on disk.

An address has the tokens from the last page border on, and a digest of those before it: pages of full attention have no
gaps, so that all tokens are known from the index. In a model without full attention that is not so; there an address has
the whole path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bough.cache.disk import Disk
from bough.cache.residency.memory import SaltTrie
from bough.cache.tree.address import POINT, Address, PageBorder
from bough.cache.tree.node import Node, Point
from bough.cache.tree.state import Group, Item, Kind
from bough.tokens import cut, num_tokens


def node_at(node: Node, offset: int) -> Node:
    """The node on the path down to `node` whose edge (start, end] contains an offset."""
    while offset <= node.start:
        assert node.parent is not None
        node = node.parent
    return node


def nodes_above(node: Node, start: int) -> Iterator[Node]:
    """The node and its ancestors, as far up as they have tokens after `start`; never the root."""
    while node.parent is not None and node.end > start:
        yield node
        node = node.parent


def subtree(top: Node) -> list[Node]:
    """A node and all nodes below it, parents first."""
    found, stack = list[Node](), [top]
    while stack:
        found.append(node := stack.pop())
        stack.extend(node.children.values())
    return found


def path_tokens(node: Node) -> bytes:
    """The packed tokens from the root to the end of a node."""
    return b"".join(each.edge for each in node.path())


def missing_rows(node: Node, group: Group, start: int, end: int, page_tokens: int) -> Iterator[tuple[int, int]]:
    """The ranges of [start, end) that no page on the path down to `node` holds, the deepest node's first."""
    for each in nodes_above(node, start):
        yield from each.missing_between(group, start, end, page_tokens)


def has_holes(trie: SaltTrie, node: Node) -> bool:
    """Whether a row of full attention is missing in a node. Costs a look at all its pages."""
    full = (group for group in trie.memory.groups if group.kind is Kind.FULL)
    return any(any(node.missing_between(group, node.start, node.end, trie.page_tokens)) for group in full)


class PathAddresses:
    """Addresses on a path, of what ends after the page border `start`; `digests` has one for each border from there on."""

    def __init__(
        self, root: bytes, tokens: bytes, digests: Sequence[bytes], page_tokens: int | None, start: int = 0
    ) -> None:
        self._root = root
        self._tokens = tokens
        self._digests = digests
        self._page_tokens = page_tokens
        self._start = start

    @classmethod
    def of(cls, disk: Disk, trie: SaltTrie, node: Node) -> PathAddresses:
        """The addresses on the path from the root to the end of a node. Costs as much as that path has tokens."""
        has_rows = any(group.kind is Kind.FULL for group in trie.memory.groups)
        tokens = path_tokens(node)
        digests = disk.digests(trie.root_id, tokens if has_rows else b"")
        return cls(trie.root_id, tokens, digests, trie.page_tokens if has_rows else None)

    @classmethod
    def following(cls, disk: Disk, trie: SaltTrie, border: PageBorder, tokens: bytes) -> PathAddresses:
        """The addresses on `tokens`, which follow a page border, in a model with full attention. Costs as much as these."""
        size, digests = trie.page_tokens, [border.digest]
        for start in range(0, num_tokens(tokens) - size + 1, size):
            digests.append(disk.keys.after(digests[-1], cut(tokens, start, start + size)))
        return cls(trie.root_id, tokens, digests, size, border.offset)

    @property
    def last_border(self) -> PageBorder:
        assert self._page_tokens is not None
        return PageBorder(self._start + (len(self._digests) - 1) * self._page_tokens, self._digests[-1])

    def address(self, item: Item | Point) -> Address:
        """The address of a page, a state or a restore point on this path."""
        if isinstance(item, Point):
            group, start, end = POINT, item.offset, item.offset
        else:
            group, (start, end) = item.group.index, item.span
        if self._page_tokens is None:
            return Address(self._root, self._digests[0], cut(self._tokens, 0, end), group, start, end)
        page = (end - 1 - self._start) // self._page_tokens
        tokens = cut(self._tokens, page * self._page_tokens, end - self._start)
        return Address(self._root, self._digests[page], tokens, group, start, end)
