"""Path addresses: the address on disk of everything that lies on one path, made from the tokens of that path.

An address tells the tokens from the last page border on, and those before it by a digest: pages of full attention lie
without gaps, so that all tokens are known from the index. In a model without full attention they do not; there an address
tells the whole path.
"""

from __future__ import annotations

from bough.cache.disk import Disk
from bough.cache.residency.memory import SaltTrie
from bough.cache.tree.address import POINT, Address
from bough.cache.tree.node import Node, Point
from bough.cache.tree.state import Item, Kind
from bough.cache.tree.tokens import cut


class PathAddresses:
    """Addresses on the path from the root to some offset, under one salt."""

    def __init__(self, disk: Disk, root: bytes, tokens: bytes, page_tokens: int | None) -> None:
        self._root = root
        self._tokens = tokens
        self._page_tokens = page_tokens
        self._digests = disk.digests(root, tokens if page_tokens else b"")

    @classmethod
    def of(cls, disk: Disk, trie: SaltTrie, node: Node) -> PathAddresses:
        """The addresses on the path to the end of a node. Costs as much as that path has tokens."""
        has_rows = any(group.kind is Kind.FULL for group in trie.memory.groups)
        tokens = b"".join(each.edge for each in node.path())
        return cls(disk, trie.root_id, tokens, trie.page_tokens if has_rows else None)

    def address(self, item: Item | Point) -> Address:
        """The address of a page, a state or a restore point on this path."""
        if isinstance(item, Point):
            return self._address(POINT, item.offset, item.offset)
        return self._address(item.group.index, *item.span)

    def _address(self, group: int, start: int, end: int) -> Address:
        if self._page_tokens is None:
            return Address(self._root, self._digests[0], cut(self._tokens, 0, end), group, start, end)
        page = (end - 1) // self._page_tokens
        tokens = cut(self._tokens, page * self._page_tokens, end)
        return Address(self._root, self._digests[page], tokens, group, start, end)
