"""The actor that passes on the reports of replicas: their figures and rates, and the pages of their trees.

It is separate from Serve's controller, so that many messages delay no deployment. No answer depends on its content: when
it is lost, Ray restarts it, and replicas report again. A router that has missed messages asks for listings; each replica
sends one with its next report.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from bough.cache.disk.keys import SECRET_BYTES
from bough.routing import ReplicaRates

LOST_S = 5.0
"""A replica that has not reported for this long counts as gone."""

MOST_MESSAGES, MOST_BYTES = 4096, 64 * 2**20
"""The limits of the messages that wait for routers; a router that is further behind asks for listings."""

NAMESPACE = "serve"


@dataclass(frozen=True)
class ReplicaReport:
    """A report of a replica. `replica_id` is its id at Serve; `messages` are packed changes and listings of its pages."""

    name: str
    replica_id: str
    figures: dict[str, Any]
    rates: ReplicaRates = field(default_factory=ReplicaRates)
    messages: Sequence[bytes] = ()


@dataclass(frozen=True)
class News:
    """The living replicas, and new messages up to the number `sequence`; with `has_gap`, earlier ones are missing."""

    replicas: dict[str, ReplicaReport]
    messages: list[bytes]
    sequence: int
    has_gap: bool


class Holdings:
    """The last report of each replica of one application, and the messages that wait for routers.

    Always true: the bytes of the messages are counted, and within the limits unless there is only one.
    """

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret = secret
        self._clock = clock
        self._reports: dict[str, tuple[ReplicaReport, float]] = {}  # without messages, and when it came
        self._messages: deque[bytes] = deque()
        self._message_bytes = 0
        self._sequence = 0
        self._wants_listing: set[str] = set()

    def read_secret(self) -> bytes:
        """The secret of all page digests. It is not needed beyond the cluster's life."""
        return self._secret

    def report(self, report: ReplicaReport) -> bool:
        """Store a report in place of the last one of that name; returns whether its replica should send a listing."""
        self._reports[report.name] = replace(report, messages=()), self._clock()
        self._messages.extend(report.messages)
        self._message_bytes += sum(map(len, report.messages))
        self._sequence += len(report.messages)
        while len(self._messages) > MOST_MESSAGES or (self._message_bytes > MOST_BYTES and len(self._messages) > 1):
            self._message_bytes -= len(self._messages.popleft())
        is_wanted = report.name in self._wants_listing
        self._wants_listing.discard(report.name)
        return is_wanted

    def leave(self, name: str, replica_id: str) -> None:
        """Forget a replica that ends, unless another has reported under its name."""
        if name in self._reports and self._reports[name][0].replica_id == replica_id:
            del self._reports[name]

    def read(self) -> dict[str, ReplicaReport]:
        """The last reports of the living replicas."""
        now = self._clock()
        self._reports = {name: known for name, known in self._reports.items() if now - known[1] < LOST_S}
        return {name: report for name, (report, _) in self._reports.items()}

    def read_news(self, sequence: int, wanted: Sequence[str]) -> News:
        """The messages after number `sequence`. Asks the replicas `wanted` for listings.

        Of the figures only the queue's length is included: routers ask several times a second.
        """
        self._wants_listing.update(wanted)
        num_new = self._sequence - sequence
        has_gap = not 0 <= num_new <= len(self._messages)  # below 0: this actor was restarted
        messages = list(self._messages)[len(self._messages) - num_new :] if num_new and not has_gap else []
        replicas = {
            name: replace(report, figures={"queue": report.figures.get("queue", 0)}) for name, report in self.read().items()
        }
        return News(replicas, messages, self._sequence, has_gap)


def find_holdings(application: str) -> Any:
    """The actor of an application, started if there is none. It keeps its secret when Ray restarts it."""
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Holdings)
    return actor.options(
        name=f"bough-holdings-{application}", namespace=NAMESPACE, lifetime="detached", get_if_exists=True
    ).remote(secrets.token_bytes(SECRET_BYTES))
