"""`bough cache`: commands that show, check and delete the trees on disk.

No model is loaded. A tree that a running server has open is handled through the server, unless --local is given.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich import filesize

from bough.cache.admin.trees import TreeInfo, TreeVerification, list_trees, remove_tree, verify_tree
from bough.cache.disk import DiskError, NotOwner
from bough.cli import options
from bough.cli.cache.archive import export_file, import_file
from bough.cli.cache.trees import DiskUse, RunningServer, choose_trees, measure_use, running_server, size_bytes
from bough.cli.groups import CommandApp
from bough.cli.terminal.columns import ago, align, describe
from bough.cli.terminal.progress import show_progress
from bough.cli.terminal.screen import Screen, confirm_or_exit
from bough.config import Settings, load_settings
from bough.errors import BoughError
from bough.models import Progress
from bough.runtime.tiers import clear_shared

app = CommandApp("Show, check, delete, export and import the trees on disk.")

Model = Annotated[str | None, typer.Argument(help="A model, or the name of one of its trees; not given: all.")]

_DAMAGED, _REFUSED = 1, 3  # exit codes of `verify`; 2 means wrong usage
_HEADER = ("TREE", "MODEL", "PAGES", "STATES", "SIZE", "INDEX", "LAST USED", "IN USE BY")


@dataclass(frozen=True)
class Check:
    """The result of reading one tree. One that cannot be locked is read as it is, and not at all with `--repair`."""

    name: str
    found: TreeVerification
    is_read: bool = True


@app.command()
def info(is_local: options.IsLocal = False, as_json: options.AsJsonObject = False) -> None:
    """Show the trees on disk, their sizes and their budget, and what a running server holds of them in memory."""
    screen, settings = Screen(), load_settings()
    trees = list_trees(settings.trees_folder)
    use = measure_use(trees, settings)
    with running_server(settings, is_local=is_local) as server:
        served = _read_served(server, screen) if server else None
    if as_json:
        facts = asdict(use) | {"trees": [asdict(tree) | {"folder": str(tree.folder)} for tree in trees], "server": served}
        return screen.write_line(json.dumps(facts, indent=2))
    if trees:
        screen.write_lines([*align([_HEADER, *map(_row, trees)], screen.width), ""])
    screen.write_lines(describe(_describe_use(use, len(trees)) | _describe_served(served), indent="", width=screen.width))
    for tree in trees:
        if tree.problem:
            screen.note(f"{tree.name}: {tree.problem}")
    return None


def _describe_use(use: DiskUse, num_trees: int) -> dict[str, str]:
    return {
        "trees": f"{num_trees:,}, {filesize.decimal(use.held_bytes)}",
        "budget": filesize.decimal(use.budget_bytes) if use.budget_bytes else "0: nothing is written to disk",
        "free": f"{filesize.decimal(use.free_bytes)}, of which {filesize.decimal(use.disk_free_bytes)} always stay free",
        "folder": use.folder,
    }


def _read_served(server: RunningServer, screen: Screen) -> dict[str, Any]:
    """The address of the server, and the figures of its trees; a note if it refuses them."""
    try:
        figures = server.read_figures()
    except BoughError as error:
        screen.note(f"the server at {server.url} does not tell what it holds: {error}")
        figures = []
    return {"url": server.url, "pid": server.pid, "models": figures}


def _describe_served(served: dict[str, Any] | None) -> dict[str, str]:
    if served is None:
        return {}
    held = [
        f"{each['model']}: {each['tokens']:,} tokens, {filesize.decimal(each['tree_bytes'])}" for each in served["models"]
    ]
    return {"server": f"{served['url']}, process {served['pid']}", "in memory": "; ".join(held)}


def _row(tree: TreeInfo) -> tuple[str, ...]:
    return (
        tree.name,
        tree.model,
        f"{tree.num_pages:,}",
        f"{tree.num_states:,}",
        filesize.decimal(tree.nbytes),
        filesize.decimal(tree.index_bytes),
        ago(datetime.fromtimestamp(tree.last_used, UTC)) if tree.last_used else "never",
        f"process {tree.owner_pid}" if tree.owner_pid is not None else "",
    )


@app.command()
def verify(
    model: Model = None,
    repair: Annotated[bool, typer.Option("--repair", help="Remove damaged pages and states.")] = False,
    as_json: options.AsJsonObject = False,
) -> None:
    """Read every file of the trees and name each problem. The exit code is 1 if there is one, repaired or not.

    Of a tree that is in use everything is read that its owner does not change meanwhile. It cannot be repaired: with
    --repair, if nothing else is wrong, the exit code is 3.
    """
    screen = Screen()
    trees = choose_trees(load_settings(), model, screen)
    with show_progress(screen.notes, stays=False) as progress:
        checks = [_check(tree, repair, progress) for tree in trees if not tree.is_set_aside]
    for tree in trees:
        if tree.is_set_aside:
            screen.note(f"{tree.name} was set aside and is not read; `bough cache clear {tree.name}` deletes it")
    if as_json:
        facts = [{"name": check.name, **asdict(check.found), "is_read": check.is_read} for check in checks]
        screen.write_line(json.dumps({"trees": facts}, indent=2))
    else:
        screen.write_lines(line for check in checks for line in _describe_check(check))
    refused = [check for check in checks if not check.is_read]
    for check in refused:
        screen.error(f"{check.name} was not repaired: it is {check.found.not_owner}")
    if any(check.found.problems for check in checks):
        raise typer.Exit(_DAMAGED)
    if refused:
        raise typer.Exit(_REFUSED)


def _check(tree: TreeInfo, repair: bool, progress: Progress) -> Check:
    """Read one tree, unless it is to be repaired and cannot be. A tree that cannot be read at all counts as a problem."""
    progress.start(f"reading {tree.name}", tree.nbytes or None)
    try:
        return Check(tree.name, verify_tree(tree.folder, on_file=progress.advance, repair=repair))
    except NotOwner as error:
        return Check(tree.name, TreeVerification().unowned(error), is_read=False)
    except DiskError as error:
        return Check(tree.name, TreeVerification(problems=(str(error),)))
    finally:
        progress.finish()


def _describe_check(check: Check) -> list[str]:
    found = check.found
    if not check.is_read:
        return [f"{check.name}: {found.not_owner}, not read"]
    verdict = f"{len(found.problems):,} damaged" if found.problems else "sound"
    removed = ", removed" if found.problems and found.is_repaired else ""
    owner = f"; {found.not_owner}" if found.not_owner else ""
    owner += ": what changes meanwhile is left out" if found.is_in_use else ""
    first = f"{check.name}: {found.num_files:,} files, {filesize.decimal(found.nbytes)}, {verdict}{removed}{owner}"
    return [first, *(f"  {problem}" for problem in found.problems)]


@app.command()
def clear(
    model: Model = None, yes: options.Yes = False, is_local: options.IsLocal = False, as_json: options.AsJsonObject = False
) -> None:
    """Delete trees. A running server clears those that it has open; if another process has one, the exit code is 1."""
    screen, settings = Screen(), load_settings()
    trees = choose_trees(settings, model, screen)
    if trees and not yes:
        names = ", ".join(tree.name for tree in trees)
        confirm_or_exit(f"delete {names} ({filesize.decimal(sum(map(size_bytes, trees)))})")
    with running_server(settings, is_local=is_local) as server:
        results = [_clear(tree, server, settings) for tree in trees]
    freed = {each.name: each.freed_bytes for each in results if not each.problem}
    refused = {each.name: each.problem for each in results if each.problem}
    if as_json:
        facts = {"freed_bytes": sum(freed.values()), "trees": freed, "refused": refused}
        screen.write_line(json.dumps(facts, indent=2))
    else:
        screen.write_lines(each.text for each in results if not each.problem)
    screen.exit_with(refused.values())


@dataclass(frozen=True)
class _Clearing:
    name: str
    freed_bytes: int = 0
    text: str = ""
    problem: str = ""


def _clear(tree: TreeInfo, server: RunningServer | None, settings: Settings) -> _Clearing:
    """Delete one tree, through the server if that has it open; and what the shared store has of it."""
    try:
        if server is None or not server.has_open(tree):
            if tree.fingerprint:
                clear_shared(settings, tree.fingerprint)
            freed_bytes = remove_tree(tree.folder)
            return _Clearing(tree.name, freed_bytes, f"deleted {tree.name} ({filesize.decimal(freed_bytes)})")
        cleared = server.clear(tree)
    except BoughError as error:
        return _Clearing(tree.name, problem=f"{tree.name} was not deleted: {error}")
    left = f"; {cleared.num_left:,} pages and states stay: in use, or of other keys" if cleared.num_left else ""
    done = f"cleared {tree.name} through the server at {server.url} ({filesize.decimal(cleared.freed_bytes)}){left}"
    return _Clearing(tree.name, cleared.freed_bytes, done)


app.command("export")(export_file)
app.command("import")(import_file)
