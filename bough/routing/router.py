"""The router: chooses a replica for each request. Time and randomness are passed in.

It knows the replicas' pages (`PageIndex`), their rates, the work that it has sent there, and the pages that are coming:
those that requests under way will have computed. A request's pages are coming until a moment after its first token: by then
the replica has reported them.

Always true between calls (`check` asserts it): the pages that are coming are those of the requests under way and of those
that were done a moment ago, each of them owned by one request at each replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from bough.routing.choice import Prediction, ReplicaCandidate, choose
from bough.routing.index import COMING, SLOT_BITS, PageIndex, key_of
from bough.routing.page_reports import INTERVAL_S, PageMessage
from bough.routing.rates import ReplicaRates

SETTLING_S = 3 * INTERVAL_S
"""How long after a request's first token its pages still count as coming: the replica's message may be on its way."""

LOST_S = 600.0
"""A request that has not reported for this long counts as gone."""


@dataclass(frozen=True)
class RoutingRequest:
    """A prompt: its number of tokens, and the digests of its whole pages, each up to the page's end.

    The digests are `Keys.digests(...)[1:]` under the secret that all replicas share, and differ between salts.
    """

    num_tokens: int
    digests: Sequence[bytes]


@dataclass(frozen=True)
class RoutedRequest:
    """Where a request was sent, and why. The caller passes `ticket` to `done` at the first token."""

    ticket: int
    best: Prediction

    @property
    def replica(self) -> str:
        return self.best.replica


@dataclass(frozen=True, slots=True)
class _Settling:
    """The pages of a request that has its first token; they count as coming until `until_s`."""

    replica: str
    keys: tuple[int, ...]
    until_s: float


@dataclass(frozen=True, slots=True)
class Work:
    """The predicted time of one request at its replica, and the keys of the pages that it will have computed."""

    seconds: float
    coming: tuple[int, ...] = ()


@dataclass
class ReplicaQueue:
    """The requests at one replica without a first token, in the order of sending. The first runs since `started_s`."""

    works: dict[int, Work] = field(default_factory=dict)
    seconds: float = 0.0
    first_s: float = 0.0  # the whole time of the first
    started_s: float = 0.0
    delay_s: float = 0.0  # reported by the replica: the wait for other reasons, such as for a lane

    def add(self, ticket: int, work: Work, now: float) -> None:
        if not self.works:
            self.first_s, self.started_s = work.seconds, now
        self.works[ticket] = work
        self.seconds += work.seconds

    def remove(self, ticket: int, now: float) -> Work:
        is_first = next(iter(self.works)) == ticket
        work = self.works.pop(ticket)
        self.seconds = self.seconds - work.seconds if self.works else 0.0
        if is_first:
            first = next(iter(self.works.values()), None)
            self.first_s, self.started_s = (0.0 if first is None else first.seconds), now
        return work

    def waiting_s(self, now: float) -> float:
        """Seconds until all of it is done. The time that the first has taken is subtracted, up to its prediction."""
        if not self.works:
            return self.delay_s
        return self.seconds - min(self.first_s, now - self.started_s) + self.delay_s

    def check(self) -> None:
        """Assert that the sums are those of the requests."""
        works = list(self.works.values())
        assert abs(self.seconds - sum(work.seconds for work in works)) < 1e-6
        assert not works or self.first_s == works[0].seconds


@dataclass
class _Replica:
    """What the router knows of one replica besides its pages. In `filled`, unknown rates are those of the others."""

    rates: ReplicaRates
    filled: ReplicaRates
    queue: ReplicaQueue


class Router:
    """Chooses replicas. One thread at a time calls; nothing here waits."""

    def __init__(self, page_tokens: int) -> None:
        self.index = PageIndex()
        self._page_tokens = page_tokens
        self._replicas: dict[str, _Replica] = {}
        self._coming: dict[int, int] = {}  # page → the replicas where a request computes it, like a value of the index
        self._tickets: dict[int, tuple[str, float]] = {}  # replica, and when it was sent; the oldest first
        self._settling: deque[_Settling] = deque()
        self._last_ticket = 0

    def add(self, replica: str, rates: ReplicaRates | None = None) -> None:
        """Add a replica, or replace its rates."""
        known = self._replicas.get(replica)
        rates = rates or ReplicaRates()
        if known is None:
            self.index.join(replica)
            self._replicas[replica] = _Replica(rates, rates, ReplicaQueue())
        elif known.rates == rates:
            return
        else:
            known.rates = rates
        self._fill_rates()

    def note_delay(self, replica: str, delay_s: float) -> None:
        """Set how long requests wait at a replica for other reasons than prefill, such as for a lane."""
        self._replicas[replica].queue.delay_s = delay_s

    def remove(self, replica: str) -> None:
        """Forget a replica that is gone: its pages, and the requests that were sent there."""
        for ticket in [ticket for ticket, (name, _) in self._tickets.items() if name == replica]:
            self.done(ticket, 0.0)
        for each in [each for each in self._settling if each.replica == replica]:
            self._settling.remove(each)
            self._unmark(each.keys, self._coming_bit(replica))
        self.index.forget(replica)
        if self._replicas.pop(replica, None) is not None:
            self._fill_rates()

    def _fill_rates(self) -> None:
        known = [each.rates for each in self._replicas.values()]
        for each in self._replicas.values():
            each.filled = each.rates.filled_from(known)

    def apply(self, message: PageMessage) -> bool:
        """Apply a message of a replica; returns whether the caller has to ask the replica for a listing."""
        name = message.replica
        if name not in self._replicas:
            return False
        before = self._coming_bit(name)
        needs_listing = self.index.apply(message)
        if (bit := self._coming_bit(name)) != before:  # it has another slot now
            for keys in self._coming_at(name):
                self._unmark(keys, before)
                self._mark(keys, bit)
        return needs_listing

    def route(
        self, request: RoutingRequest, now: float, uniform: float, replicas: Collection[str] | None = None
    ) -> RoutedRequest:
        """Choose a replica for a request, from `replicas` if given, and count its work there."""
        keys = [key_of(digest) for digest in request.digests]
        self._forget_old(now)
        runs = self.index.match(keys, self._coming)
        candidates = []
        for name in self._replicas if replicas is None else replicas:
            each = self._replicas[name]
            candidates.append(ReplicaCandidate(name, each.filled, each.queue.waiting_s(now), runs.get(name, ())))
        best = choose(request.num_tokens, self._page_tokens, candidates, uniform)
        self._last_ticket = ticket = self._last_ticket + 1
        held = best.depth if best.copy is None else best.copy.held
        coming = self._mark(keys[held // self._page_tokens :], self._coming_bit(best.replica))
        self._replicas[best.replica].queue.add(ticket, Work(best.load_s + best.compute_s, coming), now)
        self._tickets[ticket] = best.replica, now
        return RoutedRequest(ticket, best)

    def done(self, ticket: int, now: float) -> None:
        """Note that a request has its first token, or has ended without one. A second call does nothing."""
        sent = self._tickets.pop(ticket, None)
        if sent is None:
            return
        replica, _ = sent
        work = self._replicas[replica].queue.remove(ticket, now)
        self._settling.append(_Settling(replica, work.coming, now + SETTLING_S))

    def is_under_way(self, ticket: int) -> bool:
        """Whether a request counts as waiting for its first token."""
        return ticket in self._tickets

    def _forget_old(self, now: float) -> None:
        """Unmark the pages that count as coming no longer, and drop the requests that were lost."""
        while self._settling and self._settling[0].until_s <= now:
            settled = self._settling.popleft()
            self._unmark(settled.keys, self._coming_bit(settled.replica))
        while self._tickets:
            ticket, (_, sent_s) = next(iter(self._tickets.items()))
            if now - sent_s <= LOST_S:
                return
            self.done(ticket, now)

    def _coming_bit(self, replica: str) -> int:
        return COMING << SLOT_BITS * self.index.replicas[replica].slot

    def _coming_at(self, replica: str) -> list[tuple[int, ...]]:
        works = self._replicas[replica].queue.works.values()
        return [work.coming for work in works] + [each.keys for each in self._settling if each.replica == replica]

    def _mark(self, keys: Sequence[int], bit: int) -> tuple[int, ...]:
        """Mark pages as coming at a replica; returns those that were not marked before."""
        coming, marked = self._coming, []
        for key in keys:
            bits = coming.get(key, 0)
            if not bits & bit:
                coming[key] = bits | bit
                marked.append(key)
        return tuple(marked)

    def _unmark(self, keys: Sequence[int], bit: int) -> None:
        for key in keys:
            bits = self._coming[key] & ~bit
            if bits:
                self._coming[key] = bits
            else:
                del self._coming[key]

    def queue(self, replica: str) -> ReplicaQueue:
        return self._replicas[replica].queue

    def check(self) -> None:
        """Assert what the module's docstring says."""
        self.index.check()
        for each in self._replicas.values():
            each.queue.check()
        coming: dict[int, int] = {}
        for name in self._replicas:
            bit = self._coming_bit(name)
            for key in (key for keys in self._coming_at(name) for key in keys):
                assert not coming.get(key, 0) & bit
                coming[key] = coming.get(key, 0) | bit
        assert coming == self._coming
        tickets = {ticket: name for name, each in self._replicas.items() for ticket in each.queue.works}
        assert tickets == {ticket: name for ticket, (name, _) in self._tickets.items()}
