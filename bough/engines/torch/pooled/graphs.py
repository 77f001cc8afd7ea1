"""Passes over static buffers: as CUDA graphs where one is ready, else module by module.

Graphs are made on a separate thread while the engine already answers without them. First products are measured, then
decoder layers are compiled, then each size of a step and of a short run is captured, with compiled layers if that works. A
graph is used only if its logits equal those of the model's own modules, up to rounding, on a few rows of random numbers;
otherwise the reason is recorded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bough.engines.torch.forward import TorchForward
from bough.engines.torch.layout import TorchLayout
from bough.engines.torch.pooled.compiling import CompiledLayers, compile_layers, why_not
from bough.engines.torch.pooled.lane import PooledTorchLane
from bough.engines.torch.pooled.long_run import run_nowhere
from bough.engines.torch.pooled.memory import PoolMemory
from bough.engines.torch.pooled.static_batch import PassSize, StaticBatch
from bough.engines.torch.pooled.wiring import Wiring

log = logging.getLogger(__name__)

_cuda: Any = torch.cuda  # which is not fully typed
_STEPS = (1, 16, 64, 32)
_RUNS = (32, 16, 64, 256)
LARGEST_STEP = 64
_MOST_DIFFERENT = 0.25  # the norm of the difference to the eager logits, relative to theirs; rounding may change an expert
_LONG_TOKENS = 1024
_MOST_S = 300  # after which no further graph is begun


@dataclass(eq=False)
class CapturedGraph:
    """A pass over these entries as a graph, which writes its logits always to the same memory.

    For a run, and if the head is known, it also writes the head's input to `states` [entries, hidden].
    """

    batch: StaticBatch
    graph: Any
    logits: Tensor
    is_compiled: bool
    states: Tensor | None = None

    def replay(self) -> Tensor:
        """The logits [entries, vocabulary], valid until the next replay."""
        self.graph.replay()
        return self.logits


class Graphs:
    """The graphs of one model. Other threads than the one that makes them read only `ready` and `compiled`.

    `problems` explain to people which parts are slower than they could be.
    """

    def __init__(
        self, forward: TorchForward, make_batch: Callable[[PassSize], StaticBatch], num_lanes: int, *, is_recurrent: bool
    ) -> None:
        """With `is_recurrent` there are no graphs of runs, because a state must take the tokens one by one."""
        self.ready: dict[PassSize, CapturedGraph] = {}
        self.compiled: CompiledLayers | None = None  # once long runs may use it
        self.problems: list[str] = []
        self._forward = forward
        self._make_batch = make_batch
        self._num_lanes = num_lanes
        self._is_recurrent = is_recurrent
        self._layers: CompiledLayers | None = None
        self._pool: Any = None
        self._capturing: Any = None
        self._started_s = self._took_s = 0.0
        self._stopped = threading.Event()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, before: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(before,), name="bough-graphs", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the warm-up is over; returns False after the timeout."""
        return self._done.wait(timeout_s)

    def close(self) -> None:
        """Wait for the graph that is being made, release all graphs, and leave the modules as they were."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
        self.ready.clear()
        if self._layers is not None:
            self._layers.remove()
        self.compiled = self._layers = self._pool = None

    def find(self, num: int, *, is_run: bool, has_shared: bool) -> CapturedGraph | None:
        """The smallest ready graph with room for that many entries."""
        fitting = [
            (size.entries, size.has_shared, graph)
            for size, graph in list(self.ready.items())
            if size.is_run == is_run and size.entries >= num and (size.has_shared or not has_shared)
        ]
        return min(fitting, key=lambda found: found[:2])[2] if fitting else None

    def describe(self) -> str:
        """How steps are computed, for people."""
        kind = "compiled + graph" if any(graph.is_compiled for graph in self.ready.values()) else "graph"
        text = f"{kind} ({len(self.ready)} graphs)" if self.ready else "eager"
        when = f", ready after {self._took_s:.0f} s" if self._done.is_set() else ", warming up"
        return text + when + "".join(f"; {problem}" for problem in self.problems)

    def _run(self, before: Callable[[], None]) -> None:
        self._started_s = time.monotonic()
        try:
            self._attempt("nothing is made ready", partial(self._make_all, before))
        finally:
            self._took_s = time.monotonic() - self._started_s
            self._done.set()
            log.info("steps: %s", self.describe())

    def _make_all(self, before: Callable[[], None]) -> None:
        """Captures have a stream of their own, and so the libraries' scratch memory there is used by nothing else."""
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
                    self.problems.append(f"no graph for {size}: {_MOST_S} s were over")
                    break
                self._attempt(f"no graph for {size}", partial(self._add, size))

    def _attempt(self, what: str, make: Callable[[], None]) -> None:
        """Call `make`, or record why it failed: the engine answers without it, too."""
        try:
            make()
        except Exception as error:  # the compiler, the driver and the model's code may raise anything
            problem = f"{what}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            log.warning("%s", problem)
            self.problems.append(problem)

    def _sizes(self) -> Iterator[PassSize]:
        for entries in _STEPS:
            if entries == 1 or entries < 2 * self._num_lanes:
                yield PassSize(entries)
                if entries == 16:
                    yield PassSize(entries, has_shared=False)
        if not self._is_recurrent:
            for tokens in _RUNS:
                yield PassSize(tokens, is_run=True)

    def _compile(self) -> None:
        """Compile the code of long runs; that of steps is compiled when they are captured."""
        if problem := why_not(self._forward.model):
            self.problems.append(f"layers are not compiled: {problem}")
            return
        layers = compile_layers(self._forward.model)
        try:
            with layers.use():
                run_nowhere(self._forward, _LONG_TOKENS)
        except BaseException:
            layers.remove()
            raise
        self._layers = self.compiled = layers

    def _add(self, size: PassSize) -> None:
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
        """Raise ArithmeticError if a graph's results differ from the modules'.

        Graphs share scratch memory, so it is replayed on the stream of those that are in use.
        """
        device = self._forward.device
        with _cuda.stream(_cuda.default_stream(device)):
            pairs = {"logits": (captured.replay().float(), logits)}
            if captured.states is not None and states is not None:
                pairs["states"] = (captured.states.float(), states)
        _cuda.synchronize()
        num = captured.batch.num_probed
        for name, (found, expected) in pairs.items():
            difference = float((found[:num] - expected[:num]).norm() / expected[:num].norm())
            if not difference <= _MOST_DIFFERENT:
                raise ArithmeticError(f"its {name} differ from the eager ones by {difference:.2g} of their norm")

    def _capture(self, batch: StaticBatch, layers: CompiledLayers | None) -> CapturedGraph:
        with layers.use() if layers is not None else nullcontext():
            for _ in range(2):  # nothing may be made at first use during the capture
                batch.compute()
            _cuda.synchronize()
            graph = _cuda.CUDAGraph()
            with _cuda.graph(graph, pool=self._pool, stream=self._capturing, capture_error_mode="thread_local"):
                logits, states = self._compute(batch)
        self._pool = self._pool or graph.pool()
        return CapturedGraph(batch, graph, logits, layers is not None, states)

    def _compute(self, batch: StaticBatch) -> tuple[Tensor, Tensor | None]:
        """The logits of a pass, and for a run the head's input."""
        if not (batch.size.is_run and self._forward.state_size):
            return batch.compute(), None
        with self._forward.watching_head() as seen:
            logits = batch.compute()
        return logits, seen.states


