"""The watches that servers have opened over the tree of this replica. One that is not used for `LEASE_S` is closed.

So neither a server that was killed nor a message that was lost keeps the tree noting changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from bough.cache.admin.watch import RootChanges, TreeChanges
from bough.cache.tree.census import NodeRecord
from bough.cache.tree.tokens import cut, pack
from bough.server.serving.model.contract import GenerateRequest, PreparedRequest, ServedTree, ServedWatch
from bough.server.serving.model.look import TEXT_TOKENS, Look, Sought

LEASE_S = 30.0
"""Servers look at least every 10 s."""


@dataclass(frozen=True)
class RunningRequest:
    """A request that runs here, and what runs it."""

    request: GenerateRequest
    prepared: PreparedRequest


@dataclass
class _Lease:
    """A watch, the tokens of the requests that were looked for last, and what closes it."""

    watch: ServedWatch
    expiry: asyncio.TimerHandle
    packed: dict[int, bytes] = field(default_factory=dict)  # by the numbers of requests


class Watches:
    """The open watches by their ids. `find` finds a running request. Everything here runs on one event loop."""

    def __init__(self, tree: ServedTree, find: Callable[[str], RunningRequest | None], lease_s: float = LEASE_S) -> None:
        self._tree = tree
        self._find = find
        self._lease_s = lease_s
        self._loop = asyncio.get_running_loop()
        self._leases: dict[str, _Lease] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._leases)

    async def look(self, watch_id: str, is_new: bool, sought: Sequence[Sought], salts: Collection[str]) -> Look:
        """A look by the watch with this id, which is opened if there is none, and anew if `is_new`: then it tells all.

        The edges of nodes are cut to what is shown of them: a long one would be sent whole with each change.
        """
        if is_new:
            await self.close(watch_id)
        lease = self._renew(watch_id)
        lease.packed = {each.number: self._pack(each, lease) for each in sought}
        here = [replace(each, packed=lease.packed[each.number]) for each in sought]
        found = await lease.watch.look(here, salts)
        changes = await asyncio.to_thread(_cut_edges, found.changes) if found.changes.roots else found.changes
        loading = {each.number for each in sought if self._is_loading(each)}
        seen = {number: replace(each, is_loading=number in loading) for number, each in found.seen.items()}
        return replace(found, changes=changes, seen=seen)

    async def close(self, watch_id: str) -> None:
        """Close a watch, if it is open."""
        lease = self._leases.pop(watch_id, None)
        if lease is not None:
            lease.expiry.cancel()
            await lease.watch.close()

    def _renew(self, watch_id: str) -> _Lease:
        expiry = self._loop.call_later(self._lease_s, self._expire, watch_id)
        lease = self._leases.get(watch_id)
        if lease is None:
            lease = self._leases[watch_id] = _Lease(self._tree.watch(), expiry)
        else:
            lease.expiry.cancel()
            lease.expiry = expiry
        return lease

    def _expire(self, watch_id: str) -> None:
        task = self._loop.create_task(self.close(watch_id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _pack(self, sought: Sought, lease: _Lease) -> bytes:
        """The tokens of a request: those that were told, that were looked for before, or of the prompt that runs here."""
        if sought.packed:
            return sought.packed
        if known := lease.packed.get(sought.number):
            return known
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
