"""What a user can see of a model's tree, and do with it.

What reads or changes the tree runs on the engine's thread, between two steps of the engine; the calling thread waits for
it. Prompts are tokenized before, and what was found is put into words afterwards, on the calling thread. Work on the whole
tree is done in slices: `clear`, `flush`, an export, an import. They wait for the disk, too, so the engine's thread itself
must not call them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bough.cache.admin.archive import Exported, Imported, export_tree, import_tree
from bough.cache.admin.nodes import EvictedNodes, KeptNode, NodeDetails, evict_node, keep_node, read_node
from bough.cache.admin.stats import salt_stats, stats
from bough.cache.admin.upkeep import keep
from bough.cache.admin.view import Explanation, Lookup, TreeRecords, TreeView, Viewer, look_up, take_records
from bough.cache.admin.watch import TreeWatch
from bough.cache.disk import Disk, DiskError
from bough.cache.prefix_cache import PrefixCache
from bough.cache.steps import Steps
from bough.cache.tree.tokens import pack, unpack
from bough.errors import RequestError
from bough.models.prompts import Prompts
from bough.scheduling.worker import Worker
from bough.types import Prompt

Result = TypeVar("Result")


class CacheHandle:
    """Access to the tree of a runner."""

    def __init__(
        self,
        cache: PrefixCache,
        prompts: Prompts,
        worker: Worker,
    ) -> None:
        self._cache = cache
        self._prompts = prompts
        self._worker = worker
        self._viewer = Viewer(prompts.decode)

    def _run(self, start: Callable[[], Steps[Result]]) -> Result:
        return self._worker.run_in_slices(start).result()

    def _call(self, work: Callable[[], Result]) -> Result:
        return self._worker.call(work).result()

    def tree(self, salt: str | None = None) -> TreeView:
        """The tree at this moment, of one salt if asked; `str` draws it, `as_dict` is plain data."""
        return self.view(self._run(lambda: self.take_records(salt)))

    def take_records(self, salt: str | None = None) -> Steps[TreeRecords]:
        """Steps for the engine's thread that collect what `view` shows."""
        return take_records(self._cache.forest, self._cache.clock.now, salt)

    def view(self, records: TreeRecords) -> TreeView:
        """The tree as it was when these records were collected. Any thread may call it."""
        return self._viewer.view(records)

    def watch(self) -> TreeWatch:
        """A watch over the tree, for the engine's thread. Several may be open."""
        return TreeWatch(self._cache)

    def decode(self, packed: bytes) -> str:
        """The text of packed tokens. Any thread may call it."""
        return self._prompts.decode(unpack(packed))

    def read_node(self, root: str, key: int) -> Steps[NodeDetails]:
        """Steps for the engine's thread that read one node. They raise NodeNotFound."""
        return read_node(self._cache, root, key)

    def keep_node(self, root: str, key: int, kept: bool) -> Steps[KeptNode]:
        """Steps for the engine's thread that keep a node's path, or keep it no longer. They raise RequestError."""
        return keep_node(self._cache, root, key, kept)

    def evict_node(self, root: str, key: int) -> Steps[EvictedNodes]:
        """Steps for the engine's thread that drop a node with all below it. They raise NodeNotFound."""
        return evict_node(self._cache, root, key)

    def stats(self, salt: str | None = None) -> dict[str, Any]:
        """Numbers and bytes of everything in the tree; of one salt, if asked, those of its part alone."""
        cache = self._cache
        if salt is not None:
            return self._call(lambda: dict(salt_stats(cache.forest, salt)))
        return self._call(lambda: stats(cache.forest, cache.residency))

    def explain(self, prompt: Prompt, *, salt: str = "", **template: Any) -> Explanation:
        """How much of a prompt would be reused, and why no more than that."""
        packed = pack(self._prompts.encode(prompt, **_flat(template)).ids)
        return self.describe(self.look_up(packed, salt), packed)

    def look_up(self, prompt: bytes, salt: str) -> Lookup:
        """What the tree knows of the packed tokens of a prompt."""
        return self._call(lambda: look_up(self._cache, prompt, salt))

    def describe(self, found: Lookup, prompt: bytes) -> Explanation:
        """An explanation of what was found of these packed tokens. Any thread may call it."""
        return found.explain(prompt, self._prompts.decode)

    def pin(self, prompt: Prompt, kept: bool = True, *, salt: str = "", **template: Any) -> Explanation:
        """Keep a prefix that is in the tree, as `Runner.warm` would, or stop keeping it. Computes nothing.

        A prefix that is not in the tree as a whole is left as it is. The result says how much of it is known.
        """
        packed = pack(self._prompts.encode_prefix(prompt, **_flat(template)).ids)
        return self.describe(self.keep(packed, kept, salt), packed)

    def keep(self, prefix: bytes, kept: bool, salt: str) -> Lookup:
        """As `pin`, for packed tokens: returns what the tree knows of them then."""

        def keep_and_look() -> Lookup:
            keep(self._cache, prefix, kept, salt)
            return look_up(self._cache, prefix, salt)

        return self._call(keep_and_look)

    def is_kept(self, prompt: Prompt, *, salt: str = "", **template: Any) -> bool:
        """Whether a prefix is in the tree and was asked to be kept."""
        packed = pack(self._prompts.encode_prefix(prompt, **_flat(template)).ids)
        return self._call(lambda: self._cache.is_kept(packed, salt))

    def clear(self, salt: str | None = None) -> None:
        """Drop everything that no running request uses, on disk too; of one salt if asked."""
        self._cache.clear(salt, self._run)

    def flush(self) -> bool:
        """Write everything to the disk tier, if there is one, and wait; returns False if something was not written."""
        return self._cache.flush(run=self._run)

    def export_file(self, file: str | Path, salt: str = "", is_wanted: Callable[[], bool] = lambda: True) -> Exported:
        """Write the tree of one salt, as it is now, into one file; requests go on meanwhile.

        What is in memory alone, because the disk has no room for it, is counted as skipped. Raises RequestError without a
        disk tier or if the tree is one that archives cannot hold (a model without full attention), DiskError if it fails or
        is no longer wanted: then there is no file.
        """
        disk = self._require_disk()
        saved = self._cache.save(salt, self._run)
        if not saved.is_written:
            raise DiskError("some state in memory could not be saved, so the archive would be incomplete")
        done = export_tree(disk, Path(file), salt, run=self._run, is_wanted=is_wanted)
        return replace(done, num_skipped=done.num_skipped + saved.num_without_room)

    def import_file(self, file: str | Path, salt: str = "") -> Imported:
        """Add an archive to the tree of a salt, as far as the disk has room; requests go on meanwhile.

        Raises RequestError without a disk tier, DiskError for a wrong file.
        """
        cache = self._cache
        return import_tree(
            self._require_disk(), Path(file), salt, lambda imported: self._run(lambda: cache.graft(salt, imported))
        )

    def _require_disk(self) -> Disk:
        disk = self._cache.memory.disk
        if disk is None:
            raise RequestError("there is no disk tier: the setting disk is 0, or the disk could not be opened")
        return disk


def _flat(template: dict[str, Any]) -> dict[str, Any]:
    """Template options, merged with those given as `template_kwargs`."""
    named = {name: value for name, value in template.items() if name != "template_kwargs"}
    return named | (template.get("template_kwargs") or {})
