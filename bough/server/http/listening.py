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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from bough.config import Settings
from bough.errors import SettingsError
from bough.server.http.connections import Connection, WaitingConnections, allow_many_files

log = logging.getLogger(__name__)

_IDLE_CONNECTION_S = 75
_GRACE_S = 5  # time for connections after `stop_s` before they are closed
_BACKLOG = 128
_SWITCH_S = 0.0005  # a tenth of Python's default
_TICKS_BETWEEN_CHECKS = 100  # there are ten ticks a second
_NUM_THREADS = 32  # reading a new model's weights, loading and unloading may hold some of them for minutes


class HostedService(Protocol):
    """The service that a server loads before it is ready, and ends when it stops."""

    @property
    def settings(self) -> Settings: ...

    @property
    def is_still_loading(self) -> bool:
        """Whether a model is still being loaded after `close`, which nothing can stop."""

    async def load(self, model: str) -> object:
        """Load a model."""

    def drain(self) -> None:
        """End the streams that have no end; answers go on. A second call does nothing."""

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
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an address that was used a moment ago is free
        bound.bind(address)
    except OSError as error:
        bound.close()
        text = f"cannot listen at {host}, port {port}: {error.strerror or error}"
        if error.errno == errno.EADDRINUSE:
            text = f"port {port} at {host} is in use: another server may run there"
            text += "; choose another port by --port, or 0 for any"
        raise SettingsError(text) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The URL of the socket for clients on this machine."""
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(bound: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


class HttpServer(uvicorn.Server):
    """A uvicorn server that listens while its last answers finish, so that new clients get the answer to try again."""

    def __init__(self, app: FastAPI, settings: Settings, service: HostedService, max_connections: int) -> None:
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
        self._closing: list[asyncio.Task[None]] = []

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
            if not self.server_state.tasks or time.monotonic() >= self._ends_at_s:
                self.should_exit = True
                self._waiting.close_all()
                if self.server_state.tasks and not self._closing:  # closing the models ends them with an error
                    self._closing.append(asyncio.create_task(self._service.close()))
        if counter % _TICKS_BETWEEN_CHECKS == 0:
            for connection in self._connections():
                connection.watch_end()
        return await super().on_tick(counter)

    def _connections(self) -> list[Connection]:
        return [each for each in self.server_state.connections if isinstance(each, Connection)]

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
        for connection in self._connections():
            connection.transport.abort()

    async def run_with_model(self, bound: socket.socket, on_ready: Callable[[], None]) -> None:
        """Serve while the default model loads and then until `stop`, and close the service. Raises what loading raises."""
        self._app_state.is_starting = True
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_NUM_THREADS, "bough-server"))
        serving = asyncio.create_task(self.serve([bound]))
        loading = asyncio.create_task(self._load(on_ready))
        try:
            await asyncio.wait({serving, loading}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
            else:
                loading.cancel()
            await serving
        except BaseException:
            self.should_exit = self.force_exit = True
            loading.cancel()
            raise
        finally:
            await asyncio.gather(serving, loading, return_exceptions=True)
            await asyncio.gather(*self._closing, return_exceptions=True)
            await self._service.close()  # does nothing if the application did it already
            if self._service.is_still_loading:  # for minutes, in a thread that cannot be stopped
                log.warning("a model was still being loaded: the server ends without waiting for it")
                logging.shutdown()
                sys.stdout.flush()
                os._exit(0)

    async def _load(self, on_ready: Callable[[], None]) -> None:
        await self._service.load(self._service.settings.model)
        while not self.started:  # a model may be there sooner than the socket
            await asyncio.sleep(0.01)
        self._app_state.is_starting = False
        gc.collect()
        gc.freeze()  # objects made so far stay: the garbage collector skips them from now on
        on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not let uvicorn handle signals: `host` does, until everything is closed."""
        yield


def host(
    app: FastAPI, settings: Settings, service: HostedService, bound: socket.socket, on_ready: Callable[[], None]
) -> None:
    """Serve until a signal comes; `on_ready` is called when the model is loaded. Raises what loading raises.

    Python switches threads more often meanwhile: the engine's thread and this one release the interpreter lock many times
    per token, and a slow chat template would keep it for as long as it may.
    """
    server = HttpServer(app, settings, service, allow_many_files())
    handlers = {number: signal.signal(number, lambda *_: server.stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        with bound:
            asyncio.run(server.run_with_model(bound, on_ready))
    finally:
        sys.setswitchinterval(switch_s)
        for number, handler in handlers.items():
            signal.signal(number, handler)
