"""The processor time that readers of `/api/events` cost a server, by thread, over an engine that computes nothing.

Unlike speed, it hardly depends on what else the machine does. The engine takes a fixed time for a step, as a device does.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from benchmarks.events.readers import readers
from benchmarks.null_engine import NullEngine
from benchmarks.streams.clients import ClientSetup
from benchmarks.streams.run import StreamFigures, loaded_words, measure_http

STEP_S = 0.01
_TOKENS = 300
_APART = 1000  # numbers between the prompts of two runs


@dataclass(frozen=True)
class CpuCost:
    """Milliseconds of processor time for each second of the server, by thread, while so many streams run."""

    streams: int
    alone: dict[str, float]
    watched: dict[str, float]

    @property
    def more_ms(self) -> float:
        """What the readers cost in all."""
        return round(sum(self.watched.values()) - sum(self.alone.values()), 2)


def measure_cpu(num_streams: int, num_readers: int, rounds: int = 5) -> CpuCost:
    """Stream with readers and without, in turns. Needs the main thread."""

    @contextmanager
    def beside(setup: ClientSetup, port: int) -> Iterator[None]:
        if setup.first_number // _APART % 2 == 0:
            yield
            return
        with readers(port, num_readers) as reading:
            reading.open()
            yield
            reading.close()

    setup = ClientSetup(num_clients=num_streams, num_tokens=_TOKENS)
    with loaded_words(lambda settings: NullEngine(STEP_S), setup, {}) as runtime:
        setups = [replace(setup, first_number=_APART * number) for number in range(2 * (rounds + 1))]
        found = measure_http(runtime, setups, beside)[2:]  # the first of each open connections and fill memories
    return CpuCost(num_streams, _by_thread(found[::2]), _by_thread(found[1::2]))


def _by_thread(found: Sequence[StreamFigures]) -> dict[str, float]:
    """The medians, without the clients, which are another process."""
    names = [name for name in found[0].cpu_us if name != "clients"]
    return {name: round(statistics.median(_ms_per_s(each, name) for each in found), 2) for name in names}


def _ms_per_s(figures: StreamFigures, name: str) -> float:
    return figures.cpu_us[name] * figures.tokens_per_s / 1000
