"""The running server, for commands on trees: a tree that it has open is shown, cleared and copied through it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.cache.admin.trees import TreeInfo, list_trees
from bough.cli.client import Client, find_client
from bough.config import Settings
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

    def export(self, tree: TreeInfo, file: Path, salt: str) -> None:
        """Let it write what a salt has in this tree to a new file; with keys, the salt of our key."""
        self.client.download("/api/cache/export", file, salt, model=tree.model)

    def import_archive(self, tree: TreeInfo, file: Path, salt: str) -> dict[str, Any]:
        """Let it add an archive to what a salt has in this tree; with keys, the salt of our key."""
        found: dict[str, Any] = self.client.upload("/api/cache/import", file, salt, model=tree.model)
        return found


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
