"""Commands on the models of this machine: `bough pull`, `list`, `show`, `rm` and `cp`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich import filesize

from bough import models
from bough.cache.admin.trees import TreeInfo, list_trees, remove_tree
from bough.cache.disk import DiskError
from bough.cli import options
from bough.cli.client import Client, find_client
from bough.cli.terminal.columns import ago, align, count, describe
from bough.cli.terminal.progress import show_progress
from bough.cli.terminal.screen import Screen, confirm_or_exit, is_interactive
from bough.config import Settings, load_settings
from bough.errors import ModelError, ModelNotFound, Unavailable
from bough.models import ModelFiles, ModelFolder, ModelInfo, PullPlan
from bough.models.aliases import Alias
from bough.models.encoders.files import ModelKind, find_kind
from bough.models.fetching.short_names import list_catalogue
from bough.models.store import plain_name, tagged_name
from bough.runtime import find_advice, gguf_support, load_encoder, make_engine
from bough.system.resources import read_host_memory

_FITS = {"yes": "yes", "tight": "just", "no": "no"}
_LARGE_BYTES = 2 * 10**9  # above this a download needs a yes on a terminal


def pull(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A name that --list shows, org/name on the Hugging Face hub, or hf.co/org/name:Q4_K_M for a GGUF file.",
            show_default=False,
        ),
    ] = None,
    lists: Annotated[
        bool, typer.Option("--list", help="List the short names, and which fit into this machine's memory.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before a large download.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fetch a model. An interrupted download continues where it stopped."""
    screen = Screen()
    if lists:
        return _list_catalogue(screen, load_settings(), as_json)
    if name is None:
        raise typer.BadParameter("give the name of a model, or --list for the short names")
    settings = load_settings()
    before = {model.name: model.created for model in ModelFolder(settings.models_folder).list()}
    plans: list[PullPlan] = []

    def announce(plan: PullPlan) -> None:
        plans.append(plan)
        screen.note(plan.describe())
        if plan.download_bytes > _LARGE_BYTES and not yes and is_interactive():
            confirm_or_exit(f"fetch {filesize.decimal(plan.download_bytes)}?")

    with show_progress(screen.notes) as progress:
        model = models.pull(name, settings, gguf_support(settings), progress, announce)
    is_new = before.get(model.name) != model.created
    if as_json:
        plan = {"plan": asdict(plans[0]) if plans else None}
        return screen.write_line(json.dumps(_list_facts(model) | {"is_new": is_new} | plan, indent=2))
    return screen.write_line(
        f"{model.name} {'is here' if is_new else 'was here already'} ({filesize.decimal(model.size_bytes)})"
    )


def _list_catalogue(screen: Screen, settings: Settings, as_json: bool) -> None:
    found = list_catalogue(read_host_memory().total_bytes, gguf_support(settings).is_preferred)
    if as_json:
        return screen.write_line(json.dumps([asdict(each) for each in found], indent=2))
    rows = [("NAME", "PARAMETERS", "DOWNLOAD", "WEIGHTS", "MEMORY", "FITS", "LICENCE", "FROM")]
    for each in found:
        sizes = (count(each.num_parameters), filesize.decimal(each.download_bytes), each.weights)
        fits = (filesize.decimal(each.needed_bytes), _FITS[each.fits])
        names = ", ".join(reversed(each.names))
        rows.append((names, *sizes, *fits, each.license, each.repository or "package index"))
    return screen.write_lines(align(rows, screen.width))


def list_models(as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False) -> None:
    """List the models on this machine, and their other names."""
    screen, settings = Screen(), load_settings()
    store = ModelFolder(settings.models_folder)
    found, others = store.list(), [alias for alias in store.aliases() if store.find(alias.name) is None]
    if as_json:
        facts = [*map(_list_facts, found), *(_alias_facts(store, alias) for alias in others)]
        screen.write_line(json.dumps(sorted(facts, key=lambda each: str(each["name"])), indent=2))
    elif found:
        rows = [row for model in found for row in (_list_row(model), *_alias_rows(model, others))]
        screen.write_lines(align([("NAME", "SIZE", "PARAMETERS", "QUANTIZATION", "MODIFIED"), *rows], screen.width))
    else:
        screen.note(f"no models yet: `bough pull {settings.model}` fetches the default one")


