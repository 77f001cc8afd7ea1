"""Passes captured as CUDA graphs, made ready on a thread of their own while the engine already answers without them.

In their order: products are measured, decoder layers are compiled, and each size of a step and of a short run is captured,
with compiled layers if that works, else without. A graph is used only if its logits are those of the model's own modules,
up to rounding, on a few rows of numbers; else the reason is kept.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bough.engines.torch.forward import Forward
from bough.engines.torch.pooled.passes.compiling import CompiledLayers, compile_layers, why_not
from bough.engines.torch.pooled.passes.long_run import run_nowhere
from bough.engines.torch.pooled.passes.static_batch import StaticBatch

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # which is not fully typed
_STEPS = (1, 16, 64, 32)
_RUNS = (32, 16, 64, 256)
_MOST_DIFFERENT = 0.25  # the norm of the difference to the eager logits, relative to theirs; rounding may change an expert
_LONG_TOKENS = 1024
_MOST_S = 300  # after which no further graph is begun


@dataclass(frozen=True)
class Size:
    """Which passes a graph serves: so many entries, lanes or tokens of a run, that share slots or do not."""

    entries: int
    is_run: bool = False
    has_shared: bool = True

    def __str__(self) -> str:
        what = "tokens of a run" if self.is_run else "lanes" if self.has_shared else "distinct lanes"
        return f"{self.entries} {what}"


@dataclass(eq=False)
class CapturedGraph:
    """A pass over these entries as a graph, which leaves its logits always in the same place.

    So it does with what the head reads, `states` [entries, hidden], if that is a run and the head is known.
    """

    batch: StaticBatch
    graph: Any
    logits: Tensor
    is_compiled: bool
    states: Tensor | None = None

    def replay(self) -> Tensor:
        """The logits [entries, vocabulary], until the next replay."""
        self.graph.replay()
        return self.logits


@dataclass
class Readiness:
    """How far the warm-up has come, for people. `problems` tell what stays slower than it could be, and why."""

    seconds: float = 0.0
    is_done: bool = False
    problems: list[str] = field(default_factory=list)


class Graphs:
    """The graphs of one model. Only `ready` and `compiled` are read by other threads than the one that makes them."""

    def __init__(
        self, forward: Forward, make_batch: Callable[[Size], StaticBatch], num_lanes: int, *, is_recurrent: bool
    ) -> None:
        """Runs of tokens are no entries of a step where a state has to follow them one by one."""
        self.ready: dict[Size, CapturedGraph] = {}
        self.compiled: CompiledLayers | None = None  # once long runs may use it
        self.readiness = Readiness()
        self._forward = forward
        self._make_batch = make_batch
        self._num_lanes = num_lanes
        self._is_recurrent = is_recurrent
        self._layers: CompiledLayers | None = None
        self._pool: Any = None
        self._capturing: Any = None
        self._started_s = 0.0
        self._stopped = threading.Event()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, before: Callable[[], None]) -> None:
        """Make graphs on a thread, after `before` has run there."""
        self._thread = threading.Thread(target=self._run, args=(before,), name="bough-graphs", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the warm-up is over; False if it is not yet."""
        return self._done.wait(timeout_s)

    def close(self) -> None:
        """Make no more graphs, wait for the one under way, and let go of all; modules are as they were."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self.ready.clear()
        if self._layers is not None:
            self._layers.remove()
        self.compiled = self._layers = self._pool = None

    def find(self, num: int, *, is_run: bool, has_shared: bool) -> CapturedGraph | None:
        """The smallest graph for so many entries that is ready."""
        fitting = [
            (size.entries, size.has_shared, graph)
            for size, graph in list(self.ready.items())
            if size.is_run == is_run and size.entries >= num and (size.has_shared or not has_shared)
        ]
        return min(fitting, key=lambda found: found[:2])[2] if fitting else None

    def describe(self) -> str:
        """How steps are computed, for people."""
        state = self.readiness
        kind = "compiled + graph" if any(graph.is_compiled for graph in self.ready.values()) else "graph"
        text = f"{kind} ({len(self.ready)} graphs)" if self.ready else "eager"
        when = f", ready after {state.seconds:.0f} s" if state.is_done else ", warming up"
        return text + when + "".join(f"; {problem}" for problem in state.problems)

    def _run(self, before: Callable[[], None]) -> None:
        self._started_s = time.monotonic()
        try:
            self._attempt("nothing is made ready", partial(self._make_all, before))
        finally:
            self.readiness.seconds = time.monotonic() - self._started_s
            self.readiness.is_done = True
            self._done.set()
            log.info("steps: %s", self.describe())

    def _make_all(self, before: Callable[[], None]) -> None:
        """What is captured has a stream of its own, and with it the libraries' scratch memory: nobody else runs there."""
        device = self._forward.device
        with _cuda.device(device), _cuda.stream(_cuda.Stream(device)):
            self._capturing = _cuda.Stream(device)
            _cuda.current_stream(device).wait_stream(_cuda.default_stream(device))  # weights, and numbers to try
            self._attempt("products are the library's", before)
            self._attempt("layers are not compiled", self._compile)
            for size in self._sizes():
                if self._stopped.is_set():
                    break
                if time.monotonic() - self._started_s > _MOST_S:
                    self.readiness.problems.append(f"no graph for {size}: {_MOST_S} s were over")
                    break
                self._attempt(f"no graph for {size}", partial(self._add, size))

    def _attempt(self, what: str, make: Callable[[], None]) -> None:
        """Make something, or note why it could not be made: answers come without it, too."""
        try:
            make()
        except Exception as error:  # the compiler, the driver and the model's code may raise anything
            problem = f"{what}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            log.warning("%s", problem)
            self.readiness.problems.append(problem)

    def _sizes(self) -> Iterator[Size]:
        for entries in _STEPS:
            if entries == 1 or entries < 2 * self._num_lanes:
                yield Size(entries)
                if entries == 16:
                    yield Size(entries, has_shared=False)
        if not self._is_recurrent:
            for tokens in _RUNS:
                yield Size(tokens, is_run=True)

    def _compile(self) -> None:
        """Compile what long runs need, and steps along with it."""
        if problem := why_not(self._forward.model):
            self.readiness.problems.append(f"layers are not compiled: {problem}")
            return
        layers = compile_layers(self._forward.model)
        try:
            with layers.use():
                run_nowhere(self._forward, _LONG_TOKENS)
        except BaseException:
            layers.remove()
            raise
        self._layers = self.compiled = layers

    def _add(self, size: Size) -> None:
        batch = self._make_batch(size)
        batch.set_probe()
        logits, states = self._compute(batch)
        expected = logits.float().clone(), None if states is None else states.float().clone()
        for layers in [self._layers, None] if self._layers is not None else [None]:
            try:
                captured = self._capture(batch, layers)
                self._try_out(captured, *expected)
            except Exception:
                if layers is None:
                    raise
                log.warning("the graph for %s cannot be made of compiled layers", size, exc_info=True)
                continue
            _cuda.synchronize()
            self.ready[size] = captured
            return

    def _try_out(self, captured: CapturedGraph, logits: Tensor, states: Tensor | None) -> None:
        """Raise ArithmeticError if a graph gives something else than the modules did.

        Graphs share scratch memory, so it is replayed in one row with those that are in use.
        """
        device = self._forward.device
        with _cuda.stream(_cuda.default_stream(device)):
            pairs = {"logits": (captured.replay().float(), logits)}
            if captured.states is not None and states is not None:
                pairs["states"] = (captured.states.float(), states)
        _cuda.synchronize()
        for name, (found, expected) in pairs.items():
            difference = _difference(found, expected, captured.batch.num_probed)
            if not difference <= _MOST_DIFFERENT:
                raise ArithmeticError(f"its {name} differ from the eager ones by {difference:.2g} of their norm")

    def _capture(self, batch: StaticBatch, layers: CompiledLayers | None) -> CapturedGraph:
        with layers.use() if layers is not None else nullcontext():
            for _ in range(2):  # what is made at first use must be there before
                batch.compute()
            _cuda.synchronize()
            graph = _cuda.CUDAGraph()
            with _cuda.graph(graph, pool=self._pool, stream=self._capturing, capture_error_mode="thread_local"):
                logits, states = self._compute(batch)
        self._pool = self._pool or graph.pool()
        return CapturedGraph(batch, graph, logits, layers is not None, states)

    def _compute(self, batch: StaticBatch) -> tuple[Tensor, Tensor | None]:
        """The logits of a pass, and of a run what the head has read."""
        if not (batch.is_run and self._forward.state_size):
            return batch.compute(), None
        with self._forward.watching_head() as seen:
            logits = batch.compute()
        return logits, seen.states


def _difference(found: Tensor, expected: Tensor, num: int) -> float:
    return float((found[:num] - expected[:num]).norm() / expected[:num].norm())
