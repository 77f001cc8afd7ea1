"""The parts of the benchmark one after the other, each on its own. One that fails leaves the others to go on."""

from __future__ import annotations

import gc
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.decode import measure_decode
from benchmarks.gpu.driver import Driver
from benchmarks.gpu.first_token import measure_first
from benchmarks.gpu.http import measure_http
from benchmarks.gpu.made_model import load_made_model
from benchmarks.gpu.memory import measure_memory
from benchmarks.gpu.page_in import measure_page_in
from benchmarks.gpu.setup import IN_PROCESS, GpuFigure, GpuSetup
from benchmarks.gpu.start import READY_S, measure_start, wait_until_ready
from bough.errors import BoughError
from bough.runtime import Runtime

log = logging.getLogger(__name__)

_LAST_FRAMES = 6

Measure = Callable[[Driver, GpuSetup], Iterator[GpuFigure]]

_MEASURES: dict[str, Measure] = {
    "decode": measure_decode,
    "first": measure_first,
    "restore": measure_page_in,
    "memory": measure_memory,
}


@dataclass
class GpuReport:
    """What a run has found so far: figures and errors by part, what the engine says of itself, and the machine."""

    setup: GpuSetup
    figures: dict[str, list[GpuFigure]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    engine: dict[str, str] = field(default_factory=dict)
    is_ready: bool = True
    newest: GpuFigure | None = None

    @property
    def num_figures(self) -> int:
        return sum(map(len, self.figures.values()))

    def as_dict(self) -> dict[str, Any]:
        return {
            "setup": self.setup.as_dict(),
            "engine": self.engine,
            "is_ready": self.is_ready,
            "figures": {part: [each.as_dict() for each in found] for part, found in self.figures.items()},
            "errors": self.errors,
        }


def run_parts(setup: GpuSetup, parts: Sequence[str]) -> Iterator[GpuReport]:
    """Measure these parts; yields the report, which grows, after every figure and every error."""
    report = GpuReport(setup)
    here = [part for part in IN_PROCESS if part in parts]
    if here:
        yield from _run_here(report, here)
    if "start" in parts:
        yield from _collect(report, "start", measure_start(setup))
    if "http" in parts:
        yield from _collect(report, "http", measure_http(setup))


def _run_here(report: GpuReport, parts: Sequence[str]) -> Iterator[GpuReport]:
    """The parts that share one model. Its memory is given back at the end: the children need it."""
    runtime = _load(report)
    if runtime is not None:
        with closing(runtime):
            driver = Driver(runtime)
            for part in parts:
                yield from _collect(report, part, _MEASURES[part](driver, report.setup))
                _end_requests(driver)
            report.engine = runtime.engine.describe()
        del driver
    del runtime
    _give_back_memory()
    yield report


def _give_back_memory() -> None:
    """Return what a closed engine has left to the device."""
    gc.unfreeze()
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def _load(report: GpuReport) -> Runtime | None:
    """The model with its fast path ready; None, and an error in the report, if it cannot be loaded."""
    setup = report.setup
    try:
        runtime = load_made_model(setup.shape, {**setup.settings, "lanes": setup.num_lanes})
    except Exception as error:
        report.errors["load"] = _describe(error)
        return None
    report.is_ready = wait_until_ready(runtime.engine, READY_S)
    report.engine = runtime.engine.describe()
    gc.collect()
    gc.freeze()  # as the server does: objects made so far stay
    return runtime


def _end_requests(driver: Driver) -> None:
    """End what a part that failed has left behind."""
    try:
        driver.finish()
    except Exception as error:
        log.warning("requests of a part that failed could not be ended: %s", error)


def _collect(report: GpuReport, part: str, figures: Iterator[GpuFigure]) -> Iterator[GpuReport]:
    """Add figures to the report as they come. An error ends the part, and is kept with what was measured before."""
    found = report.figures.setdefault(part, [])
    try:
        for each in figures:
            found.append(each)
            report.newest = each
            yield report
    except Exception as error:
        report.errors[part] = _describe(error)
        yield report


def _describe(error: Exception) -> str:
    """What went wrong; a mistake of ours with where it was made."""
    text = str(error) if isinstance(error, BoughError) else "".join(traceback.format_exception(error)[-_LAST_FRAMES:])
    return "\n".join([text, *getattr(error, "__notes__", [])])