def _alias_rows(model: ModelFiles, aliases: Sequence[Alias]) -> Iterator[tuple[str, ...]]:
    """A row for each other name of a model, and for each model that was created from it."""
    for alias in aliases:
        if alias.target == model.name:
            kind = "another name" if alias.overlay.is_empty else "made from it"
            yield f"  {tagged_name(alias.name)}", kind, "", "", ago(alias.created)


def _list_row(model: ModelFiles) -> tuple[str, ...]:
    return (
        tagged_name(model.name),
        filesize.decimal(model.size_bytes),
        " ".join(filter(None, [count(model.num_parameters) if model.num_parameters else "", _encoder_word(model)])),
        model.quantization,
        ago(model.created),
    )


def _encoder_word(model: ModelFiles) -> str:
    """The kind of an encoder; empty for a model that generates text, and if its files cannot be read."""
    try:
        kind = find_kind(model)
    except ModelError:
        return ""
    return "" if kind is ModelKind.GENERATOR else f"({kind.name.lower()})"


def _list_facts(model: ModelFiles) -> dict[str, Any]:
    return {
        "name": tagged_name(model.name),
        "size_bytes": model.size_bytes,
        "num_parameters": model.num_parameters,
        "quantization": model.quantization,
        "encoder": _encoder_word(model).strip("()") or None,
        "modified": model.created.isoformat() if model.created else None,
        "source": model.source,
        "sha256": model.sha256,
        "folder": str(model.folder),
    }


def _alias_facts(store: ModelFolder, alias: Alias) -> dict[str, Any]:
    model = store.resolve(alias.name)
    own = {"name": tagged_name(alias.name), "modified": alias.created.isoformat(), "stands_for": tagged_name(alias.target)}
    return (_list_facts(model) if model else {}) | own


@options.with_flags(options.setting_flags("engine", "device", "dtype", "weights", "trust_remote_code"))
def show(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A name, a folder or a GGUF file; not given: the default model.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Load the model and show the result of the engine's self-check.")
    ] = True,
    **_flags: Any,
) -> None:
    """Show the properties of a model, and what the engine can do with it."""
    screen = Screen()
    settings = options.read_settings(ctx)
    with show_progress(screen.notes, stays=False) as progress:
        files = models.resolve(settings.model, settings, gguf_support(settings), progress)
        progress.start("reading the model's files", None)
        info = models.describe(files)
        progress.finish()
    alias = _find_alias(settings)
    if as_json:
        found = {"engine": _check(files, settings, screen)} if check else {}
        return screen.write_line(json.dumps(asdict(info) | found | _describe_alias(alias), indent=2))
    if alias is not None:
        _write_alias(screen, alias)
    _write_info(screen, info)
    if check:
        _write_engine(screen, _check(files, settings, screen))
    return None


def _find_alias(settings: Settings) -> Alias | None:
    """The alias or the created model of that name; None for a model with weights of its own, and for a path."""
    try:
        return ModelFolder(settings.models_folder).find_alias(settings.model)
    except ModelNotFound:
        return None


def _describe_alias(alias: Alias | None) -> dict[str, Any]:
    """What differs from the model that it was made from, as plain data; nothing without an alias."""
    if alias is None:
        return {}
    added = {name: value for name, value in asdict(alias.overlay).items() if value}
    return {"name": alias.name, "made_from": alias.target, **added}


def _write_alias(screen: Screen, alias: Alias) -> None:
    """What another name or a created model adds to the model that it was made from."""
    overlay = alias.overlay
    facts = {
        "made from": alias.target,
        "system": overlay.system,
        "parameters": ", ".join(f"{name} {value}" for name, value in overlay.parameters.items()),
        "messages": count(len(overlay.messages)) if overlay.messages else "",
        "template": "its own" if overlay.template else "",
        "license": overlay.license,
    }
    _write_section(screen, alias.name, describe(facts, width=screen.width))


