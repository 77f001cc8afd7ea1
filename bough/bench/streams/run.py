"""`bough bench streams`: tokens a second through HTTP, against the same requests inside the process, and what they cost.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bough.bench.streams.clients import Api, ClientFigures, ClientSetup
from bough.bench.streams.model import write_word_model
from bough.bench.streams.window import Window
from bough.config import Settings, load_settings
from bough.engines.contract import Engine
from bough.errors import BoughError, EngineError
from bough.models import ModelFiles
from bough.models.tokenizer import load_tokenizer
from bough.runtime import Runtime
from bough.runtime.tiers import open_tiers
from bough.scheduling.job import Job
from bough.scheduling.worker import Limits
from bough.server.app import make_app
from bough.server.http.listening import bind, host
from bough.server.serving.catalog import Catalog
from bough.server.serving.loaded import LoadedModels
from bough.server.serving.service import Service
from bough.types import Chunk, Completion, SamplingParams, Usage

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
    def of(cls, window: Window | ClientFigures, cpu: dict[str, float]) -> StreamFigures:
        num_tokens = window.num_pieces if isinstance(window, Window) else window.num_events
        if not num_tokens or not window.seconds:
            raise EngineError("a stream ended before the last one had begun: ask for more tokens")
        costs = {part: round(1e6 * seconds / num_tokens, 1) for part, seconds in cpu.items()}
        if isinstance(window, Window):
            return cls(round(num_tokens / window.seconds, 1), costs)
        shares = round(window.num_reads / num_tokens, 2), round(window.num_bytes / num_tokens, 1)
        return cls(round(num_tokens / window.seconds, 1), costs, *shares)


class _Listener:
    """One request inside the process. The last one to end sets an event."""

    def __init__(self, number: int, window: Window, left: list[int], is_over: threading.Event) -> None:
        self._number = number
        self._window = window
        self._left = left  # requests that still run, shared by all
        self._is_over = is_over
        self.error: BoughError | None = None

    def on_start(self, usage: Usage, waited_s: float) -> None:
        pass

    def on_loaded(self, usage: Usage) -> None:
        pass

    def on_chunk(self, chunk: Chunk) -> None:
        self._window.add(self._number, 1)

    def on_end(self, completion: Completion) -> None:
        self._window.end()
        self._left.remove(self._number)
        if not self._left:
            self._is_over.set()

    def on_error(self, error: BoughError) -> None:
        self.error = error
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


def measure_streams(make_engine: MakeEngine, setup: ClientSetup, apis: Sequence[Api]) -> StreamReport:
    """Stream from an engine whose tokens have no text of their own: they get words. Needs the main thread."""
    with loaded_words(make_engine, setup) as loaded:
        measure_in_process(loaded.runtime, setup)  # the first run chooses kernels and allocates memory
        in_process = measure_in_process(loaded.runtime, setup)
        found = measure_http(loaded, [replace(setup, api=api) for api in apis])
        return StreamReport(loaded.runtime.engine.describe(), in_process, dict(zip(apis, found, strict=True)))


@dataclass(frozen=True)
class LoadedWords:
    """A model whose tokens are words."""

    files: ModelFiles
    runtime: Runtime
    settings: Settings


@contextmanager
def loaded_words(make_engine: MakeEngine, setup: ClientSetup) -> Iterator[LoadedWords]:
    """A model over an engine, with a lane for each client. `measure_http` closes it."""
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
            }
        )
        engine = make_engine(settings)
        files = write_word_model(Path(folder) / "model", engine.vocab_size)
        tiers = open_tiers(engine, None, settings)
        yield LoadedWords(
            files, Runtime(engine, load_tokenizer(files), settings, files, tiers, Limits(settings.queue)), settings
        )


def measure_in_process(runtime: Runtime, setup: ClientSetup) -> StreamFigures:
    """Run the clients' requests without a server: their listeners only count."""
    clocks: list[CpuClocks] = []
    window = Window(setup.num_clients, lambda: clocks.append(CpuClocks.read()), lambda: clocks.append(CpuClocks.read()))
    left, is_over = list(range(setup.num_clients)), threading.Event()
    params = SamplingParams(max_tokens=setup.num_tokens, temperature=setup.temperature, top_p=setup.top_p)
    listeners = [_Listener(number, window, left, is_over) for number in range(setup.num_clients)]
    for number, listener in enumerate(listeners):
        encoded = runtime.prompts.encode(setup.body(number)["messages"])
        runtime.worker.submit(Job(runtime.prepare(encoded, params, salt="in process"), listener))
    if not is_over.wait(_END_S):
        raise EngineError(f"the requests did not end within {_END_S:.0f} s")
    if failed := next((each.error for each in listeners if each.error is not None), None):
        raise failed
    return StreamFigures.of(window, clocks[1].since(clocks[0]) if len(clocks) == 2 else {})


def measure_http(
    loaded: LoadedWords,
    setups: Sequence[ClientSetup],
    beside: Callable[[ClientSetup, int], AbstractContextManager[object]] = lambda setup, port: nullcontext(),
) -> list[StreamFigures]:
    """Serve the model on a free port while the clients of each setup stream from it. Closes the model at the end.

    `beside` is given the setup and the port, and is there while its clients stream.
    """
    settings, catalog = loaded.settings, Catalog(loaded.settings, loaded.files)
    service = Service(settings, LoadedModels(settings, catalog, start=lambda files, settings: loaded.runtime), catalog)
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
    command = [sys.executable, "-m", "bough.bench.streams.clients", json.dumps(asdict(setup) | {"port": port})]
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
