"""`bough doctor` checks the whole installation and says what to do about each problem; `bough version` shows versions.

No model is loaded and nothing is changed, but for a file that is written into each folder and deleted at once. Each check
is a function that yields findings; if it raises an error of Bough or of the system, that is a finding.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich import filesize

import bough
from bough.cache.admin.trees import list_trees
from bough.cache.store import StoreError
from bough.cache.store.format import LEASE
from bough.cli import options
from bough.cli.client import Client, find_client
from bough.cli.terminal.columns import wrap
from bough.cli.terminal.screen import Screen
from bough.config import Settings, find_given, load_settings, read_cluster_secret
from bough.engines.choice import choose_engine, find_installed, is_apple_silicon
from bough.errors import BoughError, KernelsMissing, SettingsError
from bough.models import ModelFiles, ModelFolder, check_weights
from bough.models.files import is_model_path
from bough.models.sources import find_local
from bough.models.weights.gguf_header import read_gguf
from bough.models.weights.packed import read_packed
from bough.runtime import describe_kernels, find_model
from bough.runtime.object_store import UrlStore
from bough.runtime.tiers import describe_full, disk_budget_bytes
from bough.system.announcement import read_announcement
from bough.system.distribution import (
    EXTRAS,
    VERSION,
    find_missing,
    find_strangers,
    install_command,
    reinstall_command,
    repair_command,
)
from bough.system.folders import why_not_writable
from bough.system.resources import default_host_bytes, free_disk_bytes, limit_threads, read_host_memory

Level = Literal["ok", "warning", "problem"]

_LIBRARIES = ("torch", "transformers", "mlx")
_LEVEL_WIDTH = len("problem: ")
_SECRET_SETTINGS = ("api_key",)


@dataclass(frozen=True)
class Finding:
    """One line of the report. `todo` says what to do about a warning or a problem; a problem makes the exit code 1."""

    level: Level
    topic: str
    text: str
    todo: str = ""


Check = Callable[[Settings], Iterable[Finding]]
Model = Annotated[
    str | None, typer.Argument(help="a model that is a GGUF file, to compare with transformers' reading of it")
]


def show_version(as_json: options.AsJsonObject = False) -> None:
    """Show the versions of Bough, Python, and the libraries that run models."""
    screen, found = Screen(), read_versions()
    if as_json:
        return screen.write_line(json.dumps(found, indent=2))
    for name, text in found.items():
        screen.write_line(f"{name} {text or 'not installed'}")
    for each in _check_installation():
        screen.note(f"{each.level}: {each.text}: {each.todo}")
    return None


def read_versions() -> dict[str, str | None]:
    """The versions that matter in a report of a bug; None for what is not installed. No library is imported."""
    libraries: dict[str, str | None] = dict.fromkeys(_LIBRARIES)
    for name in _LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            libraries[name] = version(name)
    return {"bough": VERSION, "python": platform.python_version(), **libraries, "platform": platform.platform()}


def doctor(model: Model = None, as_json: options.AsJsonObject = False) -> None:
    """Check the installation, the folders, the models, the trees and the server, and say what to do about each problem.

    With a model that is a GGUF file, check instead that each of its weights is found where it is in the file, bit by bit
    as transformers reads it. The exit code is 1 if something is broken. No model is loaded.
    """
    screen = Screen()
    findings = list(examine() if model is None else _prove(model))
    is_healthy = not any(each.level == "problem" for each in findings)
    if as_json:
        facts = {"is_healthy": is_healthy, "versions": read_versions(), "findings": [asdict(each) for each in findings]}
        screen.write_line(json.dumps(facts, indent=2))
    else:
        for each in findings:
            text = f"{each.topic}: {each.text}" + (f": {each.todo}" if each.todo else "")
            screen.write_lines(wrap(text, f"{each.level}: ".ljust(_LEVEL_WIDTH), screen.width))
    if not is_healthy:
        raise typer.Exit(1)


def _prove(name: str) -> Iterator[Finding]:
    settings = load_settings()
    files = find_model(name, settings)
    packed = read_packed(files.folder)
    if packed is None:
        reason = (files.table or {}).get("reason") or "its weights are no GGUF file"
        yield Finding("ok", "model", f"{files.name}: there is nothing to compare: {reason}")
        return
    from bough.models.gguf.row_table import prove_rows

    proof = prove_rows(read_gguf(packed.files[0].path), packed)
    if proof.wrong:
        text = f"{len(proof.wrong)} weights of {files.name} are not as transformers reads them, such as {proof.wrong[0]}"
        yield Finding("problem", "model", text, f"`bough rm {files.name}`, then use the file again")
    else:
        text = f"{proof.num_equal:,} rows of {len(packed.tensors)} weights of {files.name} are, bit by bit, as transformers"
        yield Finding("ok", "model", f"{text} reads them")


def examine() -> Iterator[Finding]:
    """All findings, in the order of the report. If the settings cannot be read, the others are for the defaults."""
    yield Finding("ok", "version", ", ".join(f"{name} {text}" for name, text in read_versions().items() if text))
    yield from _check_installation()
    try:
        settings = load_settings()
    except SettingsError as error:
        yield Finding("problem", "settings", str(error), "correct it; the rest of this report is for the default settings")
        settings = Settings()
    for topic, check in _CHECKS.items():
        try:
            yield from check(settings)
        except (BoughError, OSError) as error:
            yield Finding("problem", topic, str(error))


def _check_installation() -> Iterator[Finding]:
    """Other distributions called `bough`, and files of theirs where Bough's own should be."""
    strangers = find_strangers()
    for each in strangers:
        yield Finding("problem", "installation", each, repair_command())
    if not strangers and "load" not in getattr(bough, "__all__", ()):
        text = f"{Path(__file__).parents[1] / '__init__.py'} is not the file that Bough has there"
        yield Finding("problem", "installation", text, reinstall_command())


