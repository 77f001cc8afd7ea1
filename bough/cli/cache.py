"""`bough cache`: the trees on disk. Shows them, checks them, deletes them, and carries them to another machine.

No model is loaded: a tree's folder says itself what it is of. Trees are chosen by their model, or by their own name, which
is the model's with the beginning of the fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import filesize

from bough.cache.admin.archive import export_tree, import_tree, read_manifest
from bough.cache.admin.manifest import Manifest
from bough.cache.admin.trees import TreeInfo, list_trees, remove_tree, verify_tree
from bough.cache.disk import Disk, DiskBusy, DiskError
from bough.cli import options
from bough.cli.terminal.columns import ago, align, describe
from bough.cli.terminal.progress import show_progress
from bough.cli.terminal.screen import Screen, confirm_or_exit
from bough.config import Settings, load_settings
from bough.errors import SettingsError
from bough.models import Progress
from bough.models.fingerprint import safe_name, tree_folder
from bough.system.resources import default_disk_bytes, free_disk_bytes

app = typer.Typer(help="Show, check, delete and carry the trees on disk.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print a JSON object.")]
Model = Annotated[str | None, typer.Argument(help="A model, or one of its trees by name; none: all.")]
Salt = Annotated[str, typer.Option(help="The salt whose prefixes are meant.", show_default=False)]

_DAMAGED, _REFUSED = 1, 3  # exit codes of `verify`; 2 is that of a command line that is wrong
_NO_TREES = "there are no trees on disk yet"
_HEADER = ("TREE", "MODEL", "FINGERPRINT", "PAGES", "STATES", "SIZE", "INDEX", "LAST USED", "IN USE BY")


@dataclass(frozen=True)
class DiskUse:
    """What all trees take together, and what they may take."""

    folder: str
    held_bytes: int
    budget_bytes: int
    free_bytes: int
    disk_free_bytes: int


@dataclass(frozen=True)
class Check:
    """What reading one tree came to. `orphans` are files that the index does not know; they are no problem.

    A tree that is in use was not read: `owner_pid` is the process that has it, if its lock file tells.
    """

    name: str
    num_files: int = 0
    nbytes: int = 0
    orphans: int = 0
    problems: tuple[str, ...] = ()
    is_repaired: bool = False
    is_in_use: bool = False
    owner_pid: int | None = None

    @property
    def owner(self) -> str:
        return f"process {self.owner_pid}" if self.owner_pid is not None else "another process"


@app.command()
def info(as_json: Json = False) -> None:
    """Show the trees on disk, what they take and what they may take."""
    screen, settings = Screen(), load_settings()
    trees = list_trees(settings.trees_folder)
    use = _measure(trees, settings)
    if as_json:
        return screen.write_line(json.dumps(asdict(use) | {"trees": [_facts(tree) for tree in trees]}, indent=2))
    if trees:
        for line in [*align([_HEADER, *map(_row, trees)]), ""]:
            screen.write_line(line)
    for line in describe(_describe_use(use, len(trees)), indent=""):
        screen.write_line(line)
    for tree in trees:
        if tree.problem:
            screen.note(f"{tree.name}: {tree.problem}")
    return None


def _measure(trees: Sequence[TreeInfo], settings: Settings) -> DiskUse:
    folder, held_bytes = settings.trees_folder, sum(map(_size_bytes, trees))
    budget_bytes = settings.disk_bytes
    if budget_bytes is None:
        budget_bytes = default_disk_bytes(folder, settings.disk_free_bytes, held_bytes)
    return DiskUse(str(folder), held_bytes, budget_bytes, free_disk_bytes(folder), settings.disk_free_bytes)


def _describe_use(use: DiskUse, num_trees: int) -> dict[str, str]:
    return {
        "trees": f"{num_trees:,}, {filesize.decimal(use.held_bytes)}",
        "budget": filesize.decimal(use.budget_bytes) if use.budget_bytes else "none: nothing is written to the disk",
        "free": f"{filesize.decimal(use.free_bytes)}, of which {filesize.decimal(use.disk_free_bytes)} are left alone",
        "folder": use.folder,
    }


def _row(tree: TreeInfo) -> tuple[str, ...]:
    return (
        tree.name,
        tree.model,
        tree.fingerprint[:12],
        f"{tree.num_pages:,}",
        f"{tree.num_states:,}",
        filesize.decimal(tree.nbytes),
        filesize.decimal(tree.index_bytes),
        ago(datetime.fromtimestamp(tree.last_used, UTC)) if tree.last_used else "never",
        f"process {tree.owner_pid}" if tree.owner_pid is not None else "",
    )


def _facts(tree: TreeInfo) -> dict[str, Any]:
    return asdict(tree) | {"folder": str(tree.folder)}


def _size_bytes(tree: TreeInfo) -> int:
    return tree.nbytes + tree.index_bytes


@app.command()
def verify(
    model: Model = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove what is damaged.")] = False,
    as_json: Json = False,
) -> None:
    """Read everything on disk and name each problem. The exit code is 1 if there was any, repaired or not.

    A tree that is in use is not read, which is no problem. With --repair it is refused: if nothing else is wrong, the
    exit code is 3.
    """
    screen = Screen()
    trees = _choose(load_settings(), model, screen)
    with show_progress(screen.notes, stays=False) as progress:
        checks = [_check(tree, repair, progress) for tree in trees if not tree.is_set_aside]
    for tree in trees:
        if tree.is_set_aside:
            screen.note(f"{tree.name} was set aside and is not read; `bough cache clear {tree.name}` deletes it")
    if as_json:
        screen.write_line(json.dumps({"trees": [asdict(check) for check in checks]}, indent=2))
    else:
        for line in (line for check in checks for line in _describe_check(check)):
            screen.write_line(line)
    refused = [check for check in checks if repair and check.is_in_use]
    for check in refused:
        screen.error(f"{check.name} was not repaired: it is in use by {check.owner}")
    if any(check.problems for check in checks):
        raise typer.Exit(_DAMAGED)
    if refused:
        raise typer.Exit(_REFUSED)


def _check(tree: TreeInfo, repair: bool, progress: Progress) -> Check:
    """Read one tree, unless it is in use. That it cannot be opened is a problem like any other: the next is still read."""
    progress.start(f"reading {tree.name}", tree.nbytes or None)
    try:
        found = verify_tree(tree.folder, on_file=progress.advance, repair=repair)
    except DiskBusy as busy:
        return Check(tree.name, is_in_use=True, owner_pid=busy.pid)
    except DiskError as error:
        return Check(tree.name, problems=(str(error),))
    finally:
        progress.finish()
    return Check(tree.name, found.num_files, found.nbytes, found.orphans, found.problems, found.is_repaired)


def _describe_check(check: Check) -> list[str]:
    if check.is_in_use:
        return [f"{check.name}: in use by {check.owner}, not read"]
    verdict = f"{len(check.problems):,} damaged" if check.problems else "sound"
    removed = ", removed" if check.problems and check.is_repaired else ""
    first = f"{check.name}: {check.num_files:,} files, {filesize.decimal(check.nbytes)}, {verdict}{removed}"
    return [first, *(f"  {problem}" for problem in check.problems)]


@app.command()
def clear(
    model: Model = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Delete trees for good. One that is in use stays, and the exit code is 1."""
    screen = Screen()
    trees = _choose(load_settings(), model, screen)
    question = f"delete {', '.join(tree.name for tree in trees)} ({filesize.decimal(sum(map(_size_bytes, trees)))})?"
    if trees and not yes:
        confirm_or_exit(question)
    freed, refused = _remove(trees)
    if as_json:
        facts = {"freed_bytes": sum(freed.values()), "trees": freed, "refused": refused}
        screen.write_line(json.dumps(facts, indent=2))
    else:
        for name, freed_bytes in freed.items():
            screen.write_line(f"deleted {name} ({filesize.decimal(freed_bytes)})")
    for reason in refused.values():
        screen.error(reason)
    if refused:
        raise typer.Exit(1)


