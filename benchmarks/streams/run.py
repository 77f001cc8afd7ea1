"""Tokens a second through HTTP, against the same requests inside the process, and what they cost.

The server is a real one, in this process, so that the processor time of its threads can be read: the engine's thread, the
thread of the event loop, and all others together. The clients are a process of their own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.streams.clients import Api, ClientFigures, ClientSetup
from benchmarks.streams.model import make_word_runtime
from benchmarks.streams.window import StreamWindow
from bough.config import Settings, load_settings
from bough.engines.contract import Engine
from bough.errors import BoughError, EngineError
from bough.generate.request import Request
from bough.runtime import Runtime
from bough.scheduling.job import RequestNews
from bough.server.app import make_app
from bough.server.http.listening import bind, host
from bough.server.serving.catalog import Catalog
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.service import Service
from bough.types import Chunk, Completion, SamplingParams

MakeEngine = Callable[[Settings], Engine]
_ENGINE, _LOOP, _OTHERS = "engine", "event loop", "others"
_THREADS = {"bough-engine": _ENGINE, "MainThread": _LOOP}
_END_S = 600.0


@dataclass(frozen=True)
class CpuClocks:
    """The processor time of this process so far, by part; a system that cannot tell it by thread has one part."""

    seconds: dict[str, float]

    @classmethod
    def read(cls) -> CpuClocks:
        total_s = time.process_time()
        if not hasattr(time, "pthread_getcpuclockid"):
            return cls({"all threads": total_s})
        found = {
            _THREADS[thread.name]: time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
            for thread in threading.enumerate()
            if thread.name in _THREADS and thread.ident is not None
        }
        return cls({**found, _OTHERS: max(0.0, total_s - sum(found.values()))})

    def since(self, before: CpuClocks) -> dict[str, float]:
        return {part: seconds - before.seconds.get(part, 0.0) for part, seconds in self.seconds.items()}


@dataclass(frozen=True)
class StreamFigures:
    """What was counted while all streams ran. `cpu_us` is the processor time for each token, by part."""

    tokens_per_s: float
    cpu_us: dict[str, float] = field(default_factory=dict)
    reads_per_token: float = 0.0
    bytes_per_token: float = 0.0

    @classmethod
    def of(cls, window: StreamWindow | ClientFigures, cpu: dict[str, float]) -> StreamFigures:
        num_tokens = window.num_pieces if isinstance(window, StreamWindow) else window.num_events
        if not num_tokens or not window.seconds:
            raise EngineError("a stream ended before the last one had begun: ask for more tokens")
        costs = {part: round(1e6 * seconds / num_tokens, 1) for part, seconds in cpu.items()}
        if isinstance(window, StreamWindow):
            return cls(round(num_tokens / window.seconds, 1), costs)
        shares = round(window.num_reads / num_tokens, 2), round(window.num_bytes / num_tokens, 1)
        return cls(round(num_tokens / window.seconds, 1), costs, *shares)


class _Listener:
    """One request inside the process. The last one to end sets an event."""

    def __init__(self, number: int, window: StreamWindow, left: list[int], is_over: threading.Event) -> None:
        self._number = number
        self._window = window
        self._left = left  # requests that still run, shared by all
        self._is_over = is_over
        self.error: BoughError | None = None

    def __call__(self, news: RequestNews) -> None:
        if isinstance(news, Chunk):
            self._window.add(self._number, 1)
        elif isinstance(news, Completion):
            self._window.end()
            self._left.remove(self._number)
            if not self._left:
                self._is_over.set()
        elif isinstance(news, BoughError):
            self.error = news
            self._is_over.set()


@dataclass(frozen=True)
class StreamReport:
    """The same requests inside the process and through each API. `share` is an API's part of the rate in process."""

    engine: dict[str, str]
    in_process: StreamFigures
    http: dict[str, StreamFigures]

    @property
    def share(self) -> dict[str, float]:
        return {api: round(each.tokens_per_s / self.in_process.tokens_per_s, 3) for api, each in self.http.items()}


