"""Which trees on disk a command means, how much disk all trees use, and the running server that has some of them open.

A name stands for a model, and so for all its trees, or for one tree: a tree's own name is the name of its model with the
first digits of the fingerprint. No model is loaded: each tree's folder names its model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.cache.admin.archive import ExportResult, ImportResult, measure_archive
from bough.cache.admin.trees import TreeInfo, list_trees
from bough.cache.disk import DiskError
from bough.cli.client import Client, find_client
from bough.cli.terminal.screen import Screen
from bough.config import Settings
from bough.errors import BoughError
from bough.models.fingerprint import safe_name
from bough.system.announcement import read_announcement
from bough.system.resources import default_disk_bytes, free_disk_bytes

_NO_TREES = "there are no trees on disk yet"


@dataclass(frozen=True)
class DiskUse:
    """The disk space that all trees use together, their budget, and the free space."""

    folder: str
    held_bytes: int
    budget_bytes: int
    free_bytes: int
    disk_free_bytes: int


def measure_use(trees: Sequence[TreeInfo], settings: Settings) -> DiskUse:
    folder, held_bytes = settings.trees_folder, sum(map(size_bytes, trees))
    budget_bytes = settings.disk
    if budget_bytes is None:
        budget_bytes = default_disk_bytes(folder, settings.disk_free, held_bytes)
    return DiskUse(str(folder), held_bytes, budget_bytes, free_disk_bytes(folder), settings.disk_free)


def size_bytes(tree: TreeInfo) -> int:
    return tree.nbytes + tree.index_bytes


def choose_trees(settings: Settings, model: str | None, screen: Screen) -> list[TreeInfo]:
    """The trees of a model, or all trees. Raises DiskError if the model has none; notes it if there are no trees at all."""
    trees = list_trees(settings.trees_folder)
    found = [tree for tree in trees if model is None or is_of(tree, model)]
    if model is not None and not found:
        raise DiskError(f"no tree of {model!r} on disk; {_describe_trees(trees)}")
    if not found:
        screen.note(_NO_TREES)
    return found


def choose_tree(settings: Settings, model: str) -> TreeInfo:
    """The one usable tree of a model: of those that only differ in the code that computed them, the last that was used.

    Raises DiskError if there is none or more than one.
    """
    trees = list_trees(settings.trees_folder)
    usable = [tree for tree in trees if is_of(tree, model) and not tree.problem]
    found = list({tree.inputs or tree.name: tree for tree in sorted(usable, key=lambda tree: tree.last_used)}.values())
    if not found:
        raise DiskError(f"no tree of {model!r} on disk; {_describe_trees(trees)}")
    if len(found) > 1:
        raise DiskError(f"{model!r} has {len(found)} trees on disk, name one: {', '.join(tree.name for tree in found)}")
    return found[0]


def _describe_trees(trees: Sequence[TreeInfo]) -> str:
    return f"there are {', '.join(tree.name for tree in trees)}" if trees else _NO_TREES


def is_of(tree: TreeInfo, name: str) -> bool:
    """Whether a name stands for this tree. If a damaged tree no longer names its model, its folder's name decides."""
    plain = name.removesuffix(":latest")
    if plain in (tree.name, tree.model):
        return True
    return not tree.model and tree.name.partition(".set-aside-")[0].rpartition("-")[0] == safe_name(plain)


@dataclass(frozen=True)
class RunningServer:
    """A server that runs on this machine with the same cache folder. A tree that it has open is handled through it."""

    client: Client
    pid: int

    @property
    def url(self) -> str:
        return self.client.url

    def has_open(self, tree: TreeInfo) -> bool:
        return tree.owner_pid == self.pid

    def has_replicas(self, model: str) -> bool:
        """Whether it runs a model on replicas: they have their trees in folders of their own, maybe on other machines."""
        try:
            figures = self.read_figures()
        except BoughError:  # it has keys, and we have none
            return False
        return any(each["model"] == model.removesuffix(":latest") and "replicas" in each for each in figures)

    def read_figures(self) -> list[dict[str, Any]]:
        """The figures of the trees of its loaded models, as far as the key sees them."""
        found: list[dict[str, Any]] = self.client.get("/api/cache")["models"]
        return found

    def clear(self, tree: TreeInfo) -> ClearResult:
        """Clear this model's tree there; with keys, only what belongs to our key."""
        self.client.delete("/api/cache", model=tree.model)
        left = next((each for each in list_trees(tree.folder.parent) if each.folder == tree.folder), None)
        if left is None:
            return ClearResult(tree.nbytes, 0)
        return ClearResult(max(0, tree.nbytes - left.nbytes), left.num_pages + left.num_states)

    def export(self, model: str, file: Path, salt: str) -> ExportResult:
        """Write what a salt has of this model to a new file; with keys, the salt of our key."""
        self.client.download("/api/cache/export", file, salt, model=model)
        return measure_archive(file)

    def import_archive(self, model: str, file: Path, salt: str) -> ImportResult:
        """Add an archive to what a salt has of this model; with keys, the salt of our key."""
        found = self.client.upload("/api/cache/import", file, salt, model=model)
        return ImportResult(found["num_items"], found["num_skipped"], found["nbytes"], tuple(found["problems"]))


@dataclass(frozen=True)
class ClearResult:
    """The bytes that clearing a tree freed, and the pages and states that stay: in use, or of other keys."""

    freed_bytes: int
    num_left: int


@contextmanager
def running_server(settings: Settings, *, is_local: bool) -> Iterator[RunningServer | None]:
    """The server that runs here, or None, also if `is_local`."""
    announcement = read_announcement(settings.cache_folder)
    client = find_client(settings, is_local=is_local)
    if client is None or announcement is None:
        yield None
        return
    with client:
        yield RunningServer(client, announcement.pid)
