"""What the server says of its health: which models are loaded, whether they answer, and whether their state is saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bough.server.serving.loaded import LoadedModels

DiskState = Literal["ok", "failing", "full", "read-only", "unavailable", "off"]


@dataclass(frozen=True)
class Checks:
    """How many answers were computed again without reuse, and how many of them came out different: none should."""

    num_verified: int
    num_different: int


class ServiceHealth:
    """Read from the last snapshots of the loaded models, so it never waits."""

    def __init__(self, models: LoadedModels) -> None:
        self._models = models

    @property
    def loaded_names(self) -> list[str]:
        """The loaded models, the one that was used last first."""
        return [loaded.name for loaded in self._models.list()]

    @property
    def is_stuck(self) -> bool:
        return any(loaded.worker.is_stuck for loaded in self._models.list())

    @property
    def _snapshots(self) -> list[dict[str, Any]]:
        return [loaded.worker.snapshot() for loaded in self._models.list()]

    @property
    def has_replicas(self) -> bool:
        """Whether every loaded model that runs at replicas has one that answers."""
        return all(figures.get("replicas", True) for figures in self._snapshots)

    @property
    def disk_state(self) -> DiskState:
        """Whether computed state is saved to disk. If not, requests are still answered, but a restart loses more."""
        found = self._snapshots
        if any(figures.get("disk_is_failing") for figures in found):
            return "failing"
        if any(figures.get("disk_is_read_only") for figures in found):
            return "read-only"
        if troubled := [figures for figures in found if figures.get("disk_problem")]:
            return "full" if all("disk_bytes" in figures for figures in troubled) else "unavailable"
        return "ok" if any("disk_bytes" in figures for figures in found) else "off"

    @property
    def disk_problem(self) -> str:
        """Why computed state of a loaded model is not saved to disk; "" if it is, or need not be."""
        return next(filter(None, (figures.get("disk_problem", "") for figures in self._snapshots)), "")

    def count_checks(self) -> Checks:
        found = self._snapshots
        return Checks(*(sum(figures.get(name, 0) for figures in found) for name in ("verified", "different")))
