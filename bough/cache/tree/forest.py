"""The forest: one trie for each salt, and the pins of the busy lanes that stand on them.

A trie that an earlier run left on disk is known by its root id alone, until a request names its salt.

Always true between calls (`check` asserts it):
- each trie holds what `Trie.check` says;
- every pin in a trie is known here, and every pin that is known here lies in a trie;
- the counts are those of all tries, and only nodes of these are recorded or noted as changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from bough.cache.tree.census import Census, TreeCounts
from bough.cache.tree.node import Node, Pin
from bough.cache.tree.state import Item
from bough.cache.tree.trie import Trie, TrieMemory

M = TypeVar("M", bound=TrieMemory)
M_co = TypeVar("M_co", bound=TrieMemory, covariant=True)


class Accounts(Protocol[M_co]):
    """Where the tries of a forest get their memory from."""

    def open_account(self) -> M_co:
        """Memory for one trie."""
        ...

    def root_id(self, salt: str) -> bytes:
        """What stands for a salt in addresses; nothing where no addresses are needed."""
        ...


class Forest(Generic[M]):
    """The tries of all salts. Tries are made here, and go when nothing is left in them."""

    def __init__(self, accounts: Accounts[M], page_tokens: int) -> None:
        self.tries: dict[str, Trie[M]] = {}
        self.pins: set[Pin] = set()
        self.census = Census()
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
        """The trie of a salt, to read; an empty one, which is not kept, if there is none."""
        return self.find_known(salt) or self.make(self._accounts.root_id(salt))

    def find_known(self, salt: str) -> Trie[M] | None:
        """The trie of a salt, to read; None if there is none."""
        known = self.tries.get(salt)
        if known is None and (root_id := self._accounts.root_id(salt)):
            known = self.tries.get(_unnamed(root_id))
        return known

    def make(self, root_id: bytes) -> Trie[M]:
        """A trie with memory of its own, which is not part of the forest yet."""
        return Trie(self._accounts.open_account(), self._page_tokens, root_id=root_id, census=self.census)

    def add(self, trie: Trie[M]) -> None:
        """Take up a trie that was built from disk, if it holds anything. Only the empty salt is known by its root id."""
        if not trie.root.is_leaf:
            is_empty_salt = trie.root_id == self._accounts.root_id("")
            self.tries["" if is_empty_salt else _unnamed(trie.root_id)] = trie

    def remove_if_empty(self, trie: Trie[M]) -> bool:
        """Forget a trie that holds nothing and in which no lane stands; tells whether it was removed."""
        if not trie.root.is_leaf or trie.root.pins:
            return False
        for name in [name for name in (trie.salt, _unnamed(trie.root_id)) if self.tries.get(name) is trie]:
            del self.tries[name]
        return True

    def nodes(self) -> Iterator[Node]:
        """Every node of every trie, roots included."""
        for trie in self.tries.values():
            yield from trie.walk()

    def items(self) -> Iterator[Item]:
        """Every page and state, wherever its content lies."""
        for node in self.nodes():
            yield from node.items()

    def pin(self, trie: Trie[M]) -> Pin:
        """A new pin, at the root of a trie."""
        pin = Pin(trie.root, 0)
        self.pins.add(pin)
        trie.root.pins.add(pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        self.pins.discard(pin)
        pin.node.pins.discard(pin)

    def held_to(self, node: Node) -> int:
        """Rows of a node below this offset are not evicted: a busy lane stands on them, here or further down."""
        held = node.start
        for pin in self.pins:
            if node.start < pin.offset and node in pin.node.path():
                held = max(held, min(pin.offset, node.end))
        return held

    def held_nodes(self, trie: Trie[M] | None = None) -> dict[Node, int]:
        """The nodes that busy lanes stand on, each with the offset up to which they do; of one trie only, if asked."""
        reached: dict[Node, int] = {}
        for pin in self.pins:
            path = pin.node.path()
            if trie is None or (path and path[0].parent is trie.root):
                for node in path:
                    reached[node] = max(reached.get(node, 0), min(pin.offset, node.end))
        return reached

    def check(self) -> None:
        """Assert what the module's docstring says."""
        for trie in self.tries.values():
            trie.check()
        nodes = set(self.nodes())
        assert {pin for node in nodes for pin in node.pins} == self.pins
        assert self.census.counts == TreeCounts.of(self.nodes())
        assert nodes.issuperset(self.census.changed)
        assert all(nodes.issuperset(trie.records.by_node) for trie in self.tries.values())


def _unnamed(root_id: bytes) -> str:
    """The name of a trie whose salt is not known since the start. No salt has it: it is no valid text."""
    return f"\udc00{root_id.hex()}"
