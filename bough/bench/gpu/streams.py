"""HTTP: a server in one process, streaming clients in another, and their rate against the same work without HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bough.bench.gpu.decode import GREEDY, measure_case, shared_case
from bough.bench.gpu.driver import Driver
from bough.bench.gpu.made_model import MARK
from bough.bench.gpu.setup import Figure, GpuSetup
from bough.bench.gpu.shape_server import MODEL, SAMPLE, SAMPLES
from bough.bench.gpu.start import run_child
from bough.bench.http import free_port, wait_until_ready
from bough.errors import EngineError

_STOP_S = 60.0
_SAMPLES_S = 10.0


def measure_reference(driver: Driver, setup: GpuSetup) -> float:
    """Tokens a second of the largest number of lanes on one prefix, in this process."""
    case = shared_case(setup, driver.runtime.engine.vocab_size, max(setup.lanes))
    return float(measure_case(driver, setup, case, GREEDY).detail["tokens_per_s"])


def measure_streams(setup: GpuSetup, reference_tokens_per_s: float) -> Iterator[Figure]:
    """Tokens a second as clients of a server get them, and the share of the rate without HTTP."""
    count = max(setup.lanes)
    with TemporaryDirectory(prefix="bough-gpu-") as folder, serving(setup, Path(folder)) as url:
        told = _describe_clients(setup, url, count)
        found = run_child("bough.bench.gpu.clients", told, {})
        yield Figure(f"{count} streams over HTTP", found["tokens_per_s"], "tokens/s", found)
        share, detail = found["tokens_per_s"] / reference_tokens_per_s, {"in_process_tokens_per_s": reference_tokens_per_s}
        yield Figure("share of the rate in process", round(share, 4), "×", detail)
        if setup.is_profiled:
            yield _profile(told, Path(folder))


def _profile(told: dict[str, Any], folder: Path) -> Figure:
    """The same streams once more, while the server's threads are sampled; the rate of that run."""
    (folder / SAMPLE).touch()
    found = run_child("bough.bench.gpu.clients", told, {})
    (folder / SAMPLE).unlink()
    deadline_s = time.monotonic() + _SAMPLES_S
    while not (folder / SAMPLES).exists():
        if time.monotonic() > deadline_s:
            raise EngineError(f"the server has not said within {_SAMPLES_S:.0f} s where its threads were")
        time.sleep(0.05)
    threads = json.loads((folder / SAMPLES).read_text(encoding="utf-8"))
    return Figure("streams while the server is sampled", found["tokens_per_s"], "tokens/s", {"threads": threads})


def _describe_clients(setup: GpuSetup, url: str, count: int) -> dict[str, Any]:
    most = 2 * count + setup.warm_tokens + setup.windows * setup.steps
    return {
        "url": f"{url}/v1/completions",
        "model": MODEL,
        "mark": MARK,
        "vocab_size": setup.shape["vocab_size"],
        "tokens": setup.tokens,
        "tail_tokens": setup.tail_tokens,
        "streams": count,
        "max_tokens": most,
    }


@contextmanager
def serving(setup: GpuSetup, folder: Path) -> Iterator[str]:
    """A server over random weights, whose fast path is ready; yields its address."""
    port = free_port()
    settings = dict(setup.settings) | {"lanes": setup.num_lanes, "queue": 4 * setup.num_lanes}
    told = {"shape": dict(setup.shape), "settings": settings, "port": port, "folder": str(folder)}
    command = [sys.executable, "-m", "bough.bench.gpu.shape_server", json.dumps(told)]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=dict(os.environ), stdin=subprocess.PIPE, stdout=log, stderr=log)
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        except BaseException as error:
            error.add_note((folder / "server.log").read_text(encoding="utf-8", errors="replace")[-2000:])
            raise
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdin is not None
    process.stdin.close()
