"""The cost of choosing a replica with a million pages known, and of the messages that tell of pages.

Processor time, not wall time: others may use the machine. There are no replicas and no network; messages are packed and
read back as they would be sent.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from bough.cache.disk.keys import HASH_BYTES, SECRET_BYTES, PageKeys
from bough.cache.tree.state import PAGE_TOKENS, Tier
from bough.cli.bench import BenchReport, Json
from bough.routing.index import PageIndex
from bough.routing.page_reports import TIERS, Outbox, PageMessage, PageNote, unpack_message
from bough.routing.rates import ReplicaRates
from bough.routing.router import Router, RoutingRequest
from bough.tokens import pack

CHAT_PAGES = 32
"""A conversation: 8,192 tokens."""

SHARED_PAGES = 4
"""The pages of a conversation that all replicas hold, such as a system prompt."""

TURN_PAGES = 4
"""What a turn adds: prompt and reply."""

SYSTEMS = 16
IN_FLIGHT = 4
"""Requests of each replica that have no first token yet."""


_TOKEN_S = {0: 2.2e-5, 2: 2.5e-5, 8: 3.5e-5}
_BYTE_S = {Tier.HOST: 2e-11, Tier.DISK: 5e-10}
_TOKEN_BYTES = 131_072


@dataclass(frozen=True)
class RouterFigures:
    """`decision_us` is the mean, `median_us` and `p99_us` are of single decisions; `chain_us` is for a prompt's digests.

    `copying_us` is the mean if there is a store that could copy prefixes.

    `page_bytes` is what a page takes in the index. Messages and their bytes are those of all replicas in a second, and
    `apply_share` is the share of one processor that reading and applying them takes.
    """

    replicas: int
    pages: int
    decisions_per_s: float
    decision_us: float
    median_us: float
    p99_us: float
    copying_us: float
    chain_us: float
    page_bytes: float
    requests_per_s: int
    messages_per_s: float
    message_bytes_per_s: float
    changes_per_s: float
    apply_share: float
    listing_ms: float


def measure_router(
    num_replicas: int = 64,
    num_pages: int = 1_000_000,
    num_decisions: int = 5_000,
    requests_per_s: int = 1_000,
    seconds: int = 5,
) -> RouterFigures:
    """Fill a router, route requests of 8,192 tokens, and then run so many seconds of simulated messages."""
    cluster = _MadeCluster(num_replicas, num_pages)
    page_bytes = _page_bytes(cluster.router.index)
    taken = cluster.measure_decisions(num_decisions)
    traffic = cluster.measure_messages(requests_per_s, seconds)
    listing_s = cluster.measure_listing_s()
    cluster.add_store()
    copying = cluster.measure_decisions(num_decisions)
    return RouterFigures(
        replicas=num_replicas,
        pages=cluster.router.index.num_pages,
        decisions_per_s=1 / statistics.fmean(taken),
        decision_us=1e6 * statistics.fmean(taken),
        median_us=1e6 * statistics.median(taken),
        p99_us=1e6 * sorted(taken)[int(0.99 * len(taken))],
        copying_us=1e6 * statistics.fmean(copying),
        chain_us=1e6 * _chain_s(),
        page_bytes=page_bytes,
        requests_per_s=requests_per_s,
        messages_per_s=traffic.messages / seconds,
        message_bytes_per_s=traffic.nbytes / seconds,
        changes_per_s=traffic.changes / seconds,
        apply_share=traffic.cpu_s / seconds,
        listing_ms=1e3 * listing_s,
    )


@dataclass
class _Traffic:
    messages: int = 0
    nbytes: int = 0
    changes: int = 0
    cpu_s: float = 0.0


class _MadeCluster:
    """A router that knows made-up conversations of many replicas, and the replicas' outboxes."""

    def __init__(self, num_replicas: int, num_pages: int) -> None:
        self.chance = random.Random(1)
        self.router = Router(PAGE_TOKENS)
        self.names = [f"replica-{number}" for number in range(num_replicas)]
        self.outboxes = {name: Outbox(name, 1) for name in self.names}
        self.systems = [self._digests(SHARED_PAGES) for _ in range(SYSTEMS)]
        self.chats: dict[str, deque[list[bytes]]] = {name: deque() for name in self.names}  # the oldest first
        for name in self.names:
            self.router.add(name, ReplicaRates(_TOKEN_S, _BYTE_S, _TOKEN_BYTES))
            self._fill(name, num_pages // num_replicas)
            self.outboxes[name].take()  # a listing tells the same at once
            self.router.apply(self.outboxes[name].list_all())

    def add_store(self) -> None:
        """Let there be a store that all replicas share."""
        for name in self.names:
            self.router.add(name, ReplicaRates(_TOKEN_S, {**_BYTE_S, Tier.STORE: 1e-10}, _TOKEN_BYTES, PAGE_TOKENS))

    def _digests(self, count: int) -> list[bytes]:
        return [self.chance.randbytes(HASH_BYTES) for _ in range(count)]

    def _fill(self, name: str, num_pages: int) -> None:
        for digest in (digest for system in self.systems for digest in system):
            self.outboxes[name].note(digest, _ON[Tier.DEVICE], 0.0)
        while self.outboxes[name].num_pages < num_pages:
            own = self._digests(min(CHAT_PAGES - SHARED_PAGES, num_pages - self.outboxes[name].num_pages))
            self.chats[name].append([*self.chance.choice(self.systems), *own])
            tier = self.chance.choice(TIERS)
            for digest in own:
                self.outboxes[name].note(digest, _ON[tier], 0.0)

    def _request(self) -> RoutingRequest:
        """A turn of a known conversation, or (one of four) a new one after a known system prompt."""
        known = self.chance.choice(self.chats[self.chance.choice(self.names)])
        kept = SHARED_PAGES if self.chance.random() < 0.25 else CHAT_PAGES - TURN_PAGES
        digests = [*known[:kept], *self._digests(CHAT_PAGES - len(known[:kept]))]
        return RoutingRequest(CHAT_PAGES * PAGE_TOKENS + self.chance.randrange(PAGE_TOKENS), digests)

    def measure_decisions(self, count: int) -> list[float]:
        """Processor seconds of single decisions, each with the report of an earlier request."""
        requests = [self._request() for _ in range(count)]
        tickets: deque[int] = deque()
        taken = []
        gc.collect()
        for number, request in enumerate(requests):
            now, uniform = number / 1000, self.chance.random()
            started = time.process_time()
            tickets.append(self.router.route(request, now, uniform).ticket)
            if len(tickets) > IN_FLIGHT * len(self.names):
                self.router.done(tickets.popleft(), now)
            taken.append(time.process_time() - started)
        for ticket in tickets:
            self.router.done(ticket, count / 1000)
        return taken

    def measure_messages(self, requests_per_s: int, seconds: int) -> _Traffic:
        """Run turns: each adds pages to one replica, which drops as many of its oldest and sends a batch when it is due."""
        traffic = _Traffic()
        for step in range(requests_per_s * seconds):
            now, name = step / requests_per_s, self.chance.choice(self.names)
            outbox, oldest = self.outboxes[name], self.chats[name].popleft()
            for digest in oldest[-TURN_PAGES:]:
                outbox.note(digest, None, now)
            self.chats[name].append([*oldest[:-TURN_PAGES], *self._digests(TURN_PAGES)])
            for digest in self.chats[name][-1][-TURN_PAGES:]:
                outbox.note(digest, _ON[Tier.DEVICE], now)
            for due in (each for each in self.outboxes.values() if each.is_due(now)):
                self._send(due.take(), traffic)
        return traffic

    def _send(self, batch: PageMessage, traffic: _Traffic) -> None:
        data = batch.pack()
        started = time.process_time()
        self.router.apply(unpack_message(data))
        traffic.cpu_s += time.process_time() - started
        traffic.messages += 1
        traffic.nbytes += len(data)
        traffic.changes += len(batch.notes)

    def measure_listing_s(self) -> float:
        """Processor seconds to take up a whole listing of one replica."""
        name = self.names[0]
        listing = self.outboxes[name].list_all()
        again = PageMessage(name, listing.incarnation, listing.sequence, listing.notes, is_listing=True)
        started = time.process_time()
        self.router.apply(again)
        return time.process_time() - started


_ON = {tier: PageNote(tier) for tier in TIERS}


def _page_bytes(index: PageIndex) -> float:
    """The memory of the index, by Python's own count, divided by the pages in it."""
    return index.count_bytes(sys.getsizeof) / max(1, index.num_keys)


def _chain_s(times: int = 21) -> float:
    keys = PageKeys(bytes(SECRET_BYTES), "bench", PAGE_TOKENS)
    root, tokens = keys.root(""), pack(range(CHAT_PAGES * PAGE_TOKENS))
    taken = []
    for _ in range(times):
        started = time.process_time()
        keys.digests(root, tokens)
        taken.append(time.process_time() - started)
    return statistics.median(taken)


def router(
    replicas: Annotated[int, typer.Option(min=1)] = 64,
    pages: Annotated[int, typer.Option(min=10_000, help="The pages that are known of all replicas together.")] = 1_000_000,
    decisions: Annotated[int, typer.Option(min=100)] = 5_000,
    rate: Annotated[int, typer.Option(min=1, help="Requests a second, for the messages of the replicas.")] = 1_000,
    as_json: Json = False,
) -> None:
    """What choosing a replica costs, and the messages that tell the router what replicas hold."""
    report = BenchReport("router", as_json)
    with report.console.status("filling the index"):
        figures = measure_router(replicas, pages, decisions, rate)
    rows = [
        ("a decision: mean, median, p99", f"{figures.decision_us:.0f}, {figures.median_us:.0f}, {figures.p99_us:.0f} µs"),
        ("decisions a second", f"{figures.decisions_per_s:,.0f}"),
        ("a decision with a store: mean", f"{figures.copying_us:.0f} µs"),
        ("the digests of 8,192 tokens", f"{figures.chain_us:.0f} µs"),
        ("memory of a page", f"{figures.page_bytes:.0f} bytes"),
        ("taking up a whole listing", f"{figures.listing_ms:.0f} ms"),
        (f"messages a second at {rate:,} requests/s", f"{figures.messages_per_s:,.0f}"),
        ("their changes a second", f"{figures.changes_per_s:,.0f}"),
        ("their bytes a second", f"{figures.message_bytes_per_s:,.0f}"),
        ("processor that applying them takes", f"{figures.apply_share:.1%}"),
    ]
    report.table(f"{replicas} replicas, {figures.pages:,} pages known", ("", "processor time"), rows)
    report.finish(asdict(figures))