def _remove(trees: Sequence[TreeInfo]) -> tuple[dict[str, int], dict[str, str]]:
    """The bytes that each deleted tree freed, and why the others were not deleted."""
    freed: dict[str, int] = {}
    refused: dict[str, str] = {}
    for tree in trees:
        try:
            freed[tree.name] = remove_tree(tree.folder)
        except DiskError as error:
            refused[tree.name] = f"{tree.name} was not deleted: {error}"
    return freed, refused


@app.command("export")
def export_file(
    model: Annotated[str, typer.Argument(help="A model, or one of its trees by name.")],
    file: Annotated[Path, typer.Argument(help="The file to write; one that exists is not overwritten.")],
    salt: Salt = "",
    as_json: Json = False,
) -> None:
    """Write what one salt has in a tree to a file, which `bough cache import` reads, here or elsewhere."""
    screen, settings = Screen(), load_settings()
    tree = _choose_one(settings, model)
    if file.exists():
        raise DiskError(f"{file} exists already")
    with show_progress(screen.notes, stays=False) as progress, _open(tree, settings, 0, screen) as disk:
        progress.start(f"writing {file}", None)
        done = export_tree(disk, file, salt)
    if as_json:
        return screen.write_line(json.dumps(asdict(done) | {"tree": tree.name, "file": str(file)}, indent=2))
    if done.num_skipped:
        screen.note(f"{done.num_skipped:,} pages and states could not be read, or what comes before them is gone")
    return screen.write_line(
        f"{done.num_items:,} pages and states of {tree.name} ({filesize.decimal(done.nbytes)}) in {file}"
    )