def measure_streams(
    make_engine: MakeEngine, setup: ClientSetup, apis: Sequence[Api], settings: Mapping[str, Any] | None = None
) -> StreamReport:
    """Stream from an engine whose tokens have no text of their own: they get words. Needs the main thread."""
    with loaded_words(make_engine, setup, settings or {}) as runtime:
        measure_in_process(runtime, setup)  # the first run chooses kernels and allocates memory
        in_process, engine = measure_in_process(runtime, setup), runtime.engine.describe()
        first = replace(setup, num_clients=1)  # it computes what all prompts begin with
        _, *found = measure_http(runtime, [first, *(replace(setup, api=api) for api in apis)])
        return StreamReport(engine, in_process, dict(zip(apis, found, strict=True)))


@contextmanager
def loaded_words(make_engine: MakeEngine, setup: ClientSetup, more: Mapping[str, Any]) -> Iterator[Runtime]:
    """A model of words over an engine, with a lane for each client and more settings. `measure_http` closes it."""
    with TemporaryDirectory(prefix="bough-streams-") as folder:
        settings = load_settings(
            {
                "cache_folder": Path(folder) / "cache",
                "data_folder": Path(folder) / "data",
                "disk": 0,
                "lanes": setup.num_clients,
                "queue": 2 * setup.num_clients,
                "loop_guard": False,
                "model": setup.model,
                **more,
            }
        )
        yield make_word_runtime(make_engine(settings), settings, Path(folder) / "model")


def measure_in_process(runtime: Runtime, setup: ClientSetup) -> StreamFigures:
    """Run the clients' requests without a server: their listeners only count."""
    clocks: list[CpuClocks] = []
    window = StreamWindow(
        setup.num_clients, lambda: clocks.append(CpuClocks.read()), lambda: clocks.append(CpuClocks.read())
    )
    left, is_over = list(range(setup.num_clients)), threading.Event()
    params = SamplingParams(max_tokens=setup.num_tokens, temperature=setup.temperature, top_p=setup.top_p)
    listeners = [_Listener(number, window, left, is_over) for number in range(setup.num_clients)]
    for number, listener in enumerate(listeners):
        encoded = runtime.prompts.encode(setup.body(number)["messages"])
        runtime.worker.submit(runtime.prepare(Request.of(encoded, params, salt="in process"), listener))
    if not is_over.wait(_END_S):
        raise EngineError(f"the requests did not end within {_END_S:.0f} s")
    if failed := next((each.error for each in listeners if each.error is not None), None):
        raise failed
    return StreamFigures.of(window, clocks[1].since(clocks[0]) if len(clocks) == 2 else {})


def measure_http(
    runtime: Runtime,
    setups: Sequence[ClientSetup],
    beside: Callable[[ClientSetup, int], AbstractContextManager[object]] = lambda setup, port: nullcontext(),
) -> list[StreamFigures]:
    """Serve the model on a free port while the clients of each setup stream from it. Closes the model at the end.

    `beside` is given the setup and the port, and is there while its clients stream.
    """
    settings, catalog = runtime.settings, Catalog(runtime.settings, runtime.files)
    service = Service(settings, LoadedModels(settings, catalog, start=lambda files, settings: runtime), catalog)
    found: list[StreamFigures | BaseException] = []

    def run_all() -> None:
        port = bound.getsockname()[1]
        try:
            for setup in setups:
                with beside(setup, port):
                    found.append(_run_clients(setup, port))
        except BaseException as error:
            found.append(error)
        os.kill(os.getpid(), signal.SIGTERM)  # which ends the server

    with bind("127.0.0.1", 0) as bound:
        running = threading.Thread(target=run_all, name="bough-bench-clients", daemon=True)
        host(make_app(settings, service), settings, service, bound, running.start)
    running.join()
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return [each for each in found if isinstance(each, StreamFigures)]


def _run_clients(setup: ClientSetup, port: int) -> StreamFigures:
    command = [sys.executable, "-m", "benchmarks.streams.clients", json.dumps(asdict(setup) | {"port": port})]
    clocks: list[CpuClocks] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as clients:
        assert clients.stdout is not None and clients.stderr is not None
        lines = []
        for line in clients.stdout:
            clocks.append(CpuClocks.read())
            lines.append(line)
        problem = clients.stderr.read()
    if clients.returncode:
        raise EngineError(f"the clients failed: {problem.strip()[-2000:]}")
    figures = ClientFigures(**json.loads(lines[-1]))
    return StreamFigures.of(figures, clocks[1].since(clocks[0]) | {"clients": figures.cpu_s})