class Passes:
    """Passes over static buffers: graphs that are ready, else buffers in sizes of powers of two, made at first use."""

    def __init__(self, forward: TorchForward, layout: TorchLayout, memory: PoolMemory, wiring: Wiring) -> None:
        self.graphs: Graphs | None = None
        self._forward = forward
        self._layout = layout
        self._memory = memory
        self._wiring = wiring
        self._eager: dict[PassSize, StaticBatch] = {}

    def warm_up(self, num_lanes: int, before: Callable[[], None]) -> None:
        """Make graphs for that many lanes, on a separate thread. Their slots are taken here, by the arena's thread."""
        for group in self._wiring.shared:
            self._memory.probe_slots(group)
        self.graphs = Graphs(self._forward, self._make_batch, num_lanes, is_recurrent=bool(self._layout.states))
        self.graphs.start(before)

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.close()
        self._eager.clear()

    def step(self, lanes: Sequence[PooledTorchLane], ids: Sequence[int] | Tensor) -> Tensor:
        """The logits [lanes, vocabulary] after one more token on each lane."""
        if len(lanes) > LARGEST_STEP:
            first = self.step(lanes[:LARGEST_STEP], ids[:LARGEST_STEP])
            return torch.cat([first, self.step(lanes[LARGEST_STEP:], ids[LARGEST_STEP:])])
        batch, compute = self._choose(len(lanes), is_run=False, has_shared=_share_slots(lanes))
        batch.set_lanes(lanes, ids)
        return compute()[: len(lanes)].clone()

    def run(self, lane: PooledTorchLane, ids: Sequence[int]) -> Tensor:
        """The logits [run, vocabulary] after each token of a short run."""
        batch, compute = self._choose(len(ids), is_run=True, has_shared=True)
        batch.set_run(lane, ids)
        return compute()[: len(ids)].clone()

    def run_state(self, lane: PooledTorchLane, ids: Sequence[int]) -> Tensor | None:
        """The head's input after a short run, [hidden], in float32; None if no graph computes it."""
        graph = self.graphs.find(len(ids), is_run=True, has_shared=True) if self.graphs is not None else None
        if graph is None or graph.states is None:
            return None
        graph.batch.set_run(lane, ids)
        graph.replay()
        return graph.states[len(ids) - 1].to(torch.float32, copy=True)

    def long_run(self) -> AbstractContextManager[None]:
        """A context in which long runs use compiled layers, once these are ready."""
        layers = self.graphs.compiled if self.graphs is not None else None
        return nullcontext() if layers is None else layers.use()

    def _choose(self, num: int, *, is_run: bool, has_shared: bool) -> tuple[StaticBatch, Callable[[], Tensor]]:
        """The entries to fill, and the function that computes over them: a graph's, if one is ready."""
        size = PassSize(1 << (num - 1).bit_length(), is_run)
        graph = self.graphs.find(num, is_run=is_run, has_shared=has_shared) if self.graphs is not None else None
        if graph is not None:
            self._eager.pop(size, None)  # its buffers are large
            return graph.batch, graph.replay
        if size not in self._eager:
            self._eager[size] = self._make_batch(size)
        return self._eager[size], self._eager[size].compute

    def _make_batch(self, size: PassSize) -> StaticBatch:
        return StaticBatch(self._forward, self._layout, self._memory, self._wiring, size)


def _share_slots(lanes: Sequence[PooledTorchLane]) -> bool:
    """Whether any two of these lanes share a slot: if so, they share their first one."""
    firsts = [id(rows.pieces[0].slot) for lane in lanes for rows in lane.row_groups()]
    return len(set(firsts)) < len(firsts)
