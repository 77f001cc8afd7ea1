"""Commands on the models of this machine: `bough pull`, `list`, `show` and `rm`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich import filesize

from bough import models
from bough.cache.admin.trees import TreeInfo, list_trees, remove_tree
from bough.cache.disk import DiskError
from bough.cli import options
from bough.cli.terminal.columns import ago, align, count, describe
from bough.cli.terminal.progress import show_progress
from bough.cli.terminal.screen import Screen, confirm_or_exit
from bough.config import Settings, load_settings
from bough.engines.contract import Engine
from bough.errors import ModelNotFound
from bough.models import ModelFiles, ModelInfo, Store
from bough.runner import gguf_support, make_engine


def pull(
    name: Annotated[str, typer.Argument(help="A known name such as smollm2, or org/name on the Hugging Face hub.")],
) -> None:
    """Fetch a model. An interrupted download continues where it stopped."""
    screen, settings = Screen(), load_settings()
    before = {model.name: model.created for model in Store(settings.models_folder).list()}
    with show_progress(screen.notes) as progress:
        model = models.pull(name, settings, gguf_support(settings), progress)
    is_new = before.get(model.name) != model.created
    screen.write_line(f"{model.name} {'is here' if is_new else 'was here already'} ({filesize.decimal(model.size_bytes)})")


def list_models(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False) -> None:
    """List the models on this machine."""
    screen, settings = Screen(), load_settings()
    found = Store(settings.models_folder).list()
    if as_json:
        screen.write_line(json.dumps([_list_facts(model) for model in found], indent=2))
    elif found:
        for line in align([("NAME", "SIZE", "PARAMETERS", "QUANTIZATION", "MODIFIED"), *map(_list_row, found)]):
            screen.write_line(line)
    else:
        screen.note(f"no models yet: `bough pull {settings.model}` fetches the default one")


def _list_row(model: ModelFiles) -> tuple[str, ...]:
    return (
        model.name,
        filesize.decimal(model.size_bytes),
        count(model.num_parameters) if model.num_parameters else "",
        model.quantization,
        ago(model.created),
    )


def _list_facts(model: ModelFiles) -> dict[str, Any]:
    return {
        "name": model.name,
        "size_bytes": model.size_bytes,
        "num_parameters": model.num_parameters,
        "quantization": model.quantization,
        "modified": model.created.isoformat() if model.created else None,
        "source": model.source,
        "sha256": model.sha256,
        "folder": str(model.folder),
    }


def show(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A name, a folder or a GGUF file; not given: the default model.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Load the model and show the result of the engine's self-check.")
    ] = True,
    engine: options.Engine = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    attention: options.Attention = None,
    trust_remote_code: options.TrustRemoteCode = None,
) -> None:
    """Show the properties of a model, and what the engine can do with it."""
    screen = Screen()
    settings = load_settings(options.settings_of(ctx))
    with show_progress(screen.notes, stays=False) as progress:
        files = models.resolve(settings.model, settings, gguf_support(settings), progress)
        progress.start("reading the model's files", None)
        info = models.describe(files)
        progress.finish()
    if as_json:
        found = {"engine": _check(files, settings, screen)} if check else {}
        return screen.write_line(json.dumps(asdict(info) | found, indent=2))
    _write_info(screen, info)
    if check:
        _write_engine(screen, _check(files, settings, screen))
    return None


def _check(files: ModelFiles, settings: Settings, screen: Screen) -> dict[str, Any]:
    """Load the model and describe the engine with it, as plain data."""
    with show_progress(screen.notes, stays=False) as progress:
        engine = make_engine(files, settings, progress)
    try:
        return _engine_facts(engine)
    finally:
        engine.close()


def _engine_facts(engine: Engine) -> dict[str, Any]:
    groups = [asdict(group) | {"kind": group.kind.value} for group in engine.groups]
    return {
        "runs_on": engine.describe(),
        "context_tokens": engine.context_tokens,
        "capabilities": asdict(engine.capabilities),
        "groups": groups,
    }


def _write_info(screen: Screen, info: ModelInfo) -> None:
    facts = {
        "architecture": info.architecture,
        "parameters": count(info.num_parameters),
        "context": f"{info.context_tokens:,} tokens" if info.context_tokens else "",
        "dtype": info.dtype,
        "quantization": info.quantization,
        "size": filesize.decimal(info.size_bytes),
        "source": info.source,
        "sha256": info.digest.removeprefix("sha256:"),
        "chat template": _yes_or_no(info.has_chat_template),
        "capabilities": ", ".join(info.capabilities),
        "sampling": ", ".join(f"{name} {value}" for name, value in info.sampling.items()) or "no defaults of its own",
    }
    _write_section(screen, info.name, describe(facts))


def _write_engine(screen: Screen, facts: dict[str, Any]) -> None:
    found, runs_on = facts["capabilities"], facts["runs_on"]
    verdict = {
        "chunking": _yes_or_no(found["can_chunk"]),
        "reuse": _yes_or_no(found["can_reuse"]),
        "reuse limit": f"{found['reuse_limit']:,} tokens" if found["reuse_limit"] else "none",
        "attention": runs_on.get("attention", ""),
        "reason": found["reason"],
    }
    _write_section(screen, "engine", describe({name: value for name, value in runs_on.items() if name != "attention"}))
    _write_section(screen, "self-check", describe(verdict))
    differences = {name: f"{value:.1e}" for name, value in found["differences"].items()}
    _write_section(screen, "largest logit differences to one forward pass", describe(differences))
    _write_section(screen, "groups", _group_lines(facts["groups"]))


def _group_lines(groups: Sequence[dict[str, Any]]) -> list[str]:
    rows = [(str(each["index"]), each["kind"], _group_size(each)) for each in groups]
    return ["  " + line for line in align(rows)] if rows else []


def _group_size(group: dict[str, Any]) -> str:
    if group["state_bytes"]:
        return f"{group['state_bytes']:,} bytes a state"
    window = f", window of {group['window']:,} tokens" if group["window"] else ""
    return f"{group['bytes_per_token']:,} bytes a token{window}"


def _write_section(screen: Screen, title: str, lines: Sequence[str]) -> None:
    if lines:
        screen.write_line(title)
        for line in lines:
            screen.write_line(line)
        screen.write_line()


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names as `bough list` shows them.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete models and their trees on disk. If one of the names is unknown, nothing is deleted."""
    settings = load_settings()
    screen, store = Screen(), Store(settings.models_folder)
    found = {model.name: model for model in (_find(store, name) for name in names)}
    size_bytes = sum(model.size_bytes for model in found.values())
    question = f"delete {', '.join(found)} ({filesize.decimal(size_bytes)})?"
    if not yes:
        confirm_or_exit(question)
    for name in found:
        screen.write_line(f"deleted {name} ({filesize.decimal(store.remove(name))})")
        for tree in list_trees(settings.trees_folder):
            if tree.model == name:
                _remove_tree(screen, tree)


def _remove_tree(screen: Screen, tree: TreeInfo) -> None:
    try:
        screen.write_line(f"deleted its tree {tree.name} ({filesize.decimal(remove_tree(tree.folder))})")
    except DiskError as error:
        screen.write_line(f"its tree was not deleted: {error}")


def _find(store: Store, name: str) -> ModelFiles:
    model = store.find(name)
    if model is None:
        raise ModelNotFound(f"no local model {name!r}; {store.describe()}")
    return model
