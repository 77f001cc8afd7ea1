"""The actor that passes on what replicas tell of themselves: their figures and rates, and the pages of their trees.

It is apart from Serve's controller, so that many messages delay no deployment. What it knows is never needed for a right
answer: when it is lost, Ray starts it anew, and replicas tell it again. A router that has missed messages asks for
listings; each replica sends one with its next report.
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
"""A replica that has told nothing for so long counts as gone."""

MOST_MESSAGES, MOST_BYTES = 4096, 64 * 2**20
"""So many messages wait for routers, and so many bytes of them; a router that is further behind asks for listings."""

NAMESPACE = "serve"


@dataclass(frozen=True)
class Report:
    """What a replica tells every time: its name, its id at Serve, its figures and rates, and messages about its pages."""

    name: str
    replica_id: str
    figures: dict[str, Any]
    rates: ReplicaRates = field(default_factory=ReplicaRates)
    messages: Sequence[bytes] = ()


@dataclass(frozen=True)
class News:
    """What a router did not know yet: the replicas that live, and messages up to the number `sequence`.

    `has_gap` says that messages before these are missing.
    """

    replicas: dict[str, Report]
    messages: list[bytes]
    sequence: int
    has_gap: bool


class Holdings:
    """What is known of the replicas of one application, by their names.

    Always true: the bytes of the messages that wait are counted, and within the bounds unless there is but one.
    """

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret = secret
        self._clock = clock
        self._reports: dict[str, tuple[Report, float]] = {}  # without messages, and when it came
        self._messages: deque[bytes] = deque()
        self._message_bytes = 0
        self._sequence = 0
        self._wants_listing: set[str] = set()

    def read_secret(self) -> bytes:
        """The secret under which all replicas and routers name pages. It is not needed beyond the cluster's life."""
        return self._secret

    def report(self, report: Report) -> bool:
        """A replica tells what is new; returns whether it should send a listing. One with its name before is forgotten."""
        kept = Report(report.name, report.replica_id, report.figures, report.rates)
        self._reports[report.name] = kept, self._clock()
        for message in report.messages:
            self._keep(message)
        is_wanted = report.name in self._wants_listing
        self._wants_listing.discard(report.name)
        return is_wanted

    def _keep(self, message: bytes) -> None:
        self._messages.append(message)
        self._message_bytes += len(message)
        self._sequence += 1
        while len(self._messages) > MOST_MESSAGES or (self._message_bytes > MOST_BYTES and len(self._messages) > 1):
            self._message_bytes -= len(self._messages.popleft())

    def leave(self, name: str, replica_id: str) -> None:
        """A replica ends."""
        if name in self._reports and self._reports[name][0].replica_id == replica_id:
            del self._reports[name]

    def read(self) -> dict[str, Report]:
        """The replicas that live."""
        now = self._clock()
        self._reports = {name: known for name, known in self._reports.items() if now - known[1] < LOST_S}
        return {name: report for name, (report, _) in self._reports.items()}

    def read_news(self, sequence: int, wanted: Sequence[str]) -> News:
        """What has come after the message with this number. Listings of the replicas `wanted` are asked for.

        Of the figures only the length of the queue is told: routers ask several times a second.
        """
        self._wants_listing.update(wanted)
        num_new = self._sequence - sequence
        has_gap = not 0 <= num_new <= len(self._messages)  # below 0: this actor was started anew
        messages = list(self._messages)[len(self._messages) - num_new :] if num_new and not has_gap else []
        replicas = {
            name: replace(report, figures={"queue": report.figures.get("queue", 0)}) for name, report in self.read().items()
        }
        return News(replicas, messages, self._sequence, has_gap)


def find_holdings(application: str) -> Any:
    """The actor of an application, which is started if there is none. If Ray starts it anew, it has the same secret."""
    actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(Holdings)
    return actor.options(
        name=f"bough-holdings-{application}", namespace=NAMESPACE, lifetime="detached", get_if_exists=True
    ).remote(secrets.token_bytes(SECRET_BYTES))
