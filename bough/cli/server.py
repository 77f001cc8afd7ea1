"""Commands on a server: `bough serve` runs one; `bough ps`, `stop`, `tree` and `explain` ask a running one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich import filesize

from bough.cli import options
from bough.cli.client import Client
from bough.cli.prompt_args import read_prompt_args
from bough.cli.terminal.columns import ahead, align, describe, memory
from bough.cli.terminal.progress import show_progress
from bough.cli.terminal.screen import Screen
from bough.config import Settings, load_settings
from bough.errors import BoughError
from bough.runner import find_model
from bough.system.announcement import announcing, make_announcement

_APIS = "Ollama, OpenAI, Anthropic"
_EXTRAS = ("fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn")
_PS_HEADER = ("NAME", "SIZE", "ENGINE", "DEVICE", "CONTEXT", "LANES", "TREE", "UNTIL")
_FOR_EVER_YEARS = 100
_SHOWN_BRANCHES = 4


def serve(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Option("--model", "-m", help="The model to load at the start.")] = None,
    host: options.Host = None,
    port: options.Port = None,
    keys_file: options.KeysFile = None,
    origins: options.Origins = None,
    allowed_hosts: options.AllowedHosts = None,
    keep_alive: options.KeepAlive = None,
    max_models: options.MaxModels = None,
    queue: options.Queue = None,
    request_timeout: options.RequestTimeout = None,
    watchdog: options.Watchdog = None,
    stop_after: options.StopAfter = None,
    max_body: options.MaxBody = None,
    rate_limit: options.RateLimit = None,
    verify_cache: options.VerifyCache = None,
    sort_tools: options.SortTools = None,
    log_json: options.LogJson = None,
    max_tokens: options.AnswerTokens = None,
    loop_guard: options.LoopGuard = None,
    lanes: options.Lanes = None,
    context: options.Context = None,
    threads: options.Threads = None,
    engine: options.Engine = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    attention: options.Attention = None,
    device_memory: options.DeviceMemory = None,
    host_memory: options.HostMemory = None,
    disk: options.Disk = None,
    disk_free: options.DiskFree = None,
    disk_ttl: options.DiskTTL = None,
    salt_share: options.SaltShare = None,
    cache: options.Cache = None,
    trust_remote_code: options.TrustRemoteCode = None,
) -> None:
    """Serve models over HTTP, with the APIs of Ollama, OpenAI and Anthropic, until Ctrl-C."""
    run_server(load_settings(options.settings_of(ctx)), Screen())


def run_server(settings: Settings, screen: Screen) -> None:
    """Serve until a signal ends the process. Raises BoughError if the server cannot start."""
    _require_extras()
    from bough.server.app import make_app, make_service
    from bough.server.http.listening import bind, host, is_loopback, url_of
    from bough.server.http.logs import set_up_logs

    with bind(settings.host, settings.port) as bound:
        with show_progress(screen.notes, stays=False) as progress:
            files = find_model(settings.model, settings, progress)
        set_up_logs(as_json=settings.log_json)
        service = make_service(settings, files)
        url = url_of(bound)
        if not is_loopback(bound) and settings.keys_file is None:
            screen.note(
                f"warning: anyone who can reach {url} can use this server; --keys-file admits only clients with a key"
            )
        ready = f"bough {version('bough')} serves {files.name} at {url} ({_APIS}); Ctrl-C ends"
        app = make_app(service.settings, service)
        app.state.announcement = make_announcement(url)
        with announcing(settings.cache_folder, app.state.announcement):
            host(app, service.settings, service, bound, lambda: screen.note(ready))


def _require_extras() -> None:
    """Raise BoughError, with the command to install it, if a package of the server is missing."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        raise BoughError(f"{error.name} is not installed: pip install 'bough[server]'") from error


def ps(as_json: options.AsJson = False, url: options.Url = None) -> None:
    """List the models that the server has loaded."""
    screen = Screen()
    with Client(load_settings(), url) as client:
        loaded = read_loaded(client)
        server = client.url
    if as_json:
        screen.write_line(json.dumps(loaded, indent=2))
    elif loaded:
        for line in align([_PS_HEADER, *map(_ps_row, loaded)]):
            screen.write_line(line)
    else:
        screen.note(f"no model is loaded at {server}")


