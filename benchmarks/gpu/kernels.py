"""The kernels of a decode step, by torch's profiler: how often each runs, and how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

MOST_KERNELS = 24
_NAME_LENGTH = 90


@dataclass(frozen=True)
class Kernel:
    """One kernel, or on a CPU one operator: its runs and microseconds in one step."""

    name: str
    runs: float
    microseconds: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def count_kernels(run: Callable[[], None], steps: int) -> list[Kernel]:
    """The kernels of so many steps that `run` makes, for one step, the longest first; on a machine without CUDA, operators.

    An engine that computes ahead may have begun one step more: with several steps that is rounded away in the counts.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    is_cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as found:
        run()
        if is_cuda:
            torch.cuda.synchronize()
    kernels = [
        Kernel(each.key[:_NAME_LENGTH], round(each.count / steps, 1), round(_microseconds(each, is_cuda) / steps, 1))
        for each in found.key_averages()
    ]
    return sorted(kernels, key=lambda each: -each.microseconds)[:MOST_KERNELS]


def _microseconds(event: Any, is_cuda: bool) -> float:
    return float(event.self_device_time_total if is_cuda else event.self_cpu_time_total)
