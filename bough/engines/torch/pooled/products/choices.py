"""The kernel for each product of a model: chosen by measuring on the device, and kept as a small file.

Weights are measured outside of the device's cache, as in a step. Our own kernels are chosen only where they are correct and
at least 2 % faster than the library. Products that were not measured before the deadline are computed by the library.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.engines.self_check.check import hash_features
from bough.engines.torch.pooled.products.linears import ProductChoice, list_products, multiply, read_choices, write_choices
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

log = logging.getLogger(__name__)

Launch = Callable[[], object]
_Weight = tuple[Tensor, Tensor | None]  # with its bias


@dataclass(frozen=True)
class Shape:
    """A weight's shape [n, k] and type, the same for all layers of a kind."""

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
    """The device that is measured: `cold_bytes` exceed its cache, `time_us` returns the mean microseconds of launches."""

    device: torch.device
    name: str
    has_tma: bool
    cold_bytes: int
    time_us: Callable[[Sequence[Launch]], float]


@dataclass(frozen=True)
class ProductTable:
    """The choices for each shape, and how many pairs of shape and rows were not measured."""

    choices: Mapping[str, str]
    num_left_out: int = 0


def find_products(folder: Path, model: nn.Module, rows: Sequence[int], bench: Bench, deadline_s: float) -> ProductTable:
    """The table in `folder` for this model's shapes on this device, or the one measured now.

    Only a complete table is saved. One that cannot be read or written is measured again at the next start.
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
    """Set the choices of each linear layer of a model. Code that is compiled later has them built in."""
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
    weights = sorted(_weights_of(model).items(), key=lambda item: -sum(weight.nbytes for weight, _ in item[1]))
    found: dict[Shape, list[ProductChoice]] = {shape: [] for shape, _ in weights}
    for num_rows, (shape, own) in itertools.product(rows, weights):
        times = measuring.time_all(shape, own, num_rows)
        if times:
            found[shape].append(choose(times))
    texts = {}
    for shape, choices in found.items():  # "" where cuBLAS computes everything: then the layer calls torch directly
        texts[str(shape)] = write_choices(choices) if any(choice.way != "cublas" for choice in choices) else ""
    return ProductTable(texts, measuring.num_left_out)


def choose(times: Mapping[ProductChoice, float]) -> ProductChoice:
    """The fastest choice; cuBLASLt only if clearly faster than cuBLAS, and our kernels only if clearly faster than both."""
    plain, other = (next(choice for choice in times if choice.way == library) for library in _LIBRARIES)
    library = other if times[other] <= _MARGIN * times[plain] else plain
    best = min((choice for choice in times if choice.tiling), key=times.__getitem__, default=library)
    return best if times[best] <= _MARGIN * times[library] else library


def candidates(shape: Shape, rows: int, has_tma: bool) -> list[ProductChoice]:
    """The candidates for a product of that many rows, the libraries first."""
    found = [ProductChoice(rows, library) for library in _LIBRARIES]
    if rows == 1:
        whole = max(16, 1 << (shape.k - 1).bit_length())
        tilings = [(1, whole, 4, 1), (2, whole, 4, 1)] if whole <= _LONGEST_WHOLE_ROW else []
        tilings += [tiling for tiling in _ONE_ROW if tiling[1] < shape.k]
        found += [ProductChoice(rows, "one_row", tiling) for tiling in tilings]
    elif rows <= _MOST_ROWS_OF_KERNEL and has_tma and shape.k % 8 == 0:  # TMA wants rows at multiples of 16 bytes
        found += [ProductChoice(rows, "few_rows", tiling) for tiling in _FEW_ROWS]
    return found


def cuda_bench(device: torch.device) -> Bench:
    properties = torch.cuda.get_device_properties(device)
    has_tma = properties.major >= 9
    return Bench(device, properties.name, has_tma, 3 * properties.L2_cache_size, lambda each: _time_on_cuda(device, each))


def _weights_of(model: nn.Module) -> dict[Shape, list[_Weight]]:
    found: dict[Shape, list[_Weight]] = defaultdict(list)
    for _, weight, bias in list_products(model):
        if weight.dtype in _TYPES and weight.is_contiguous():
            found[Shape.of(weight)].append((weight, bias))
    return dict(found)


def _spread(weights: list[_Weight], cold_bytes: int) -> list[_Weight]:
    """Weights for the launches of one measurement: copies are added until they exceed the device's cache."""
    weights = weights[:_MOST_LAUNCHES]
    weight, bias = weights[0]
    missing = -(-cold_bytes // weight.nbytes) - len(weights)
    weights = weights + [(weight.clone(), bias) for _ in range(min(missing, _MOST_LAUNCHES))]
    return list(itertools.islice(itertools.cycle(weights), max(len(weights), _FEWEST_LAUNCHES)))


@dataclass
class _Measuring:
    """One run over a model's shapes, until the deadline."""

    bench: Bench
    is_late: Callable[[], bool]
    num_left_out: int = 0

    def time_all(self, shape: Shape, weights: list[_Weight], rows: int) -> dict[ProductChoice, float]:
        """Microseconds of each candidate that runs and is correct; empty if the deadline passes."""
        generator = torch.Generator(self.bench.device)  # not the device's own: another engine may capture a graph
        drawn = torch.randn(rows, shape.k, device=self.bench.device, generator=generator)
        x = drawn.to(getattr(torch, shape.dtype))
        spread, times = _spread(weights, self.bench.cold_bytes), dict[ProductChoice, float]()
        for choice in candidates(shape, rows, self.bench.has_tma):
            if self.is_late():
                self.num_left_out += 1
                return {}
            if not choice.tiling or self._is_correct(x, *spread[0], choice):
                times[choice] = self.bench.time_us([partial(multiply, x, weight, bias, choice) for weight, bias in spread])
        return times

    def _is_correct(self, x: Tensor, weight: Tensor, bias: Tensor | None, choice: ProductChoice) -> bool:
        """Whether a kernel runs on this device and gives torch's result."""
        expected = F.linear(x, weight, bias).float()
        try:
            error = float((multiply(x, weight, bias, choice).float() - expected).norm() / expected.norm())
        except Exception as failure:  # Triton has an exception for each stage of compiling, and for lack of shared memory
            log.info("%s for %s does not run here: %s", choice, Shape.of(weight), type(failure).__name__)
            return False
        if not error <= _LARGEST_ERROR:
            log.warning("%s for %s is wrong here: off by %s", choice, Shape.of(weight), f"{error:.1%}")
        return error <= _LARGEST_ERROR


def _time_on_cuda(device: torch.device, launches: Sequence[Launch]) -> float:
    """Mean microseconds of the launches, recorded in a graph, because launching some takes longer than running them."""
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
        found = json.loads(file.read_text(encoding="utf-8"))
        choices = {str(shape): str(text) for shape, text in found["choices"].items()}
        for text in filter(None, choices.values()):
            read_choices(text)
        return ProductTable(choices)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _save(file: Path, table: ProductTable) -> None:
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, json.dumps({"choices": dict(table.choices)}, indent=1))