def read_loaded(client: Client) -> list[dict[str, Any]]:
    """The loaded models of the server, each with the size of its tree."""
    trees = {each["model"]: each for each in client.get("/api/cache")["models"]}
    return [_ps_facts(each, trees.get(each["name"], {})) for each in client.get("/api/ps")["models"]]


def _ps_facts(model: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    until = datetime.fromisoformat(model["expires_at"])
    stays = until.year > datetime.now(UTC).year + _FOR_EVER_YEARS
    return {
        "name": model["name"],
        "size_bytes": model["size"],
        "engine": model["engine"],
        "device": "GPU" if model["size_vram"] else "CPU",
        "context_tokens": model["context_length"],
        "lanes": tree.get("lanes"),
        "busy_lanes": tree.get("busy_lanes"),
        "waiting": tree.get("queue"),
        "tree_tokens": tree.get("tokens"),
        "tree_bytes": tree.get("tree_bytes"),
        "until": None if stays else until.isoformat(),
    }


def _ps_row(facts: dict[str, Any]) -> tuple[str, ...]:
    lanes = "" if facts["lanes"] is None else f"{facts['busy_lanes']} of {facts['lanes']} busy"
    tokens = facts["tree_tokens"]
    tree = "" if tokens is None else f"{tokens:,} tokens, {memory(facts['tree_bytes'])}"
    until = "for ever" if facts["until"] is None else ahead(datetime.fromisoformat(facts["until"]))
    size = filesize.decimal(facts["size_bytes"])
    context = f"{facts['context_tokens']:,}"
    return (facts["name"], size, facts["engine"], facts["device"], context, lanes, tree, until)


def stop(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Names as `bough ps` shows them; not given: all.")
    ] = None,
    as_json: options.AsJson = False,
    url: options.Url = None,
) -> None:
    """Unload models from the server. A model in use is unloaded when its last answer ends."""
    screen = Screen()
    with Client(load_settings(), url) as client:
        names = models or [str(each["name"]) for each in client.get("/api/ps")["models"]]
        for name in names:
            client.post("/api/generate", model=name, keep_alive=0, stream=False)
    if as_json:
        return screen.write_line(json.dumps({"stopped": names}))
    for name in names:
        screen.write_line(f"stopped {name}")
    return None if names else screen.note("no model is loaded")


def tree(
    model: Annotated[str | None, typer.Argument(help="A model; not given: the server's default.")] = None,
    salt: Annotated[str | None, typer.Option(help="Only the tree of this salt.")] = None,
    as_json: options.AsJson = False,
    url: options.Url = None,
) -> None:
    """Draw the tree: each edge with its text and its tier, what is kept and what is in use."""
    screen = Screen()
    with Client(load_settings(), url) as client:
        if as_json:
            found = client.get("/api/cache/tree", model=model, salt=salt)
            return screen.write_line(json.dumps(found, indent=2, ensure_ascii=False))
        return screen.write_line(client.get_text("/api/cache/tree", model=model, salt=salt, format="text"))


def explain(
    first: Annotated[str | None, typer.Argument(metavar="MODEL", help="A model; not given: the server's default.")] = None,
    rest: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="The prompt, with - for standard input.", show_default=False),
    ] = None,
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Take the prompt as it is, without the chat template.")] = False,
    as_json: options.AsJson = False,
    url: options.Url = None,
) -> None:
    """Show how much of a prompt is cached, and where it diverges from the tree."""
    args = read_prompt_args([word for word in (first, *(rest or ())) if word], model, sys.stdin)
    if not args.prompt:
        raise typer.BadParameter("there is no prompt to explain")
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, and --raw does not use it")
    screen = Screen()
    with Client(load_settings(), url) as client:
        found = client.post("/api/cache/explain", model=args.model, prompt=args.prompt, system=system, raw=raw)
    if as_json:
        return screen.write_line(json.dumps(found, indent=2, ensure_ascii=False))
    for line in _explain_lines(found):
        screen.write_line(line)
    return None


def _explain_lines(found: dict[str, Any]) -> Iterator[str]:
    """The explanation as lines of text."""
    yield f"{found['model']}: {found['reason']}"
    facts = {name: f"{found[f'{name}_tokens']:,} tokens" for name in ("prompt", "matched", "cached")}
    if found["prompt_goes_on"]:
        facts["the prompt continues"] = repr(found["prompt_goes_on"])
    for number, text in enumerate(found["tree_goes_on"][:_SHOWN_BRANCHES], start=1):
        facts[f"the tree continues ({number})"] = repr(text)
    yield from describe(facts)