@app.command("import")
def import_file(
    file: Annotated[Path, typer.Argument(help="What `bough cache export` wrote.")],
    model: Annotated[str | None, typer.Argument(help="The model it is for; none: the one that it is of.")] = None,
    salt: Salt = "",
    disk: options.Disk = None,
    disk_free: options.DiskFree = None,
    as_json: Json = False,
) -> None:
    """Add what a file holds to the tree of the same fingerprint, which is made if it is not there."""
    screen, settings = Screen(), load_settings({"disk_bytes": disk, "disk_free_bytes": disk_free})
    if settings.disk_bytes == 0:
        raise SettingsError("disk_bytes is 0: the disk is turned off")
    trees = list_trees(settings.trees_folder)
    tree = _find_target(read_manifest(file), model, trees, settings)
    others_bytes = sum(_size_bytes(other) for other in trees if other.folder != tree.folder)
    budget_bytes = max(0, _measure(trees, settings).budget_bytes - others_bytes)
    with show_progress(screen.notes, stays=False) as progress, _open(tree, settings, budget_bytes, screen) as store:
        progress.start(f"reading {file}", None)
        done = import_tree(store, file, salt)
    if as_json:
        screen.write_line(json.dumps(asdict(done) | {"tree": tree.name}, indent=2))
    else:
        skipped = f"; {done.num_skipped:,} were there already or not taken" if done.num_skipped else ""
        added = f"{done.num_items:,} pages and states ({filesize.decimal(done.nbytes)})"
        screen.write_line(f"added {added} to {tree.name}{skipped}")
    for problem in done.problems:
        screen.error(problem)
    if done.problems:
        raise typer.Exit(1)


def _find_target(manifest: Manifest, model: str | None, trees: Sequence[TreeInfo], settings: Settings) -> TreeInfo:
    """The tree that a file goes to: of the same fingerprint, and of the model if one is named; or one still to be made."""
    name = model.removesuffix(":latest") if model else manifest.model
    same = [tree for tree in trees if not tree.problem and tree.fingerprint == manifest.fingerprint]
    named = [tree for tree in same if _is_of(tree, name)]
    if named or (same and model is None):
        return (named or same)[0]
    folder = tree_folder(settings, name, manifest.fingerprint)
    _require_no_other(manifest, model, [tree for tree in trees if not tree.is_set_aside], folder)
    return TreeInfo(folder.name, folder, name, manifest.fingerprint, manifest.page_tokens)


def _require_no_other(manifest: Manifest, model: str | None, trees: Sequence[TreeInfo], folder: Path) -> None:
    """Raise DiskError if the named model has trees of other fingerprints only, or another tree is where it would go."""
    for tree in trees:
        if tree.folder == folder:
            raise DiskError(f"{tree.name} cannot take the file: {tree.problem or 'it is of another fingerprint'}")
    others = [tree.fingerprint[:12] for tree in trees if model is not None and _is_of(tree, model)]
    if others:
        raise DiskError(
            f"the file has fingerprint {manifest.fingerprint[:12]}, and what {model!r} has on disk {', '.join(others)}: it "
            "was made with other weights or settings; without MODEL it gets a tree of its own"
        )


def _open(tree: TreeInfo, settings: Settings, budget_bytes: int, screen: Screen) -> Disk:
    return Disk.open(
        tree.folder,
        fingerprint=tree.fingerprint,
        model=tree.model,
        page_tokens=tree.page_tokens,
        budget_bytes=budget_bytes,
        floor_bytes=settings.disk_free_bytes,
        ttl_s=settings.disk_ttl_s,
        warn=screen.note,
    )


def _choose(settings: Settings, model: str | None, screen: Screen) -> list[TreeInfo]:
    """The trees of a model, or all. Raises DiskError if a model has none; that there are none at all is only said."""
    trees = list_trees(settings.trees_folder)
    found = [tree for tree in trees if model is None or _is_of(tree, model)]
    if model is not None and not found:
        raise DiskError(f"no tree of {model!r} on disk; {_describe_trees(trees)}")
    if not found:
        screen.note(_NO_TREES)
    return found


def _choose_one(settings: Settings, model: str) -> TreeInfo:
    """The only tree of a model that can be used."""
    trees = list_trees(settings.trees_folder)
    found = [tree for tree in trees if _is_of(tree, model) and not tree.problem]
    if not found:
        raise DiskError(f"no tree of {model!r} on disk; {_describe_trees(trees)}")
    if len(found) > 1:
        raise DiskError(f"{model!r} has {len(found)} trees on disk, name one: {', '.join(tree.name for tree in found)}")
    return found[0]


def _describe_trees(trees: Sequence[TreeInfo]) -> str:
    return f"there are {', '.join(tree.name for tree in trees)}" if trees else _NO_TREES


def _is_of(tree: TreeInfo, name: str) -> bool:
    """Whether a tree is meant by a name. One that cannot tell its model any more is known by its folder."""
    plain = name.removesuffix(":latest")
    if plain in (tree.name, tree.model):
        return True
    return not tree.model and tree.name.partition(".set-aside-")[0].rpartition("-")[0] == safe_name(plain)
