"""Which trees on disk a command means, and how much disk all trees use.

A name stands for a model, and so for all its trees, or for one tree: a tree's own name is the name of its model with the
first digits of the fingerprint. No model is loaded: each tree's folder tells its model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bough.cache.admin.trees import TreeInfo, list_trees
from bough.cache.disk import DiskError
from bough.cli.terminal.screen import Screen
from bough.config import Settings
from bough.models.fingerprint import safe_name
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
