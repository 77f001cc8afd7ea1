"""The tree of a model for users of the library.

What reads or changes the tree runs on the engine's thread, between two steps of the engine; the calling thread waits for
it, tokenizes prompts before, and writes explanations afterwards. `clear`, `flush`, an export and an import work in slices
and wait for the disk, so the engine's thread itself must not call them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bough.cache.admin.archive import ExportResult, ImportResult, export_tree, import_tree
from bough.cache.admin.nodes import keep
from bough.cache.admin.stats import salt_stats, stats
from bough.cache.admin.view import Explanation, Lookup, TreeRecords, TreeView, Viewer, look_up, take_records
from bough.cache.disk import Disk, DiskError
from bough.cache.prefix_cache import PrefixCache
from bough.cache.steps import Steps
from bough.cache.tree.address import DiskFile, PointRecord
from bough.errors import RequestError
from bough.prompting.prompt import ModelFacts, encode_ask, encode_prefix
from bough.prompting.user_prompt import read_prompt
from bough.scheduling.worker import Worker
from bough.types import Prompt

Result = TypeVar("Result")


class CacheHandle:
    def __init__(self, cache: PrefixCache, facts: ModelFacts, worker: Worker) -> None:
        self._cache = cache
        self._facts = facts
        self._decode = facts.prompts.decode
        self._worker = worker
        self._viewer = Viewer(facts.prompts.decode)

    def _run(self, start: Callable[[], Steps[Result]]) -> Result:
        return self._worker.run_in_slices(start).result()

    def _call(self, work: Callable[[], Result]) -> Result:
        return self._worker.call(work).result()

    def tree(self, salt: str | None = None) -> TreeView:
        """The tree at this moment, of one salt if asked; `str` draws it, `as_dict` is plain data."""
        cache = self._cache
        return self.view(self._run(lambda: take_records(cache, cache.clock.now, salt)))

    def view(self, records: TreeRecords) -> TreeView:
        """The tree as it was when these records were collected. Any thread may call it."""
        return self._viewer.view(records)

    def stats(self, salt: str | None = None) -> dict[str, Any]:
        """Numbers and bytes of everything in the tree; of one salt, if asked, those of its part alone."""
        cache = self._cache
        if salt is not None:
            return self._call(lambda: dict(salt_stats(cache.forest, salt)))
        return self._call(lambda: stats(cache.forest, cache.residency))

    def explain(self, prompt: Prompt, *, salt: str = "", **template: Any) -> Explanation:
        """How much of a prompt would be reused, and why no more."""
        encoded = encode_ask(read_prompt(prompt, **_flat(template)), self._facts)
        packed = encoded.tokens.key
        return self.look_up(packed, salt).explain(packed, self._decode, encoded.boundaries)

    def look_up(self, prompt: bytes, salt: str) -> Lookup:
        return self._call(lambda: look_up(self._cache, prompt, salt))

    def keep(self, prompt: Prompt, kept: bool = True, *, salt: str = "", **template: Any) -> Explanation:
        """Keep a prefix that is in the tree as a whole, or keep it no longer; computes nothing. Says how much is known."""
        packed = encode_prefix(read_prompt(prompt, **_flat(template)), self._facts).tokens.key
        return self.keep_prefix(packed, kept, salt).explain(packed, self._decode)

    pin = keep  # the earlier name

    def keep_prefix(self, prefix: bytes, kept: bool, salt: str) -> Lookup:
        """As `keep`, for packed tokens; returns the known part of them then."""

        def keep_and_look() -> Lookup:
            keep(self._cache, prefix, kept, salt)
            return look_up(self._cache, prefix, salt)

        return self._call(keep_and_look)

    def is_kept(self, prompt: Prompt, *, salt: str = "", **template: Any) -> bool:
        """Whether a prefix is in the tree and was asked to be kept."""
        packed = encode_prefix(read_prompt(prompt, **_flat(template)), self._facts).tokens.key
        return self._call(lambda: self._cache.is_kept(packed, salt))

    def clear(self, salt: str | None = None) -> None:
        """Drop everything that no running request uses, on disk too; of one salt if asked."""
        self._cache.upkeep.clear(salt, self._run)

    def flush(self) -> bool:
        """Write everything to the disk tier, if there is one, and wait; return False if something was not written."""
        return self._cache.upkeep.flush(run=self._run)

    def export_file(self, file: str | Path, salt: str = "", is_wanted: Callable[[], bool] = lambda: True) -> ExportResult:
        """Write the tree of one salt, as it is now, into one file; requests go on meanwhile.

        State in memory alone, for which the disk has no room, is counted as skipped. Raises RequestError without a disk
        tier, DiskError if it fails or is no longer wanted: then there is no file.
        """
        disk = self._require_disk()
        saved = self._cache.upkeep.save(salt, self._run)
        if not saved.is_written:
            raise DiskError("some state in memory could not be saved, so the archive would be incomplete")
        done = export_tree(disk, Path(file), salt, is_wanted)
        return replace(done, num_skipped=done.num_skipped + saved.num_without_room)

    def import_file(self, file: str | Path, salt: str = "") -> ImportResult:
        """Add an archive to the tree of a salt, as far as the disk has room. Raises RequestError, DiskError."""

        def attach(files: Sequence[DiskFile], points: Sequence[PointRecord]) -> None:
            self._call(lambda: self._cache.attach(salt, files, points))

        return import_tree(self._require_disk(), Path(file), salt, attach)

    def _require_disk(self) -> Disk:
        disk = self._cache.memory.disk
        if disk is None:
            raise RequestError("there is no disk tier: the setting disk is 0, or the disk could not be opened")
        return disk


def _flat(template: dict[str, Any]) -> dict[str, Any]:
    """Template options, merged with those given as `template_kwargs`."""
    named = {name: value for name, value in template.items() if name != "template_kwargs"}
    return named | (template.get("template_kwargs") or {})
