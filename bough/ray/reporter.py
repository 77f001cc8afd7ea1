"""Reports of a replica to the `Holdings` actor: its figures, and the changes of its tree.

Figures are reported even while a long step of the engine blocks looks at the tree: a replica that does not report counts
as gone. No failure here ends the reports.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Any

from bough.errors import BoughError
from bough.ray.holdings import ReplicaReport
from bough.routing import Outbox, ReplicaRates
from bough.routing.page_reports import INTERVAL_S
from bough.server.serving.remote.host import PageNotes, ReplicaHost

log = logging.getLogger(__name__)

REPORT_S = 0.5
"""How often a replica reports its figures if its tree has not changed."""


class Reporter:
    """Reports for a host, from `run` until that is cancelled."""

    def __init__(self, host: ReplicaHost, holdings: Any, replica_id: str) -> None:
        self._host = host
        self._holdings = holdings
        self._replica_id = replica_id
        self._outbox = Outbox(host.name, time.time_ns())
        self._messages: list[bytes] = []
        self._rates = ReplicaRates()
        self._looking: asyncio.Task[PageNotes] | None = None

    async def run(self) -> None:
        reported_s = -math.inf
        while True:
            await self._look()
            now = time.monotonic()
            if self._messages or now - reported_s >= REPORT_S:
                reported_s = now
                await self._report()
            await asyncio.sleep(INTERVAL_S)

    async def _look(self) -> None:
        """Note the changes of the tree. A look that takes longer than `REPORT_S` is awaited again by the next call."""
        if self._looking is None:
            self._looking = asyncio.create_task(self._host.look(), name="bough-look")
        done, _ = await asyncio.wait([self._looking], timeout=REPORT_S)
        if not done:
            return
        try:
            looked, now = self._looking.result(), time.monotonic()
            self._rates = looked.rates
            for digest, note in looked.notes.items():
                self._outbox.note(digest, note, now)
        except BoughError as error:
            log.debug("the tree cannot be looked at now: %s", error)
        except Exception:
            log.exception("what has changed in the tree could not be read, by a mistake of ours")
        self._looking = None
        if self._outbox.is_due(time.monotonic()):
            self._messages.append(self._outbox.take().pack())

    async def _report(self) -> None:
        """Send a report. After a failure, or if a router wants it, the next one lists all pages."""
        report = ReplicaReport(self._host.name, self._replica_id, self._host.snapshot(), self._rates, self._messages)
        try:
            wants_all = await self._holdings.report.remote(report)
            self._messages = []
        except Exception as error:
            log.warning("what has changed cannot be told now: %s", error)
            wants_all = True
            await asyncio.sleep(REPORT_S)
        if wants_all:
            self._messages = [self._outbox.list_all().pack()]
