"""The actor that knows what replicas tell of themselves: which live, under which names, and their figures.

It is apart from Serve's controller, so that many messages delay no deployment. What it knows is never needed for a right
answer: when it is lost, Ray starts it anew, and replicas tell it again within a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

LOST_S = 5.0
"""A replica that has told nothing for so long counts as gone."""

NAMESPACE = "serve"


@dataclass
class Known:
    """One replica: its id at Serve, its figures, and when it told them."""

    replica_id: str
    figures: dict[str, Any]
    told_s: float


class Holdings:
    """What is known of the replicas of one application, by their names."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[str, Known] = {}

    def report(self, name: str, replica_id: str, figures: dict[str, Any]) -> None:
        """A replica tells its figures. One with the same name that lived before is forgotten."""
        self._known[name] = Known(replica_id, figures, self._clock())

    def leave(self, name: str, replica_id: str) -> None:
        """A replica ends."""
        if name in self._known and self._known[name].replica_id == replica_id:
            del self._known[name]

    def read(self) -> dict[str, Known]:
        """The replicas that live."""
        now = self._clock()
        self._known = {name: known for name, known in self._known.items() if now - known.told_s < LOST_S}
        return self._known


def find_holdings(application: str) -> Any:
    """The actor of an application, which is started if there is none."""
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Holdings)
    return actor.options(
        name=f"bough-holdings-{application}", namespace=NAMESPACE, lifetime="detached", get_if_exists=True
    ).remote()
