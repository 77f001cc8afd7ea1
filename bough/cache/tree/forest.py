"""The forest: one trie for each salt, and the holds of busy lanes.

A trie that an earlier run left on disk is known by its root id alone, until a request names its salt.

Always true between calls (`check` asserts it):
- each trie holds what `Trie.check` says;
- the holds here are those of the nodes of its tries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from bough.cache.tree.node import Hold, Node
from bough.cache.tree.state import Item
from bough.cache.tree.trie import Trie, TrieMemory

M = TypeVar("M", bound=TrieMemory)
M_co = TypeVar("M_co", bound=TrieMemory, covariant=True)


class Accounts(Protocol[M_co]):
    """Where the tries of a forest get their memory from."""

    def open_account(self) -> M_co:
        """Memory for one trie."""

    def root_id(self, salt: str) -> bytes:
        """The hash of a salt in addresses; empty where no addresses are needed."""


class Forest(Generic[M]):
    """The tries of all salts, from the first request for a salt until its trie is empty."""

    def __init__(self, accounts: Accounts[M], page_tokens: int) -> None:
        self.tries: dict[str, Trie[M]] = {}
        self.holds: set[Hold] = set()
        self._accounts = accounts
        self._page_tokens = page_tokens

    def open(self, salt: str) -> Trie[M]:
        """The trie of a salt, made if there is none."""
        trie = self.tries.get(salt)
        if trie is None:
            root_id = self._accounts.root_id(salt)
            trie = (self.tries.pop(_unnamed(root_id), None) if root_id else None) or self.make(root_id)
            trie.salt = salt
            self.tries[salt] = trie
        return trie

    def find(self, salt: str) -> Trie[M]:
        """The trie of a salt, to read; a new one outside the forest if there is none."""
        return self.find_known(salt) or self.make(self._accounts.root_id(salt))

    def find_known(self, salt: str) -> Trie[M] | None:
        """The trie of a salt, to read; None if there is none."""
        known = self.tries.get(salt)
        if known is None and (root_id := self._accounts.root_id(salt)):
            known = self.tries.get(_unnamed(root_id))
        return known

    def make(self, root_id: bytes) -> Trie[M]:
        """A new trie, which is not part of the forest yet."""
        return Trie(self._accounts.open_account(), self._page_tokens, root_id=root_id)

    def add(self, trie: Trie[M]) -> None:
        """Add a trie that was built from disk, unless it is empty. Of all salts only "" is recognised by its root id."""
        if not trie.root.is_leaf:
            is_empty_salt = trie.root_id == self._accounts.root_id("")
            self.tries["" if is_empty_salt else _unnamed(trie.root_id)] = trie

    def remove_if_empty(self, trie: Trie[M]) -> bool:
        """Remove a trie if it is empty and no lane uses it; return whether it was removed."""
        if not trie.root.is_leaf or trie.root.holds:
            return False
        for name in [name for name in (trie.salt, _unnamed(trie.root_id)) if self.tries.get(name) is trie]:
            del self.tries[name]
        return True

    def nodes(self) -> Iterator[Node]:
        for trie in self.tries.values():
            yield from trie.walk()

    def items(self) -> Iterator[Item]:
        """Every page and state, in any tier."""
        for node in self.nodes():
            yield from node.items()

    def add_hold(self, trie: Trie[M]) -> Hold:
        """A new hold, at the root of a trie."""
        hold = Hold(trie.root, 0)
        self.holds.add(hold)
        trie.root.holds.add(hold)
        return hold

    def remove_hold(self, hold: Hold) -> None:
        self.holds.discard(hold)
        hold.node.holds.discard(hold)

    def held_to(self, node: Node) -> int:
        """Rows of a node below this offset are not evicted: a busy lane uses them, from here or from a node below."""
        held = node.start
        for hold in self.holds:
            if node.start < hold.offset and node in hold.node.path():
                held = max(held, min(hold.offset, node.end))
        return held

    def held_nodes(self, trie: Trie[M] | None = None) -> dict[Node, int]:
        """The nodes that busy lanes use, each with the offset up to which they do; of one trie, or of all."""
        reached: dict[Node, int] = {}
        for hold in self.holds:
            path = hold.node.path()
            if trie is None or (path and path[0].parent is trie.root):
                for node in path:
                    reached[node] = max(reached.get(node, 0), min(hold.offset, node.end))
        return reached

    def check(self) -> None:
        for trie in self.tries.values():
            trie.check()
        assert {hold for node in self.nodes() for hold in node.holds} == self.holds


def _unnamed(root_id: bytes) -> str:
    """The name of a trie whose salt is not known. No salt has it: it is no valid text."""
    return f"\udc00{root_id.hex()}"
