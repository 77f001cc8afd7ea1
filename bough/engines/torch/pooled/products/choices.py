"""Which kernel computes each product of a model: found by measuring on the device, and kept as a small file.

A weight is measured as a step meets it: not in the device's cache. Our own kernels are taken only where they are right and
at least 2 % faster than the library. What the deadline left unmeasured is the library's.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.engines.self_check.verdicts import hash_features
from bough.engines.torch.pooled.products.linears import Choice, list_products, multiply, read_choices, write_choices
from bough.system.folders import write_private

_VERSION = 1  # of the kernels and the list of tilings
_MARGIN = 0.98
_MOST_ROWS_OF_KERNEL = 16
_LONGEST_WHOLE_ROW = 8192
_ONE_ROW = ((16, 512, 4, 4), (8, 1024, 4, 3), (4, 1024, 4, 4))
_FEW_ROWS = ((32, 256, 4, 4), (32, 256, 4, 5), (16, 256, 4, 5), (64, 128, 4, 5), (64, 256, 8, 4))
_LIBRARIES = ("cublas", "cublaslt")
_TYPES = (torch.bfloat16, torch.float16)
_FEWEST_LAUNCHES = 16
_MOST_LAUNCHES = 64
_REPLAYS = 5
_LARGEST_ERROR = 0.02

Launch = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """A weight's shape [n, k] and type, as all layers of a kind have it."""

    n: int
    k: int
    dtype: str

    @classmethod
    def of(cls, weight: Tensor) -> Shape:
        n, k = weight.shape
        return cls(n, k, str(weight.dtype).removeprefix("torch."))

    def __str__(self) -> str:
        return f"{self.n}x{self.k} {self.dtype}"


@dataclass(frozen=True)
class Bench:
    """What is measured on: a device, whether it has TMA, how many bytes its cache surely does not hold, and a timer.

    The timer gives the microseconds of one of the launches that it is given, on average.
    """

    device: torch.device
    name: str
    has_tma: bool
    cold_bytes: int
    time_us: Callable[[Sequence[Launch]], float]


@dataclass(frozen=True)
class ProductTable:
    """The choices for each shape, how many pairs of shape and rows were not measured, and what did not run."""

    choices: Mapping[str, str]
    num_left_out: int = 0
    measured_s: float = 0.0
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """For people: how many products our kernels and cuBLASLt compute."""
        chosen = [choice.way for text in self.choices.values() if text for choice in read_choices(text)]
        own = len(chosen) - sum(chosen.count(library) for library in _LIBRARIES)
        text = f"{len(self.choices)} shapes measured in {self.measured_s:.1f} s: {own} products by own kernels, "
        text += f"{chosen.count('cublaslt')} by cuBLASLt"
        return text + (f", {self.num_left_out} not measured in time" if self.num_left_out else "")


