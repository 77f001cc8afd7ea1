"""Paths: the addresses on disk of what the nodes from the root down to one of them hold.

An address has the tokens from the last page border on, and a digest of those before it: pages of full attention have no
gaps, so that all tokens are known from the index. In a model without full attention that is not so; there an address has
the whole path.
"""

from __future__ import annotations

from collections.abc import Sequence

from bough.cache.disk import Disk
from bough.cache.residency.memory import SaltTrie
from bough.cache.tree.address import POINT, Address, PageBorder
from bough.cache.tree.node import Node, Point
from bough.cache.tree.state import Item, Kind
from bough.tokens import cut, num_tokens


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
        tokens = node.path_tokens()
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
