"""The running server, for commands on trees: a tree that it has open is shown, cleared and copied through it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.cache.admin.archive import Exported, Imported, read_manifest
from bough.cache.admin.trees import TreeInfo, list_trees
from bough.cli.client import Client, find_client
from bough.config import Settings
from bough.errors import BoughError
from bough.system.announcement import read_announcement


@dataclass(frozen=True)
class RunningServer:
    """A server that runs on this machine with the same cache folder, and has some trees open."""

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

    def clear(self, tree: TreeInfo) -> Cleared:
        """Let it delete what it has of this model's tree; with keys, only what belongs to our key."""
        self.client.delete("/api/cache", model=tree.model)
        left = next((each for each in list_trees(tree.folder.parent) if each.folder == tree.folder), None)
        if left is None:
            return Cleared(tree.nbytes, 0)
        return Cleared(max(0, tree.nbytes - left.nbytes), left.num_pages + left.num_states)

    def export(self, model: str, file: Path, salt: str) -> Exported:
        """Let it write what a salt has of this model to a new file; with keys, the salt of our key."""
        self.client.download("/api/cache/export", file, salt, model=model)
        items = read_manifest(file).items
        return Exported(len(items), nbytes=sum(item.nbytes for item in items), num_skipped=0)

    def import_archive(self, model: str, file: Path, salt: str) -> Imported:
        """Let it add an archive to what a salt has of this model; with keys, the salt of our key."""
        found = self.client.upload("/api/cache/import", file, salt, model=model)
        return Imported(found["num_items"], found["num_skipped"], found["nbytes"], tuple(found["problems"]))


@dataclass(frozen=True)
class Cleared:
    """What clearing a tree freed, and how many pages and states of it are still there: in use, or of other keys."""

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
