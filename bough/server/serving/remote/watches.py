"""The watches that servers have opened over the tree of this replica. Without any, no changes are noted for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from bough.cache.admin.watch import RootChanges, TreeChanges
from bough.cache.tree.census import NodeRecord
from bough.cache.tree.tokens import cut, pack
from bough.server.serving.model.contract import GenerateRequest, PreparedRequest, ServedTree, ServedWatch
from bough.server.serving.model.look import TEXT_TOKENS, Look, Sought
from bough.server.serving.remote.leases import Leases


@dataclass(frozen=True)
class RunningRequest:
    """A request that runs here, and what runs it."""

    request: GenerateRequest
    prepared: PreparedRequest


@dataclass
class _Watch:
    """A watch, and the tokens of the requests that were looked for last, by their numbers."""

    watch: ServedWatch
    packed: dict[int, bytes] = field(default_factory=dict)


class Watches:
    """The open watches by their ids. `find` finds a running request. Everything here runs on one event loop."""

    def __init__(self, tree: ServedTree, find: Callable[[str], RunningRequest | None]) -> None:
        self._find = find
        self._leases: Leases[_Watch] = Leases(lambda: _Watch(tree.watch()), lambda held: held.watch.close())

    def __len__(self) -> int:
        return len(self._leases)

    async def look(self, watch_id: str, is_new: bool, sought: Sequence[Sought], salts: Collection[str]) -> Look:
        """A look by the watch with this id, which is opened if there is none, and anew if `is_new`: then it tells all.

        The edges of nodes are cut to what is shown of them: a long one would be sent whole with each change.
        """
        if is_new:
            await self.close(watch_id)
        held = self._leases.use(watch_id)
        held.packed = {each.number: self._pack(each, held) for each in sought}
        here = [replace(each, packed=held.packed[each.number]) for each in sought]
        found = await held.watch.look(here, salts)
        changes = await asyncio.to_thread(_cut_edges, found.changes) if found.changes.roots else found.changes
        loading = {each.number for each in sought if self._is_loading(each)}
        seen = {number: replace(each, is_loading=number in loading) for number, each in found.seen.items()}
        return replace(found, changes=changes, seen=seen)

    async def close(self, watch_id: str) -> None:
        """Close a watch, if it is open."""
        await self._leases.close(watch_id)

    def _pack(self, sought: Sought, held: _Watch) -> bytes:
        """The tokens of a request: those that were told, that were looked for before, or of the prompt that runs here."""
        if tokens := sought.packed or held.packed.get(sought.number):
            return tokens
        running = self._find(sought.request_id)
        return pack(running.request.encoded.ids) if running is not None else b""

    def _is_loading(self, sought: Sought) -> bool:
        running = self._find(sought.request_id)
        return running is not None and running.prepared.is_loading


def _cut_edges(changes: TreeChanges) -> TreeChanges:
    roots = {
        root: RootChanges(changed={key: _cut_edge(record) for key, record in changed.nodes.items()})
        for root, changed in changes.roots.items()
    }
    return replace(changes, roots=roots)


def _cut_edge(record: NodeRecord | None) -> NodeRecord | None:
    if record is None or record.end - record.start <= TEXT_TOKENS:
        return record
    return record._replace(edge=cut(record.edge, 0, TEXT_TOKENS))
