"""The server as a process: its socket, its signals, and how it ends.

It listens while the model is still loading, and /health says so. After the first SIGINT or SIGTERM it refuses new requests,
and running answers have `stop_s` to finish; after that they end with an error. The second signal ends at once. Either way
models are unloaded and their trees are saved. A model that is still being loaded is waited for only briefly.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from bough.config import Settings
from bough.errors import SettingsError
from bough.server.http.connections import Connection, WaitingConnections, allow_many_files

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_IDLE_CONNECTION_S = 75
_GRACE_S = 5  # time for connections after `stop_s` before they are closed
_BACKLOG = 128
_SWITCH_S = 0.0005  # a tenth of Python's default
_TICKS_BETWEEN_CHECKS = 100  # there are ten ticks a second
_NUM_THREADS = 32  # reading a new model's weights, loading and unloading may hold some of them for minutes


class Hosted(Protocol):
    """What a server loads before it is ready, and ends when it stops."""

    @property
    def settings(self) -> Settings: ...

    @property
    def is_still_loading(self) -> bool:
        """Whether a model is still being loaded after `close`, which nothing can stop."""

    async def load(self, model: str) -> object:
        """Have a model in memory."""

    def drain(self) -> None:
        """End the streams that would go on for ever; answers go on. A second call does nothing."""

    async def close(self) -> None:
        """Unload everything. A second call does nothing."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to this address, not listening yet. Raises SettingsError if that fails."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"there is no host {host!r} to listen at: {error}") from error
    family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    bound = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # an address that was used a moment ago is free; elsewhere this would take it from others
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise SettingsError(_describe(error, host, port)) from error
    return bound


def _describe(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} at {host} is in use: another server may run there; choose another port by --port, or 0 for any"
    return f"cannot listen at {host}, port {port}: {error.strerror or error}"


def url_of(bound: socket.socket) -> str:
    """The URL of the socket for clients on this machine."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


class HttpServer(uvicorn.Server):
    """A uvicorn server that listens while its last answers finish, so that new clients are told to try again."""

    def __init__(self, app: FastAPI, settings: Settings, service: Hosted, max_connections: int) -> None:
        self._waiting = WaitingConnections(max_connections)
        config = uvicorn.Config(
            app,
            http=partial(Connection, waiting=self._waiting),  # type: ignore[arg-type]
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_IDLE_CONNECTION_S,
            timeout_graceful_shutdown=2 * _GRACE_S,
            backlog=max(1, min(_BACKLOG, max_connections // 4)),  # clients accepted before one is closed
        )
        super().__init__(config)
        self._app_state = app.state
        self._stop_s = settings.stop_after
        self._ends_at_s: float | None = None
        self._service = service
        self._closing: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Refuse new requests, and end when all answers have finished or `stop_s` is over. The second call ends at once."""
        if self._ends_at_s is None:
            self._app_state.is_draining = True
            self._ends_at_s = time.monotonic() + self._stop_s
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._ends_at_s is not None:
            self._service.drain()
        if self._ends_at_s is not None and (not self.server_state.tasks or time.monotonic() >= self._ends_at_s):
            self.should_exit = True
            self._waiting.close_all()
            if self.server_state.tasks and self._closing is None:  # closing the models ends them with an error
                self._closing = asyncio.create_task(self._service.close())
        if counter % _TICKS_BETWEEN_CHECKS == 0:
            for connection in self.server_state.connections:
                if isinstance(connection, Connection):
                    connection.watch_end()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does, but disconnect clients after `_GRACE_S`: their requests then end instead of being cancelled."""
        cutting = asyncio.get_running_loop().call_later(_GRACE_S, self._disconnect_all)
        await super().shutdown(sockets)
        cutting.cancel()
        if self.force_exit:  # uvicorn leaves it out then
            await self.lifespan.shutdown()
        self._disconnect_all()
        if self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks), timeout=_GRACE_S)

    def _disconnect_all(self) -> None:
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.transport.abort()

    async def closed(self) -> None:
        """Wait until the service is closed, if `on_tick` has begun to close it."""
        if self._closing is not None:
            await asyncio.gather(self._closing, return_exceptions=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not let uvicorn handle signals: `host` does, until everything is closed."""
        yield


def host(app: FastAPI, settings: Settings, service: Hosted, bound: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serve until a signal comes. `on_ready` is called when the model is loaded and the socket listens.

    Raises what loading raises.
    """
    server = HttpServer(app, settings, service, allow_many_files())
    with _handling_signals(server.stop), _switching_threads_often(), bound:
        asyncio.run(_host(server, app, service, bound, on_ready))


async def _host(
    server: HttpServer, app: FastAPI, service: Hosted, bound: socket.socket, on_ready: Callable[[], None]
) -> None:
    app.state.is_starting = True
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_NUM_THREADS, "bough-server"))
    serving = asyncio.create_task(server.serve([bound]))
    try:
        await _unless_done(serving, _load(server, app, service, on_ready))
        await serving
    except BaseException:
        server.should_exit = server.force_exit = True
        raise
    finally:
        await asyncio.gather(serving, return_exceptions=True)
        await server.closed()
        await service.close()  # does nothing if the application did it already
        if service.is_still_loading:
            _leave()


def _leave() -> None:
    """End the process without waiting for its threads: one of them may load a model for minutes."""
    log.warning("a model was still being loaded: the server ends without waiting for it")
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


async def _load(server: HttpServer, app: FastAPI, service: Hosted, on_ready: Callable[[], None]) -> None:
    await service.load(service.settings.model)
    while not server.started:  # a model may be there sooner than the socket
        await asyncio.sleep(0.01)
    app.state.is_starting = False
    gc.collect()
    gc.freeze()  # objects made so far stay: the garbage collector skips them from now on
    on_ready()


async def _unless_done(serving: asyncio.Task[None], work: Awaitable[None]) -> None:
    """Wait for some work, and cancel it when serving ends first."""
    task = asyncio.ensure_future(work)
    await asyncio.wait({serving, task}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


@contextlib.contextmanager
def _switching_threads_often() -> Iterator[None]:
    """Make Python switch threads more often, so that a slow chat template delays neither the engine's thread nor this one.

    Both release the interpreter lock many times per token, and wait for it as long as another thread may hold it.
    """
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


@contextlib.contextmanager
def _handling_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` at each SIGINT and SIGTERM."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop()

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
