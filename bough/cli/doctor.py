"""`bough doctor` looks at the whole installation and says what is wrong and what to do; `bough version` tells versions.

No model is loaded and nothing is changed, but for a file that is written into each folder and deleted at once. Each check
is a function that yields findings; one that fails by an error of Bough or of the system becomes a finding itself.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import typer
from rich import filesize

import bough
from bough.cache.admin.trees import list_trees
from bough.cache.store import StoreError
from bough.cache.store.paths import LEASE
from bough.cli import options
from bough.cli.client import Client, find_client
from bough.cli.terminal.columns import memory, wrap
from bough.cli.terminal.screen import Screen
from bough.config import Settings, find_given, load_settings, read_cluster_secret
from bough.engines.choice import choose_engine, find_installed, is_apple_silicon
from bough.errors import BoughError, KernelsMissing, SettingsError
from bough.models import ModelFiles, Store, why_not_packed
from bough.models.info import count_parameters
from bough.models.store import plain_name
from bough.runtime import describe_kernels, gguf_support
from bough.runtime.object_store import UrlStore
from bough.runtime.tiers import describe_full, disk_budget_bytes
from bough.system.announcement import read_announcement
from bough.system.distribution import VERSION, find_wrong_distributions, install_command, reinstall_command, repair_command
from bough.system.folders import why_not_writable
from bough.system.resources import default_host_bytes, free_disk_bytes, limit_threads, read_host_memory

Level = Literal["ok", "warning", "problem"]

_LIBRARIES = ("torch", "transformers", "mlx")
_EXTRAS = {
    "server": ("fastapi", "prometheus_client", "pydantic", "uvicorn"),
    "bench": ("matplotlib",),
    "store": ("obstore",),
}
_LEVEL_WIDTH = len("problem: ")
_SECRET_SETTINGS = ("api_key", "store_secret")


@dataclass(frozen=True)
class Finding:
    """One line of the report. `todo` says what to do about a warning or a problem; a problem makes the exit code 1."""

    level: Level
    topic: str
    text: str
    todo: str = ""


Check = Callable[[Settings], Iterable[Finding]]


def tell_version(as_json: options.AsJsonObject = False) -> None:
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
    libraries = {name: _version_of(name) for name in _LIBRARIES}
    return {"bough": VERSION, "python": platform.python_version(), **libraries, "platform": platform.platform()}


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def doctor(as_json: options.AsJsonObject = False) -> None:
    """Check the installation, the folders, the models, the trees and the server, and say what to do about each problem.

    The exit code is 1 if something is broken. No model is loaded.
    """
    screen = Screen()
    findings = list(examine())
    is_healthy = not any(each.level == "problem" for each in findings)
    if as_json:
        facts = {"is_healthy": is_healthy, "versions": read_versions(), "findings": [asdict(each) for each in findings]}
        screen.write_line(json.dumps(facts, indent=2))
    else:
        for line in (line for each in findings for line in _describe(each, screen.width)):
            screen.write_line(line)
    if not is_healthy:
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """All findings, in the order of the report. If the settings cannot be read, the others are those of the defaults."""
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
    wrong = find_wrong_distributions()
    for each in wrong:
        yield Finding("warning" if each.is_ours else "problem", "installation", str(each), repair_command())
    if not wrong and "load" not in getattr(bough, "__all__", ()):
        text = f"{Path(__file__).parents[1] / '__init__.py'} is not the file that Bough has there"
        yield Finding("problem", "installation", text, reinstall_command())


def _describe(finding: Finding, width: int | None) -> list[str]:
    text = f"{finding.topic}: {finding.text}" + (f": {finding.todo}" if finding.todo else "")
    return wrap(text, f"{finding.level}: ".ljust(_LEVEL_WIDTH), width)


def _check_settings(settings: Settings) -> Iterator[Finding]:
    try:
        given = find_given()
    except SettingsError:
        return  # told already
    for name, each in given.items():
        value = "…" if name in _SECRET_SETTINGS else each.value
        if each.is_old_name:
            new_name = f"BOUGH_{name.upper()}" if each.source == "variable" else name
            yield Finding("warning", "settings", f"{each.words} is an old name", f"write {new_name} instead")
        if getattr(settings, name) != getattr(Settings(), name):
            yield Finding("ok", "settings", f"{name} is {value} ({each.words})")
    if settings.keys_file is not None:
        yield from _check_keys(settings.keys_file)


def _check_keys(file: Path) -> Iterator[Finding]:
    from bough.server.http.keys import Keys

    Keys(file)
    yield Finding("ok", "settings", f"the keys in {file} can be read")


def _check_engine(settings: Settings) -> Iterator[Finding]:
    installed = sorted(find_installed())
    try:
        chosen = choose_engine(settings)
    except BoughError as error:
        yield Finding("problem", "engine", str(error))
        return
    try:
        text = _describe_torch() if chosen == "torch" else _describe_mlx()
    except Exception as error:  # whatever a library raises when it is imported: that is what we want to know
        yield Finding("problem", "engine", f"{chosen} cannot be imported ({error!r})", install_command(chosen))
        return
    yield Finding("ok", "engine", f"{chosen} would run models, because {_why(settings, installed)}; {text}")
    if chosen == "torch":
        yield from _check_kernels(settings)


def _why(settings: Settings, installed: list[str]) -> str:
    if settings.engine != "auto":
        return f"engine is {settings.engine}"
    if len(installed) == 1:
        return "it is the only one that is installed"
    where = "Apple silicon" if is_apple_silicon() else "this machine"
    return f"both are installed, and it is preferred on {where}"


def _describe_torch() -> str:
    import torch

    if not torch.cuda.is_available():
        mps = "yes" if torch.backends.mps.is_available() else "no"
        return f"cuda: no, mps: {mps}, {torch.get_num_threads()} threads by default"
    name, total_bytes = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    return f"cuda: yes, {torch.cuda.device_count()} device(s), the first is {name} with {memory(total_bytes)}"


def _check_kernels(settings: Settings) -> Iterator[Finding]:
    """The kernels for CPUs, if torch would run models on one."""
    if not _runs_on_cpu(settings):
        return
    import torch

    num_threads = settings.threads or limit_threads(torch.get_num_threads())
    try:
        yield Finding("ok", "kernels", f"{describe_kernels()}, for {num_threads} threads")
    except KernelsMissing as missing:
        yield Finding("warning", "kernels", f"none: {missing.reason}", missing.todo)


def _runs_on_cpu(settings: Settings) -> bool:
    """Whether torch, which would run models, would do so on the CPU; False if it cannot be imported."""
    try:
        import torch
    except Exception:  # whatever it raises: the finding on the engine tells it
        return False
    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    return settings.device == "cpu" or (settings.device == "auto" and not has_gpu)


def _describe_mlx() -> str:
    device = importlib.import_module("mlx.core").default_device()
    return f"device: {device}"


def _check_machine(settings: Settings) -> Iterator[Finding]:
    found = read_host_memory()
    threads = f"{settings.threads} (threads)" if settings.threads else "chosen by the engine"
    text = f"{memory(found.available_bytes)} of {memory(found.total_bytes)} memory are available, {_describe_cores()}"
    yield Finding("ok", "machine", f"{text}, threads: {threads}")


def _describe_cores() -> str:
    num_cores = os.cpu_count() or 1
    usable = limit_threads(num_cores)
    return f"{num_cores} cores" if usable == num_cores else f"{num_cores} cores, of which a control group allows {usable}"


def _check_folders(settings: Settings) -> Iterator[Finding]:
    data, cache = settings.data_folder, settings.cache_folder
    free = {folder: filesize.decimal(free_disk_bytes(folder)) for folder in (data, cache)}
    if problem := why_not_writable(data):
        yield Finding("warning", "data folder", f"{data} cannot be written ({problem})", "models cannot be pulled there")
    else:
        yield Finding("ok", "data folder", f"{data}, {free[data]} free")
    if problem := why_not_writable(cache):
        todo = "nothing is kept on disk, and commands do not find a server; make it writable, or set cache_folder"
        yield Finding("warning", "cache folder", f"{cache} cannot be written ({problem})", todo)
    elif settings.disk is None and not disk_budget_bytes(settings):
        yield Finding("warning", "cache folder", describe_full(settings), "nothing is kept on disk until there is room")
    else:
        yield Finding("ok", "cache folder", f"{cache}, {free[cache]} free")


def _check_budgets(settings: Settings) -> Iterator[Finding]:
    device = "is derived when a model is loaded" if settings.device_memory is None else memory(settings.device_memory)
    host = memory(default_host_bytes() if settings.host_memory is None else settings.host_memory)
    disk = filesize.decimal(disk_budget_bytes(settings))
    host += " (only beside a GPU with memory of its own)"
    yield Finding("ok", "budgets", f"device_memory {device}; host_memory {host}; disk {disk}")


def _check_models(settings: Settings) -> Iterator[Finding]:
    store = Store(settings.models_folder)
    found = store.list()
    known = {model.folder.name for model in found}
    packs = gguf_support(settings).packs and _runs_on_cpu(settings)
    for model in found:
        if problem := _find_damage(model):
            yield Finding("problem", "models", f"{model.name}: {problem}", f"`bough rm {model.name}`, then pull it again")
        else:
            yield Finding("ok", "models", f"{model.name}, {filesize.decimal(model.size_bytes)}")
            yield from _check_packed(model) if packs else ()
    children = sorted(store.folder.iterdir()) if store.folder.is_dir() else []
    for folder in (each for each in children if each.is_dir() and each.name not in known and not each.name.startswith(".")):
        text = f"{folder} is no model: its bough.json cannot be read"
        yield Finding("warning", "models", text, "delete the folder, and pull the model again")
    if not _is_here(settings.model, store):
        todo = f"`bough pull {settings.model}` fetches it, and so does the first use"
        yield Finding("warning", "models", f"the model {settings.model} (model) is not here", todo)


def _check_packed(model: ModelFiles) -> Iterator[Finding]:
    """Packed weights that are damaged, or that an earlier version did not keep."""
    try:
        why_not = why_not_packed(model)
    except BoughError as error:
        yield Finding("problem", "models", f"{model.name}: {error}")
        return
    if why_not:
        yield Finding("warning", "models", f"{why_not}; until then it takes more memory and is slower")


def _find_damage(model: ModelFiles) -> str:
    """Why a model's files cannot be used, as far as their headers tell; "" if they can."""
    try:
        if not model.config:
            return "its config.json is empty"
        if not model.weights:
            return "it has no weights"
        count_parameters(model)
    except (BoughError, OSError, ValueError, KeyError, TypeError) as error:
        return str(error)
    return "" if model.has_tokenizer else "it has no tokenizer"


def _is_here(name: str, store: Store) -> bool:
    if Path(name).expanduser().exists():
        return True
    return any(model.name == plain_name(name) for model in store.list())


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
    for extra, packages in _EXTRAS.items():
        missing = [package for package in packages if find_spec(package) is None]
        if missing:
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
