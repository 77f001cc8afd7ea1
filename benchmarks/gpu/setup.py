"""What `python -m benchmarks gpu` measures, in which sizes, and what a figure is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

IN_PROCESS = ("decode", "first", "restore", "memory")
"""The parts that share one loaded model, in the order of measuring."""

IN_CHILDREN = ("start", "http")
"""The parts that load the model in processes of their own, when this one has given its memory back."""

PARTS = (*IN_PROCESS, *IN_CHILDREN)


@dataclass(frozen=True)
class GpuSetup:
    """The model and the sizes. `settings` are those of the engine; `lanes` and `distinct` are numbers of requests.

    A decode case runs `windows` windows of `steps` tokens for each request, after `warm_tokens` that are not measured.
    """

    shape: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 8192
    lanes: Sequence[int] = (1, 4, 16, 64)
    distinct: int = 16
    steps: int = 128
    windows: int = 3
    warm_tokens: int = 32
    tail_tokens: int = 16
    rounds: int = 5
    rest_s: float = 0.25
    new_tokens: Sequence[int] = (1, 20, 64, 256)
    conversations: int = 5
    is_profiled: bool = False

    @property
    def num_lanes(self) -> int:
        """The lanes that the engine needs for all parts."""
        return max(*self.lanes, self.distinct, self.conversations)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class GpuFigure:
    """One measured number with its unit. `detail` has what it was made of, for the JSON file."""

    name: str
    value: float
    unit: str
    detail: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
