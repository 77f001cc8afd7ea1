"""A trail: the tokens of one path, from which every item on it has its address on disk.

An address tells the tokens from the last page border on, and those before it by a digest: pages of full attention lie
without gaps, so that all tokens are known from the index. In a model without full attention they do not; there an address
tells the whole path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bough.cache.residency.memory import Item, span
from bough.cache.tree.address import POINT, Address
from bough.cache.tree.node import Node, Point
from bough.cache.tree.state import Kind
from bough.cache.tree.tokens import cut
from bough.cache.tree.trie import Trie

if TYPE_CHECKING:
    from bough.cache.disk.disk import Disk


class Trail:
    """The tokens from the root to some offset, under one salt."""

    def __init__(self, disk: Disk, root: bytes, tokens: bytes, page_tokens: int | None) -> None:
        self._root = root
        self._tokens = tokens
        self._page_tokens = page_tokens
        self._digests = disk.digests(root, tokens if page_tokens else b"")

    @classmethod
    def of(cls, disk: Disk, trie: Trie, node: Node) -> Trail:
        """The trail to the end of a node."""
        has_rows = any(group.kind is Kind.FULL for group in trie.store.groups)
        tokens = b"".join(each.edge for each in node.path())
        return cls(disk, trie.disk_root, tokens, trie.page_tokens if has_rows else None)

    def address(self, item: Item | Point) -> Address:
        """The address of a page, a state or a restore point on this trail."""
        if isinstance(item, Point):
            return self._address(POINT, item.offset, item.offset)
        return self._address(item.group.index, *span(item))

    def _address(self, group: int, start: int, end: int) -> Address:
        if self._page_tokens is None:
            return Address(self._root, self._digests[0], cut(self._tokens, 0, end), group, start, end)
        page = (end - 1) // self._page_tokens
        tokens = cut(self._tokens, page * self._page_tokens, end)
        return Address(self._root, self._digests[page], tokens, group, start, end)
