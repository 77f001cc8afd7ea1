"""The pages that the tree of a replica holds, as digests for the router: its changes, computed from changes of the tree.

Pages for the router are shorter than those of the cache, so that shorter shared prefixes match; a digest takes no memory of
the engine. A page belongs to the node in which it ends. Its tier is the slowest in which that node has content.

Always true (`check` asserts it): every node's pages follow from its tokens and those of its parents, and no two nodes have
the same page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bough.cache.admin.watch import TreeChanges
from bough.cache.disk.keys import PageKeys
from bough.cache.residency.census import NodeRecord
from bough.cache.tree.state import Tier
from bough.routing import PageNote
from bough.tokens import TOKEN_BYTES, Tokens

ROUTED_TOKENS = 32
"""The tokens of one page for the router."""

Notes = dict[bytes, PageNote | None]


def make_keys(secret: bytes) -> PageKeys:
    """The keys of page digests, the same at all replicas and routers of a cluster."""
    return PageKeys(secret, "routing", ROUTED_TOKENS)


def digest_prompt(keys: PageKeys, prompt: Tokens, salt: str) -> list[bytes]:
    """The digests of a prompt's whole pages, each up to the page's end."""
    return keys.digests(keys.root(salt), prompt.key)[1:]


@dataclass(frozen=True)
class _Node:
    """A node: the digest of all whole pages up to its end, the tokens behind them, and the pages that end in it."""

    record: NodeRecord
    digest: bytes
    rest: bytes
    pages: tuple[bytes, ...]


class HeldPages:
    """The pages of one tree. `needs_points`: a lane can be restored only where there is a restore point."""

    def __init__(self, keys: PageKeys, *, needs_points: bool) -> None:
        self._keys = keys
        self._needs_points = needs_points
        self._roots: dict[str, dict[int, _Node]] = {}

    def apply(self, changes: TreeChanges) -> Notes:
        """The new notes of all pages that have changed; None: the page is gone. O(changes).

        A root whose salt is not known yet is left out: its pages have no digests.
        """
        notes: Notes = {}
        if changes.is_reset:
            for nodes in self._roots.values():
                notes |= {page: None for node in nodes.values() for page in node.pages}
            self._roots = {}
        for root, changed in changes.roots.items():
            if not is_unnamed(root):
                notes |= self._apply_root(root, changed.nodes)
        return notes

    def _apply_root(self, root: str, changed: Mapping[int, NodeRecord | None]) -> Notes:
        nodes = self._roots.setdefault(root, {})
        notes: Notes = {}
        for key in changed:
            if (before := nodes.pop(key, None)) is not None:
                notes |= dict.fromkeys(before.pages)
        for record in sorted(filter(None, changed.values()), key=lambda each: each.start):
            node = self._read(root, nodes, record)
            if node is not None:
                nodes[record.key] = node
                notes |= self._note(node)
        if not nodes:
            del self._roots[root]
        return notes

    def _read(self, root: str, nodes: Mapping[int, _Node], record: NodeRecord) -> _Node | None:
        """A node with its pages; None if its parent is not known, because that has just gone."""
        if record.parent is None:
            digest, tokens = self._keys.first(self._keys.root(root)), record.edge
        elif (parent := nodes.get(record.parent)) is not None:
            digest, tokens = parent.digest, parent.rest + record.edge
        else:
            return None
        step, pages = ROUTED_TOKENS * TOKEN_BYTES, []
        for at in range(0, len(tokens) - step + 1, step):
            digest = self._keys.after(digest, tokens[at : at + step])
            pages.append(digest)
        return _Node(record, digest, tokens[len(pages) * step :], tuple(pages))

    def _note(self, node: _Node) -> Notes:
        record = node.record
        tiers = [tier for tier in Tier if record.tiers[tier]]
        if not tiers:  # only its tokens are known
            return {}
        end = record.end - len(node.rest) // TOKEN_BYTES
        first = end - len(node.pages) * ROUTED_TOKENS
        notes: Notes = {}
        for number, page in enumerate(node.pages):
            start = first + number * ROUTED_TOKENS
            stands = not self._needs_points or any(start < point <= start + ROUTED_TOKENS for point in record.points)
            notes[page] = PageNote(max(tiers), stands)
        return notes

    def check(self) -> None:
        """Assert what the module's docstring says."""
        seen: set[bytes] = set()
        for root, nodes in self._roots.items():
            for node in nodes.values():
                again = self._read(root, nodes, node.record)
                assert again is not None and again.pages == node.pages
                assert not seen.intersection(node.pages)
                seen.update(node.pages)


def is_unnamed(root: str) -> bool:
    """Whether this is the name of a root from disk whose salt is not known."""
    return root.startswith("(on disk ") and root.endswith(")")
