"""HTTP: streaming clients of a server of this model, against the same requests inside the process.

It is the benchmark of streams over this model, in a child process, which has the device to itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from benchmarks.gpu.setup import GpuFigure, GpuSetup
from benchmarks.gpu.start import READY_S, run_child, wait_until_ready
from benchmarks.streams.clients import ClientSetup
from benchmarks.streams.run import StreamReport, measure_streams
from bough.config import Settings
from bough.engines.contract import Engine
from bough.runtime import make_shape

_LEAST_TOKENS = 256  # of an answer, so that all streams run at the same time


def measure_http(setup: GpuSetup) -> Iterator[GpuFigure]:
    """Tokens a second inside the process and as clients of a server get them, and the ratio of the two."""
    count = max(setup.lanes)
    found = run_child("benchmarks.gpu.http", setup.as_dict(), {})
    alone, streams = found["in_process"], found["http"]["openai"]
    yield GpuFigure(f"{count} requests in process", alone["tokens_per_s"], "tokens/s", alone)
    yield GpuFigure(f"{count} streams over HTTP", streams["tokens_per_s"], "tokens/s", streams)
    yield GpuFigure("share of the rate in process", round(streams["tokens_per_s"] / alone["tokens_per_s"], 4), "×")


def _measure(setup: GpuSetup) -> StreamReport:
    def make_engine(settings: Settings) -> Engine:
        engine = make_shape(dict(setup.shape), settings)
        wait_until_ready(engine, READY_S)
        return engine

    num_tokens = setup.warm_tokens + setup.windows * setup.steps + 2 * max(setup.lanes)  # the first wait for the last
    asked = ClientSetup(
        num_clients=max(setup.lanes),
        num_tokens=max(_LEAST_TOKENS, num_tokens),
        prompt_bytes=setup.tokens,
        ignores_eos=True,
    )
    return measure_streams(make_engine, asked, ["openai"], setup.settings)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(GpuSetup(**json.loads(sys.argv[1]))))), flush=True)