@dataclass
class _Weights:
    """The weights of one shape, each with its bias."""

    items: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        return sum(weight.nbytes for weight, _ in self.items)

    def spread(self, cold_bytes: int) -> list[tuple[Tensor, Tensor | None]]:
        """Weights for the launches of one measurement: copies are added until they outgrow the device's cache."""
        items = self.items[:_MOST_LAUNCHES]
        size = items[0][0].nbytes
        missing = -(-cold_bytes // size) - len(items)
        items = items + [(items[0][0].clone(), items[0][1]) for _ in range(min(missing, _MOST_LAUNCHES))]
        return list(itertools.islice(itertools.cycle(items), max(len(items), _FEWEST_LAUNCHES)))


def find_products(folder: Path, model: nn.Module, rows: Sequence[int], bench: Bench, deadline_s: float) -> ProductTable:
    """The table that `folder` keeps for this model's shapes on this device, or the one measured now.

    Only a complete table is kept. One that cannot be read or written is measured again at the next start.
    """
    shapes = sorted(map(str, _weights_of(model)))
    file = folder / f"{hash_features([_VERSION, bench.name, bench.has_tma, torch.__version__, shapes, list(rows)])}.json"
    table = _load(file)
    if table is None:
        table = measure_products(model, rows, bench, deadline_s)
        if not table.num_left_out:
            _save(file, table)
    return table


def use_products(model: nn.Module, table: ProductTable) -> None:
    """Give each linear layer of a model the choices for its shape. Code that is compiled later has them built in."""
    for module, weight, _ in list_products(model):
        module.choices = table.choices.get(str(Shape.of(weight)), "")


@torch.inference_mode()
def measure_products(
    model: nn.Module,
    rows: Sequence[int],
    bench: Bench,
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> ProductTable:
    """Measure every shape of the model at each number of rows, the first of `rows` and the largest weights first."""
    began = clock()
    measuring = _Measuring(bench, lambda: clock() - began > deadline_s)
    weights = sorted(_weights_of(model).items(), key=lambda item: -item[1].total_bytes)
    found: dict[Shape, list[Choice]] = {shape: [] for shape, _ in weights}
    for num_rows, (shape, held) in itertools.product(rows, weights):
        times = measuring.time_all(shape, held, num_rows)
        if times:
            found[shape].append(choose(times))
    texts = {str(shape): _text_of(choices) for shape, choices in found.items()}
    return ProductTable(texts, measuring.num_left_out, round(clock() - began, 1), tuple(measuring.notes))


def choose(times: Mapping[Choice, float]) -> Choice:
    """The fastest; but cuBLASLt only if clearly faster than cuBLAS, and our kernels only if clearly faster than both."""
    plain, other = (next(choice for choice in times if choice.way == library) for library in _LIBRARIES)
    library = other if times[other] <= _MARGIN * times[plain] else plain
    best = min((choice for choice in times if choice.tiling), key=times.__getitem__, default=library)
    return best if times[best] <= _MARGIN * times[library] else library


def candidates(shape: Shape, rows: int, has_tma: bool) -> list[Choice]:
    """The ways of computing a product of that many rows, the libraries first."""
    found = [Choice(rows, library) for library in _LIBRARIES]
    if rows == 1:
        whole = max(16, 1 << (shape.k - 1).bit_length())
        tilings = [(1, whole, 4, 1), (2, whole, 4, 1)] if whole <= _LONGEST_WHOLE_ROW else []
        found += [
            Choice(rows, "one_row", tiling) for tiling in (*tilings, *(each for each in _ONE_ROW if each[1] < shape.k))
        ]
    elif rows <= _MOST_ROWS_OF_KERNEL and has_tma and shape.k % 8 == 0:  # TMA wants rows at multiples of 16 bytes
        found += [Choice(rows, "few_rows", tiling) for tiling in _FEW_ROWS]
    return found


def cuda_bench(device: torch.device) -> Bench:
    """A CUDA device, timed by graphs and events."""
    properties = torch.cuda.get_device_properties(device)
    has_tma = properties.major >= 9
    return Bench(device, properties.name, has_tma, 3 * properties.L2_cache_size, lambda each: _time_on_cuda(device, each))


def _weights_of(model: nn.Module) -> dict[Shape, _Weights]:
    found: dict[Shape, _Weights] = defaultdict(_Weights)
    for _, weight, bias in list_products(model):
        if weight.dtype in _TYPES and weight.is_contiguous():
            found[Shape.of(weight)].items.append((weight, bias))
    return dict(found)


@dataclass
class _Measuring:
    """One run over a model's shapes, until it is late."""

    bench: Bench
    is_late: Callable[[], bool]
    num_left_out: int = 0
    notes: list[str] = field(default_factory=list)

    def time_all(self, shape: Shape, weights: _Weights, rows: int) -> dict[Choice, float]:
        """Microseconds of each candidate that runs and is right; nothing if that was not found out in time."""
        generator = torch.Generator(self.bench.device)  # not the device's own: another engine may capture a graph
        drawn = torch.randn(rows, shape.k, device=self.bench.device, generator=generator)
        x = drawn.to(getattr(torch, shape.dtype))
        items, times = weights.spread(self.bench.cold_bytes), dict[Choice, float]()
        for choice in candidates(shape, rows, self.bench.has_tma):
            if self.is_late():
                self.num_left_out += 1
                return {}
            if not choice.tiling or self._is_right(x, *items[0], choice):
                times[choice] = self.bench.time_us([_launch_of(x, weight, bias, choice) for weight, bias in items])
        return times

    def _is_right(self, x: Tensor, weight: Tensor, bias: Tensor | None, choice: Choice) -> bool:
        """Whether a kernel runs on this device and gives torch's result; if not, a note says so."""
        expected = F.linear(x, weight, bias).float()
        try:
            error = float((multiply(x, weight, bias, choice).float() - expected).norm() / expected.norm())
        except Exception as failure:  # Triton has an exception for each stage of compiling, and for lack of shared memory
            self.notes.append(f"{choice} for {Shape.of(weight)} does not run here: {type(failure).__name__}")
            return False
        if not error <= _LARGEST_ERROR:
            self.notes.append(f"{choice} for {Shape.of(weight)} is wrong here: off by {error:.1%}")
        return error <= _LARGEST_ERROR


def _launch_of(x: Tensor, weight: Tensor, bias: Tensor | None, choice: Choice) -> Launch:
    return lambda: multiply(x, weight, bias, choice)


def _text_of(choices: list[Choice]) -> str:
    """No text where cuBLAS computes everything: then the layer calls torch directly."""
    return write_choices(choices) if any(choice.way != "cublas" for choice in choices) else ""


def _time_on_cuda(device: torch.device, launches: Sequence[Launch]) -> float:
    """Launches are recorded in a graph, because launching some of them takes longer than they run."""
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        launches[0]()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for launch in launches:
                launch()
        finally:
            graph.capture_end()
        return sorted(_replay_ms(graph) for _ in range(_REPLAYS + 1))[_REPLAYS // 2] * 1e3 / len(launches)


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record()
    graph.replay()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def _load(file: Path) -> ProductTable | None:
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        choices = {str(shape): str(text) for shape, text in fields["choices"].items()}
        for text in filter(None, choices.values()):
            read_choices(text)
        return ProductTable(choices, 0, float(fields["measured_s"]), tuple(fields["notes"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _save(file: Path, table: ProductTable) -> None:
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        fields = {"choices": dict(table.choices), "measured_s": table.measured_s, "notes": table.notes}
        write_private(file, json.dumps(fields, indent=1))