def _check_settings(settings: Settings) -> Iterator[Finding]:
    try:
        given = find_given()
    except SettingsError:
        return  # reported already
    for name, each in given.items():
        value = "…" if name in _SECRET_SETTINGS else each.value
        if getattr(settings, name) != getattr(Settings(), name):
            yield Finding("ok", "settings", f"{name} is {value} ({each.words})")
    if settings.keys_file is not None:
        from bough.server.http.keys import ApiKeys

        ApiKeys(settings.keys_file)
        yield Finding("ok", "settings", f"the keys in {settings.keys_file} can be read")


def _check_engine(settings: Settings) -> Iterator[Finding]:
    try:
        chosen = choose_engine(settings)
    except BoughError as error:
        yield Finding("problem", "engine", str(error))
        return
    try:
        text = _describe_torch() if chosen == "torch" else f"device: {importlib.import_module('mlx.core').default_device()}"
    except Exception as error:  # a broken library may raise anything when it is imported
        yield Finding("problem", "engine", f"{chosen} cannot be imported ({error!r})", install_command(chosen))
        return
    if settings.engine != "auto":
        reason = f"engine is {settings.engine}"
    elif len(find_installed()) == 1:
        reason = "it is the only one that is installed"
    else:
        reason = f"both are installed, and it is preferred on {'Apple silicon' if is_apple_silicon() else 'this machine'}"
    yield Finding("ok", "engine", f"{chosen} would run models, because {reason}; {text}")
    if chosen == "torch":
        yield from _check_kernels(settings)


def _describe_torch() -> str:
    import torch

    if not torch.cuda.is_available():
        mps = "yes" if torch.backends.mps.is_available() else "no"
        return f"cuda: no, mps: {mps}, {torch.get_num_threads()} threads by default"
    name, total_bytes = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    return f"cuda: yes, {torch.cuda.device_count()} device(s), the first is {name} with {filesize.decimal(total_bytes)}"


def _check_kernels(settings: Settings) -> Iterator[Finding]:
    import torch

    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    if settings.device != "cpu" and (settings.device != "auto" or has_gpu):
        return
    num_threads = settings.threads or limit_threads(torch.get_num_threads())
    try:
        yield Finding("ok", "kernels", f"{describe_kernels()}, for {num_threads} threads")
    except KernelsMissing as missing:
        yield Finding("warning", "kernels", f"none: {missing.reason}", missing.todo)


def _check_machine(settings: Settings) -> Iterator[Finding]:
    found = read_host_memory()
    threads = f"{settings.threads} (threads)" if settings.threads else "chosen by the engine"
    num_cores = os.cpu_count() or 1
    usable = limit_threads(num_cores)
    cores = f"{num_cores} cores" + ("" if usable == num_cores else f", of which a control group allows {usable}")
    memory = f"{filesize.decimal(found.available_bytes)} of {filesize.decimal(found.total_bytes)} memory"
    text = f"{memory} are available, {cores}"
    yield Finding("ok", "machine", f"{text}, threads: {threads}")


def _check_folders(settings: Settings) -> Iterator[Finding]:
    data, cache = settings.data_folder, settings.cache_folder
    if problem := why_not_writable(data):
        yield Finding("warning", "data folder", f"{data} cannot be written ({problem})", "models cannot be pulled there")
    else:
        yield Finding("ok", "data folder", f"{data}, {filesize.decimal(free_disk_bytes(data))} free")
    if problem := why_not_writable(cache):
        todo = "nothing is kept on disk, and commands do not find a server; make it writable, or set cache_folder"
        yield Finding("warning", "cache folder", f"{cache} cannot be written ({problem})", todo)
    elif settings.disk is None and not disk_budget_bytes(settings):
        yield Finding("warning", "cache folder", describe_full(settings), "nothing is kept on disk until there is room")
    else:
        yield Finding("ok", "cache folder", f"{cache}, {filesize.decimal(free_disk_bytes(cache))} free")


