"""`bough cache export` and `import`: copy a tree to a file and back, for example to another machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import filesize

from bough.cache.admin.archive import ImportResult, export_tree, import_tree
from bough.cache.admin.archive_file import ArchiveHead, read_head
from bough.cache.admin.trees import TreeInfo, list_trees
from bough.cache.disk import Disk, DiskError
from bough.cli import options
from bough.cli.cache.trees import RunningServer, choose_tree, is_of, measure_use, running_server, size_bytes
from bough.cli.terminal.progress import show_progress
from bough.cli.terminal.screen import Screen
from bough.config import Settings, load_settings
from bough.errors import SettingsError
from bough.models.fingerprint import tree_folder

Salt = Annotated[str, typer.Option(help="The salt to export, or to import into.", show_default=False)]


def export_file(
    model: Annotated[str, typer.Argument(help="A model, or the name of one of its trees.")],
    file: Annotated[Path, typer.Argument(help="The file to write; an existing file is not overwritten.")],
    salt: Salt = "",
    is_local: options.IsLocal = False,
    as_json: options.AsJsonObject = False,
) -> None:
    """Write the prefixes of one salt in a tree to a file, for `bough cache import` here or on another machine.

    A running server that has the tree open writes it; if it has keys, what belongs to BOUGH_API_KEY is written.
    """
    screen, settings = Screen(), load_settings()
    if file.exists():
        raise DiskError(f"{file} exists already")
    with show_progress(screen.notes, stays=False) as progress, running_server(settings, is_local=is_local) as server:
        if server is not None and server.has_replicas(model):
            progress.start(f"writing {file}", None)
            name, done = model, server.export(model, file, salt)
        else:
            tree = choose_tree(settings, model)
            progress.start(f"writing {file}", None)
            name = tree.name
            if server is not None and server.has_open(tree):
                done = server.export(tree.model, file, salt)
            else:
                with _open(tree, settings, 0, screen) as disk:
                    done = export_tree(disk, file, salt)
    if as_json:
        return screen.write_line(json.dumps(asdict(done) | {"tree": name, "file": str(file)}, indent=2))
    if done.num_skipped:
        screen.note(
            f"skipped {done.num_skipped:,} pages and states: they cannot be read, or the pages before them are missing"
        )
    return screen.write_line(f"{done.num_items:,} pages and states of {name} ({filesize.decimal(done.nbytes)}) in {file}")


@options.with_flags(options.setting_flags("disk", "disk_free"))
def import_file(
    file: Annotated[Path, typer.Argument(help="A file that `bough cache export` wrote.")],
    model: Annotated[
        str | None, typer.Argument(help="The model to import it for; not given: the model that it was exported from.")
    ] = None,
    salt: Salt = "",
    is_local: options.IsLocal = False,
    as_json: options.AsJsonObject = False,
    **flags: Any,
) -> None:
    """Add the content of a file to the tree with the same fingerprint, or to a new tree.

    A running server that has the tree open adds it; if it has keys, to what belongs to BOUGH_API_KEY.
    """
    screen, settings = Screen(), load_settings(flags, are_flags=True)
    if settings.disk == 0:
        raise SettingsError("disk is 0: the disk is turned off")
    head = read_head(file)
    with show_progress(screen.notes, stays=False) as progress, running_server(settings, is_local=is_local) as server:
        name = model or head.model
        if server is not None and server.has_replicas(name):
            progress.start(f"reading {file}", None)
            done = server.import_archive(name, file, salt)
        else:
            tree = _find_target(head, model, list_trees(settings.trees_folder), settings)
            name = tree.name
            progress.start(f"reading {file}", None)
            done = _import(tree, file, salt, settings, server, screen)
    if as_json:
        screen.write_line(json.dumps(asdict(done) | {"tree": name}, indent=2))
    else:
        skipped = f"; skipped {done.num_skipped:,} that were there already or were refused" if done.num_skipped else ""
        added = f"{done.num_items:,} pages and states ({filesize.decimal(done.nbytes)})"
        screen.write_line(f"added {added} to {name}{skipped}")
    screen.exit_with(done.problems)


def _import(
    tree: TreeInfo, file: Path, salt: str, settings: Settings, server: RunningServer | None, screen: Screen
) -> ImportResult:
    if server is not None and server.has_open(tree):
        return server.import_archive(tree.model, file, salt)
    trees = list_trees(settings.trees_folder)
    others_bytes = sum(size_bytes(other) for other in trees if other.folder != tree.folder)
    budget_bytes = max(0, measure_use(trees, settings).budget_bytes - others_bytes)
    with _open(tree, settings, budget_bytes, screen) as store:
        return import_tree(store, file, salt)


def _find_target(head: ArchiveHead, model: str | None, trees: Sequence[TreeInfo], settings: Settings) -> TreeInfo:
    """The tree to import into: one with the same fingerprint, and of the model if one is named; or a tree to be made."""
    name = model.removesuffix(":latest") if model else head.model
    same = [tree for tree in trees if not tree.problem and tree.fingerprint == head.fingerprint]
    named = [tree for tree in same if is_of(tree, name)]
    if named or (same and model is None):
        return (named or same)[0]
    folder = tree_folder(settings, name, head.fingerprint)
    _require_no_other(head, model, [tree for tree in trees if not tree.is_set_aside], folder)
    return TreeInfo(folder.name, folder, name, head.fingerprint, head.page_tokens)


def _require_no_other(head: ArchiveHead, model: str | None, trees: Sequence[TreeInfo], folder: Path) -> None:
    """Raise DiskError if the named model has only trees with other fingerprints, or if `folder` holds another tree."""
    for tree in trees:
        if tree.folder == folder:
            raise DiskError(f"the file cannot be imported into {tree.name}: {tree.problem or 'it has another fingerprint'}")
    others = [tree.fingerprint[:12] for tree in trees if model is not None and is_of(tree, model)]
    if others:
        raise DiskError(
            f"the file has fingerprint {head.fingerprint[:12]}, but the trees of {model!r} have {', '.join(others)}: "
            "it was made with other weights or settings; leave out MODEL to import it into a tree of its own"
        )


def _open(tree: TreeInfo, settings: Settings, budget_bytes: int, screen: Screen) -> Disk:
    return Disk(
        tree.folder,
        fingerprint=tree.fingerprint,
        model=tree.model,
        page_tokens=tree.page_tokens,
        budget_bytes=budget_bytes,
        floor_bytes=settings.disk_free,
        ttl_s=settings.disk_ttl,
        warn=screen.note,
    )
