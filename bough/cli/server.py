"""Commands on a server: `bough serve` runs one; `bough ps` and `stop` ask a running one."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Self

import typer
from rich import filesize
from rich.console import Console

from bough.cli import options
from bough.cli.client import Client, find_client, find_url, local_url
from bough.cli.logs import log_name
from bough.cli.terminal.columns import ahead, align
from bough.cli.terminal.progress import Bars, Lines
from bough.cli.terminal.screen import Screen
from bough.config import Settings, limit_thread_spinning, load_settings
from bough.errors import BoughError
from bough.runtime import find_model
from bough.system.announcement import Announcement, announcing, make_announcement
from bough.system.distribution import VERSION, find_missing, install_command

log = logging.getLogger(__name__)

_APIS = "Ollama, OpenAI, Anthropic"
_PS_HEADER = ("NAME", "SIZE", "ENGINE", "DEVICE", "CONTEXT", "LANES", "TREE", "UNTIL")
_FOR_EVER_YEARS = 100


@options.with_flags(options.command_flags("serve"))
def serve(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Option("--model", "-m", help="The model to load at the start.")] = None,
    **_flags: Any,
) -> None:
    """Serve models over HTTP, with the APIs of Ollama, OpenAI and Anthropic, until Ctrl-C."""
    run_server(options.read_settings(ctx), Screen())


def run_server(settings: Settings, screen: Screen) -> None:
    """Serve until a signal ends the process. Raises BoughError if the server cannot start."""
    if missing := find_missing("server"):
        raise BoughError(f"{', '.join(missing)} not installed: {install_command('server')}")
    if settings.engine != "mlx":
        limit_thread_spinning()  # before OpenMP is loaded with torch's library
    from bough.server.app import make_app, make_service
    from bough.server.http.listening import bind, host, is_loopback, url_of
    from bough.server.log_format import set_up_logs, writing_log_file

    notes = screen.notes
    with bind(settings.host, settings.port) as bound, _LoadProgress(notes) as progress, ExitStack() as held:
        is_coloured = notes.is_terminal and not notes.no_color
        set_up_logs(as_json=settings.log_json, is_terminal=notes.is_terminal, has_colours=is_coloured)
        try:
            file = settings.logs_folder / log_name(bound.getsockname()[1])
            held.enter_context(writing_log_file(file, as_json=settings.log_json))
        except OSError as error:
            log.warning("there is no log file, and `bough logs` shows nothing of this server: %s", error)
        files = find_model(settings.model, settings, progress, lambda plan: screen.note(f"fetching {plan.describe()}"))
        start = held.enter_context(_replicas(settings, files.name)) if settings.ray else None
        service = make_service(settings, files, progress, start)
        app, url = make_app(service.settings, service), url_of(bound)
        if not is_loopback(bound) and settings.keys_file is None:
            screen.note(describe_exposure(url, settings.allowed_hosts))
        app.state.announcement = make_announcement(local_url(url))
        problem = announce(held, settings.cache_folder, app.state.announcement)

        def note_ready() -> None:
            progress.end()
            if problem and not service.health.disk_problem:  # which is in the log already, and has the same cause
                log.warning("%s", problem)
            screen.note(f"bough {VERSION} serves {files.name} at {url} ({_APIS}); Ctrl-C ends")

        host(app, service.settings, service, bound, note_ready)


@contextmanager
def _replicas(settings: Settings, model: str) -> Iterator[Any]:
    """Yield the call that starts the model on Ray, in place of loading it here. Raises BoughError without Ray."""
    try:
        from bough.ray.app import connected
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise BoughError(f"ray is not installed: {install_command('ray')}") from error
    with connected(settings, model) as start:
        yield start


def describe_exposure(url: str, allowed_hosts: str) -> str:
    """A warning for a server without keys that other machines reach, and what to add."""
    note = f"warning: anyone who can reach {url} can use this server; --keys-file admits only clients with a key"
    names = "by its address, not by a name: add --allowed-hosts host.docker.internal for containers"
    return note if allowed_hosts else f"{note}. Without keys other machines reach it {names}"


def announce(held: ExitStack, folder: Path, announcement: Announcement) -> str:
    """Announce the server in the cache folder until `held` is closed. Returns why that was not possible, or ""."""
    try:
        held.enter_context(announcing(folder, announcement))
    except OSError as error:
        reason = error.strerror or error
        return f"the cache folder {folder} cannot be written: {reason}; other commands need --url to find this server"
    return ""


class _LoadProgress:
    """Progress of fetching and loading: bars on a terminal until the server is ready, lines in the log otherwise."""

    def __init__(self, console: Console) -> None:
        self._lines = Lines(lambda line: log.info("loading: %s", line))
        self._shown: Bars | Lines = Bars(console, stays=False) if console.is_terminal else self._lines

    def start(self, label: str, total_bytes: int | None) -> None:
        self._shown.start(label, total_bytes)

    def advance(self, num_bytes: int) -> None:
        self._shown.advance(num_bytes)

    def finish(self) -> None:
        self._shown.finish()

    def end(self) -> None:
        """Stop drawing: later progress goes to the log."""
        self._shown.finish()
        self._shown = self._lines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _find_server(url: str | None) -> Client:
    """A client of the server at `url`, of the one that runs here, or else of the one at the settings host and port."""
    settings = load_settings()
    return find_client(settings, url) or Client(find_url(settings), settings.api_key)


def ps(as_json: options.AsJson = False, url: options.Url = None) -> None:
    """List the models that the server has loaded."""
    screen = Screen()
    with _find_server(url) as client:
        loaded = read_loaded(client)
        server = client.url
    if as_json:
        screen.write_line(json.dumps(loaded, indent=2))
    elif loaded:
        rows = [row for each in loaded for row in _ps_rows(each)]
        screen.write_lines(align([_PS_HEADER, *rows], screen.width))
    else:
        screen.note(f"no model is loaded at {server}")


def read_loaded(client: Client) -> list[dict[str, Any]]:
    """The loaded models of the server, each with the size of its tree."""
    trees = {each["model"]: each for each in client.get("/api/cache")["models"]}
    models = client.get("/api/ps")["models"]
    return [_ps_facts(each, trees.get(each["name"].removesuffix(":latest"), {})) for each in models]


def _ps_facts(model: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    until = datetime.fromisoformat(model["expires_at"])
    stays = until.year > datetime.now(UTC).year + _FOR_EVER_YEARS
    replicas = tree.get("replicas", {})
    return {
        "name": model["name"],
        "size_bytes": model["size"],
        "engine": model["engine"],
        "device": "GPU" if model["size_vram"] else "CPU",
        "weights": model.get("weights", ""),
        "step": model.get("step", ""),
        "context_tokens": model["context_length"],
        **_tree_facts(tree),
        **({"replicas": {name: _tree_facts(own) for name, own in replicas.items()}} if replicas else {}),
        "until": None if stays else until.isoformat(),
    }


def _tree_facts(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        "lanes": tree.get("lanes"),
        "busy_lanes": tree.get("busy_lanes"),
        "waiting": tree.get("queue"),
        "tree_tokens": tree.get("tokens"),
        "tree_bytes": tree.get("tree_bytes"),
    }


def _ps_rows(facts: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    until = "for ever" if facts["until"] is None else ahead(datetime.fromisoformat(facts["until"]))
    size = filesize.decimal(facts["size_bytes"])
    context = f"{facts['context_tokens']:,}"
    yield (facts["name"], size, facts["engine"], facts["device"], context, *_describe_tree(facts), until)
    for name, own in facts.get("replicas", {}).items():
        yield (f"  {name}", "", "", "", "", *_describe_tree(own), "")


def _describe_tree(facts: dict[str, Any]) -> tuple[str, str]:
    lanes = "" if facts["lanes"] is None else f"{facts['busy_lanes']} of {facts['lanes']} busy"
    tokens = facts["tree_tokens"]
    return lanes, "" if tokens is None else f"{tokens:,} tokens, {filesize.decimal(facts['tree_bytes'])}"


def stop(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Names as `bough ps` shows them; not given: all.")
    ] = None,
    as_json: options.AsJson = False,
    url: options.Url = None,
) -> None:
    """Unload models from the server. A model in use is unloaded when its last answer ends."""
    screen = Screen()
    with _find_server(url) as client:
        names = models or [str(each["name"]) for each in client.get("/api/ps")["models"]]
        for name in names:
            client.post("/api/generate", model=name, keep_alive=0, stream=False)
    if as_json:
        return screen.write_line(json.dumps({"stopped": names}))
    screen.write_lines(f"stopped {name}" for name in names)
    return None if names else screen.note("no model is loaded")
