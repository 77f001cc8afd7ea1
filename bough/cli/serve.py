"""`bough serve`: answer the clients of Ollama, OpenAI and Anthropic."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from bough.cli import options, work
from bough.cli.screen import Screen
from bough.config import Settings, load_settings
from bough.errors import BoughError
from bough.runner import find_model

_APIS = "Ollama, OpenAI, Anthropic"
_EXTRAS = ("fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn")


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
    max_import: options.MaxImport = None,
    rate_limit: options.RateLimit = None,
    verify_cache: options.VerifyCache = None,
    sort_tools: options.SortTools = None,
    log_json: options.LogJson = None,
    lanes: options.Lanes = None,
    context: options.Context = None,
    threads: options.Threads = None,
    engine: options.Engine = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    attention: options.Attention = None,
    memory: options.Memory = None,
    host_memory: options.HostMemory = None,
    disk: options.Disk = None,
    disk_free: options.DiskFree = None,
    disk_ttl: options.DiskTTL = None,
    salt_share: options.SaltShare = None,
    cache: options.Cache = None,
    trust_remote_code: options.TrustRemoteCode = None,
) -> None:
    """Serve models over HTTP, by the APIs of Ollama, OpenAI and Anthropic, until Ctrl-C."""
    run_server(load_settings(options.settings_of(ctx)), Screen())


def run_server(settings: Settings, screen: Screen) -> None:
    """Serve until a signal comes. Raises BoughError if that cannot begin."""
    _require_extras()
    from bough.server.app import make_app, make_service
    from bough.server.http.listening import bind, host, is_loopback, url_of
    from bough.server.http.logs import set_up_logs

    with bind(settings.host, settings.port) as bound:
        with work.shown(screen.notes, stays=False) as progress:
            files = find_model(settings.model, settings, progress)
        set_up_logs(as_json=settings.log_json)
        service = make_service(settings, files)
        url = url_of(bound)
        if not is_loopback(bound) and settings.keys_file is None:
            screen.note(f"warning: whoever reaches {url} can use this server; --keys-file lets in only who has a key")
        ready = f"bough {version('bough')} serves {files.name} at {url} ({_APIS}); Ctrl-C ends"
        host(make_app(service.settings, service), service.settings, service, bound, lambda: screen.note(ready))


def _require_extras() -> None:
    """Say how to install what a server needs besides, if it is not here."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        raise BoughError(f"{error.name} is not installed: pip install 'bough[server]'") from error
