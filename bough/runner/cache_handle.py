"""What a user can see of a model's tree, and do with it.

Every method holds the engine's lock: it runs between two steps of the engine, never in the middle of one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bough.cache.admin.archive import Exported, Imported, check_archive, export_tree, import_tree
from bough.cache.admin.upkeep import change_disk, forget, keep
from bough.cache.admin.view import Explanation, TreeView, explain, view_tree
from bough.cache.disk import Disk, DiskError
from bough.cache.prefix_cache import PrefixCache
from bough.errors import RequestError
from bough.models.prompts import Prompts
from bough.types import Prompt


class CacheHandle:
    """The tree of a runner, to look at and to change."""

    def __init__(self, cache: PrefixCache, engine_lock: AbstractContextManager[None], prompts: Prompts) -> None:
        self._cache = cache
        self._engine_lock = engine_lock
        self._prompts = prompts

    def tree(self, salt: str | None = None) -> TreeView:
        """The tree at this moment, of one salt if asked; `str` draws it, `as_dict` is plain data."""
        with self._engine_lock:
            return view_tree(self._cache, self._prompts.decode, salt)

    def stats(self) -> dict[str, Any]:
        """Counts and bytes of everything that is kept."""
        with self._engine_lock:
            return self._cache.stats()

    def explain(self, prompt: Prompt, *, salt: str = "", **template: Any) -> Explanation:
        """How much of a prompt would be reused, and why not more."""
        ids = self._prompts.encode(prompt, **_flat(template)).ids
        with self._engine_lock:
            return explain(self._cache, ids, salt, self._prompts.decode)

    def pin(self, prompt: Prompt, kept: bool = True, *, salt: str = "", **template: Any) -> Explanation:
        """Keep a prefix that is known, as `Runner.warm` would, or keep it no longer. Computes nothing.

        What is not known whole stays as it is: the result tells how much of it is.
        """
        ids = self._prompts.encode_prefix(prompt, **_flat(template)).ids
        with self._engine_lock:
            keep(self._cache, ids, kept, salt)
            return explain(self._cache, ids, salt, self._prompts.decode)

    def is_kept(self, prompt: Prompt, *, salt: str = "", **template: Any) -> bool:
        """Whether a prefix was asked to be kept, and is there."""
        ids = self._prompts.encode_prefix(prompt, **_flat(template)).ids
        with self._engine_lock:
            return self._cache.is_kept(ids, salt)

    def clear(self, salt: str | None = None) -> None:
        """Forget everything that no running request stands on, on disk for good; of one salt if asked."""
        with self._engine_lock:
            if salt is None:
                self._cache.clear()
            else:
                forget(self._cache, salt)

    def flush(self) -> bool:
        """Wait until everything that is kept is on disk too, if there is one; False if something could not be written."""
        with self._engine_lock:
            return self._cache.flush()

    def export_file(self, file: Path, salt: str = "") -> Exported:
        """Write what one salt has into one file. Raises RequestError if nothing is kept on disk, DiskError if it fails."""
        with self._engine_lock:
            disk = self._require_disk()
            if not self._cache.flush(salt):
                raise DiskError("not everything in memory could be saved: the archive would lack it")
            return export_tree(disk, file, salt)

    def import_file(self, file: Path, salt: str = "") -> Imported:
        """Add what a file holds to the tree of a salt. Raises LanesBusy while requests run, DiskError for a wrong file."""
        self.check_archive(file)
        return self.take_archive(file, salt)

    def check_archive(self, file: Path) -> None:
        """Raise DiskError unless a file is an archive of a tree of this model. Any thread may ask: only the file is read.

        A wrong file must not come as far as `take_archive`, for which everybody's memory is let go.
        """
        check_archive(self._require_disk(), file)

    def take_archive(self, file: Path, salt: str = "") -> Imported:
        """Add what an archive that was checked holds to the tree of a salt. Raises LanesBusy while requests run."""
        with self._engine_lock:
            disk = self._require_disk()
            return change_disk(self._cache, lambda: import_tree(disk, file, salt))

    def _require_disk(self) -> Disk:
        disk = self._cache.memory.disk
        if disk is None:
            raise RequestError("nothing is kept on disk: the setting disk_bytes is 0, or the disk could not be had")
        return disk


def _flat(template: dict[str, Any]) -> dict[str, Any]:
    """Options for a template, with those given as `template_kwargs` among them."""
    named = {name: value for name, value in template.items() if name != "template_kwargs"}
    return named | (template.get("template_kwargs") or {})