def _check(files: ModelFiles, settings: Settings, screen: Screen) -> dict[str, Any]:
    """Load the model and describe its engine as plain data; of an encoder only what it runs on."""
    if find_kind(files) is not ModelKind.GENERATOR:
        with show_progress(screen.notes, stays=False) as progress:
            encoder = load_encoder(files, settings, progress)
        with closing(encoder):
            return {"runs_on": encoder.engine.describe()}
    with show_progress(screen.notes, stays=False) as progress:
        engine = make_engine(files, settings, progress)
    with closing(engine):
        return {
            "runs_on": engine.describe(),
            "context_tokens": engine.context_tokens,
            "capabilities": asdict(engine.capabilities),
            "groups": [asdict(group) | {"kind": group.kind.value} for group in engine.groups],
            "advice": find_advice(files, engine, settings),
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
    _write_section(screen, info.name, describe(facts, width=screen.width))


def _write_engine(screen: Screen, facts: dict[str, Any]) -> None:
    if "capabilities" not in facts:
        return _write_section(screen, "engine", describe(facts["runs_on"], width=screen.width))
    found, runs_on = facts["capabilities"], facts["runs_on"]
    verdict = {
        "chunking": _yes_or_no(found["can_chunk"]),
        "reuse": _yes_or_no(found["can_reuse"]),
        "reuse limit": f"{found['reuse_limit']:,} tokens" if found["reuse_limit"] else "none",
        "attention": runs_on.get("attention", ""),
        "reason": found["reason"],
    }
    runs_on = {name: value for name, value in runs_on.items() if name != "attention"}
    runs_on["advice"] = facts["advice"]
    _write_section(screen, "engine", describe(runs_on, width=screen.width))
    _write_section(screen, "self-check", describe(verdict, width=screen.width))
    differences = {name: f"{value:.1e}" for name, value in found["differences"].items()}
    _write_section(screen, "largest logit differences to one forward pass", describe(differences))
    rows = [(str(each["index"]), each["kind"], _group_size(each)) for each in facts["groups"]]
    return _write_section(screen, "groups", ["  " + line for line in align(rows)] if rows else [])


def _group_size(group: dict[str, Any]) -> str:
    if group["state_bytes"]:
        return f"{group['state_bytes']:,} bytes a state"
    window = f", window of {group['window']:,} tokens" if group["window"] else ""
    return f"{group['bytes_per_token']:,} bytes a token{window}"


def _write_section(screen: Screen, title: str, lines: Sequence[str]) -> None:
    if lines:
        screen.write_lines([title, *lines, ""])


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


@dataclass(frozen=True)
class RemovedModel:
    """A name that was deleted: the bytes that this freed, and those of its trees that were deleted or kept.

    If the model has other names, its weights and trees stay, and nothing is freed.
    """

    name: str
    freed_bytes: int
    is_alias: bool = False
    trees: dict[str, int] = field(default_factory=dict)
    kept_trees: dict[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names as `bough list` shows them.")],
    yes: options.Yes = False,
    tree: Annotated[
        bool | None, typer.Option("--tree/--keep-tree", help="Delete the trees on disk, too, or keep them.")
    ] = None,
    is_local: options.IsLocal = False,
    as_json: options.AsJsonObject = False,
) -> None:
    """Delete models. A running server unloads them first. If one of the names is unknown, nothing is deleted.

    Their trees on disk stay, unless --tree is given or a person at the terminal says so.
    """
    screen, settings = Screen(), load_settings()
    store = ModelFolder(settings.models_folder)
    names = list(dict.fromkeys(map(plain_name, names)))
    aliases = [name for name in names if store.find(name) is None and store.find_alias(name)]
    found: dict[str, ModelFiles] = {}
    for name in names:
        if name not in aliases:
            if (model := store.find(name)) is None:
                raise ModelNotFound(f"no local model {name!r}; {store.describe()}")
            found[model.name] = model
    if not yes:
        size = filesize.decimal(sum(each.size_bytes for each in found.values()))
        confirm_or_exit(f"delete {', '.join((*aliases, *found))} ({size})")
    trees = [each for each in list_trees(settings.trees_folder) if each.model in found]
    if tree is None:
        size = filesize.decimal(sum(each.nbytes + each.index_bytes for each in trees))
        question = f"delete what is kept on disk for it, too: {', '.join(each.name for each in trees)} ({size})?"
        tree = not yes and bool(trees) and typer.confirm(question, err=True)
    _unload(settings, list(found), is_local)
    removed = [RemovedModel(name, store.remove(name), is_alias=True) for name in aliases]
    removed += [_remove(store, name, [each for each in trees if each.model == name], tree) for name in found]
    if as_json:
        screen.write_line(json.dumps({"models": [asdict(each) for each in removed]}, indent=2))
    else:
        screen.write_lines(line for each in removed for line in _describe_removed(each))
    screen.exit_with([problem for each in removed for problem in each.problems])


def _unload(settings: Settings, names: Sequence[str], is_local: bool) -> None:
    """Let the running server unload these models. Raises Unavailable if one of them is still in use."""
    client = find_client(settings, is_local=is_local)
    if client is None:
        return
    with client:
        for name in set(names) & _read_loaded_names(client):
            client.post("/api/generate", model=name, keep_alive=0, stream=False)
        if in_use := sorted(set(names) & _read_loaded_names(client)):
            raise Unavailable(
                f"the server at {client.url} still answers with {', '.join(in_use)}: try again when it has ended"
            )


def _read_loaded_names(client: Client) -> set[str]:
    return {str(each["name"]).removesuffix(":latest") for each in client.get("/api/ps")["models"]}


def _remove(store: ModelFolder, name: str, trees: Sequence[TreeInfo], removes_trees: bool) -> RemovedModel:
    freed_bytes = store.remove(name)
    if not removes_trees or not freed_bytes:
        return RemovedModel(name, freed_bytes, kept_trees={tree.name: tree.nbytes + tree.index_bytes for tree in trees})
    removed: dict[str, int] = {}
    problems = []
    for tree in trees:
        try:
            removed[tree.name] = remove_tree(tree.folder)
        except DiskError as error:
            problems.append(f"its tree was not deleted: {error}")
    return RemovedModel(name, freed_bytes, trees=removed, problems=tuple(problems))


def _describe_removed(removed: RemovedModel) -> Iterator[str]:
    if removed.is_alias:
        yield f"deleted {removed.name}, which was another name"
        return
    if not removed.freed_bytes:
        yield f"deleted {removed.name}: its weights and its tree stay for its other names"
        return
    yield f"deleted {removed.name} ({filesize.decimal(removed.freed_bytes)})"
    for tree, freed_bytes in removed.trees.items():
        yield f"deleted its tree {tree} ({filesize.decimal(freed_bytes)})"
    for tree, kept_bytes in removed.kept_trees.items():
        yield f"its tree {tree} ({filesize.decimal(kept_bytes)}) stays: `bough cache clear {tree}` deletes it"


def copy(
    source: Annotated[str, typer.Argument(help="A model, or another name of one.")],
    target: Annotated[str, typer.Argument(help="Its new name.")],
    as_json: options.AsJsonObject = False,
) -> None:
    """Give a model another name. It stays one model: it is loaded once and has one tree, whatever it is called."""
    screen, store = Screen(), ModelFolder(load_settings().models_folder)
    alias = store.copy(source, target)
    name, model = (alias.name, alias.target) if alias else (plain_name(target), plain_name(target))
    if as_json:
        return screen.write_line(json.dumps({"name": tagged_name(name), "stands_for": tagged_name(model)}))
    return screen.write_line(f"{tagged_name(name)} stands for {tagged_name(model)}")