def _check_budgets(settings: Settings) -> Iterator[Finding]:
    device = (
        "is derived when a model is loaded" if settings.device_memory is None else filesize.decimal(settings.device_memory)
    )
    host = filesize.decimal(default_host_bytes() if settings.host_memory is None else settings.host_memory)
    disk = filesize.decimal(disk_budget_bytes(settings))
    host += " (only beside a GPU with memory of its own)"
    yield Finding("ok", "budgets", f"device_memory {device}; host_memory {host}; disk {disk}")


def _check_models(settings: Settings) -> Iterator[Finding]:
    store = ModelFolder(settings.models_folder)
    found = store.list()
    known = {model.folder.name for model in found}
    for model in found:
        if problem := _find_damage(model):
            yield Finding("problem", "models", f"{model.name}: {problem}", f"`bough rm {model.name}`, then pull it again")
        else:
            yield Finding("ok", "models", f"{model.name}, {filesize.decimal(model.size_bytes)}")
    for folder in sorted(store.folder.glob("[!.]*/")):
        if folder.name not in known:
            text = f"{folder} is no model: its bough.json cannot be read"
            yield Finding("warning", "models", text, "delete the folder, and pull the model again")
    if not is_model_path(Path(settings.model).expanduser()) and find_local(store, settings.model) is None:
        todo = f"`bough pull {settings.model}` fetches it, and so does the first use"
        yield Finding("warning", "models", f"the model {settings.model} (model) is not here", todo)


def _find_damage(model: ModelFiles) -> str:
    """Why a model's files cannot be used, as far as their headers show; "" if they can."""
    try:
        if not model.config:
            return "its config.json is empty"
        check_weights(model)
    except (BoughError, OSError) as error:
        return str(error)
    return "" if model.has_tokenizer else "it has no tokenizer"


def _check_trees(settings: Settings) -> Iterator[Finding]:
    for tree in list_trees(settings.trees_folder):
        size = filesize.decimal(tree.nbytes + tree.index_bytes)
        if tree.problem:
            todo = f"`bough cache clear {tree.name}` deletes it"
            yield Finding("warning", "trees", f"{tree.name} ({size}): {tree.problem}", todo)
        else:
            user = f", in use by process {tree.owner_pid}" if tree.owner_pid is not None else ""
            yield Finding("ok", "trees", f"{tree.name} of {tree.model}, {size}{user}")


def _check_server(settings: Settings) -> Iterator[Finding]:
    announcement, client = read_announcement(settings.cache_folder), find_client(settings)
    if client is None and announcement is not None:
        text = f"process {announcement.pid} announced one at {announcement.url}, but does not answer"
        yield Finding("warning", "server", text, "it may be starting or stuck; commands do not use it")
    elif client is None:
        yield Finding("ok", "server", "none is running with this cache folder")
    else:
        with client:
            yield from _check_health(client)


def _check_health(client: Client) -> Iterator[Finding]:
    try:
        health: dict[str, Any] = client.get("/health")
    except BoughError as error:
        yield Finding("warning", "server", f"{client.url} runs, and takes no requests now ({error})", "try again")
        return
    models = f", with {', '.join(health['models']) or 'no model'} loaded" if "models" in health else ""
    yield Finding("ok", "server", f"{client.url} runs{models}")
    if health["disk"] not in ("ok", "off"):
        reason = health.get("disk_problem", "set api_key to see why")
        if health["disk"] == "read-only":
            reason += "; end what uses the tree, then `bough stop`: the next request opens it again"
        yield Finding("warning", "server", f"what it computes is not saved to disk: {health['disk']}", reason)


def _check_extras(settings: Settings) -> Iterator[Finding]:
    for extra in EXTRAS:
        if missing := find_missing(extra):
            level: Level = "warning" if extra == "server" else "ok"
            yield Finding(level, "extras", f"{', '.join(missing)} not installed", install_command(extra))
    for engine in sorted({"torch", "mlx"} - find_installed()):
        yield Finding("ok", "extras", f"the engine {engine} is not installed", install_command(engine))


def _check_store(settings: Settings) -> Iterator[Finding]:
    """Whether the store that machines share answers: an object that is not there is asked for."""
    if not settings.store:
        return
    read_cluster_secret(settings)
    try:
        held = UrlStore(settings.store).head(LEASE)
    except StoreError as error:
        yield Finding("problem", "store", f"{settings.store} does not answer: {error}", "requests go on without it")
        return
    used = "is in use" if held is not None else "was not swept yet"
    yield Finding("ok", "store", f"{settings.store} answers, and {used}")


_CHECKS: dict[str, Check] = {
    "settings": _check_settings,
    "engine": _check_engine,
    "machine": _check_machine,
    "folders": _check_folders,
    "budgets": _check_budgets,
    "models": _check_models,
    "trees": _check_trees,
    "store": _check_store,
    "server": _check_server,
    "extras": _check_extras,
}
