"""The router: keeps what is known of each replica, and chooses one for each request. Time and randomness are passed in.

It knows the replicas' pages (`PageIndex`), their rates, the work that it has sent there, and the prefixes that are coming:
those that requests on their way will have computed. A request's pages are coming until a moment after it has reported its
first token: by then the replica has told that it holds them.

Always true between calls (`check` asserts it): the pages that are coming are those of the requests under way and of those
that were done a moment ago, each of them owned by one request at each replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bough.routing.choice import Choice, choose
from bough.routing.index import COMING, SLOT_BITS, Outcome, PageIndex, Run, key_of
from bough.routing.messages import Batch, Listing
from bough.routing.outbox import INTERVAL_S
from bough.routing.prediction import Candidate
from bough.routing.queue import ReplicaQueue, Work
from bough.routing.rates import ReplicaRates

NO_RUNS: Sequence[Run] = ()

SETTLING_S = 3 * INTERVAL_S
"""So long after a request's first token its pages still count as coming: the replica's message may be on its way."""

LOST_S = 600.0
"""A request that has not reported for so long counts as gone."""


@dataclass(frozen=True)
class RoutingRequest:
    """A prompt: its number of tokens, and the digests of its whole pages, each up to the page's end.

    They are `Keys.digests(...)[1:]` under the secret that all replicas share, and differ between salts.
    """

    num_tokens: int
    digests: Sequence[bytes]


@dataclass(frozen=True)
class Routed:
    """Where a request was sent, and why. The caller passes `ticket` to `done` when its first token is there."""

    ticket: int
    choice: Choice

    @property
    def replica(self) -> str:
        return self.choice.replica


@dataclass(frozen=True, slots=True)
class _Settling:
    """Pages of a request that has its first token; they count as coming until `until_s`."""

    replica: str
    keys: tuple[int, ...]
    until_s: float


@dataclass
class _Replica:
    """What is known of one replica besides its pages."""

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
        """A replica has joined, or has measured its rates anew."""
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
        """A replica tells how long requests wait there for other reasons than prefill, such as for a lane."""
        self._replicas[replica].queue.delay_s = delay_s

    def remove(self, replica: str) -> None:
        """A replica is gone: forget its pages, and what was sent there."""
        for ticket in [ticket for ticket, (name, _) in self._tickets.items() if name == replica]:
            self.done(ticket, 0.0)
        for each in [each for each in self._settling if each.replica == replica]:
            self._settling.remove(each)
            self._unmark(each.keys, self._coming_bit(replica))
        self.index.forget(replica)
        if self._replicas.pop(replica, None) is not None:
            self._fill_rates()

    def _fill_rates(self) -> None:
        """What one replica does not know yet counts as at the best of the others."""
        known = [each.rates for each in self._replicas.values()]
        for each in self._replicas.values():
            each.filled = each.rates.filled_from(known)

    def apply(self, message: Batch | Listing) -> Outcome:
        """Take up what a replica tells. If a listing is needed, the caller asks the replica for one."""
        name = message.replica
        if name not in self._replicas:
            return Outcome.UNKNOWN
        before = self._coming_bit(name)
        outcome = self.index.replace(message) if isinstance(message, Listing) else self.index.apply(message)
        if (bit := self._coming_bit(name)) != before:  # it has another slot now
            for keys in self._coming_at(name):
                self._unmark(keys, before)
                self._mark(keys, bit)
        return outcome

    def route(self, request: RoutingRequest, now: float, uniform: float, replicas: Collection[str] | None = None) -> Routed:
        """Choose a replica for a request, of these if they are given, and count its work there."""
        keys = [key_of(digest) for digest in request.digests]
        self._forget_old(now)
        choice = self._choose(request, keys, now, uniform, replicas)
        self._last_ticket = ticket = self._last_ticket + 1
        best = choice.best
        held = best.depth if best.copy is None else best.copy.held
        coming = self._mark(keys[held // self._page_tokens :], self._coming_bit(best.replica))
        work = Work(request.num_tokens - best.depth, best.load_bytes, best.load_s + best.compute_s, coming)
        self._replicas[best.replica].queue.add(ticket, work, now)
        self._tickets[ticket] = best.replica, now
        return Routed(ticket, choice)

    def explain(self, request: RoutingRequest, now: float) -> Choice:
        """What would be chosen now, changing nothing."""
        return self._choose(request, [key_of(digest) for digest in request.digests], now, 0.0, None)

    def _choose(
        self, request: RoutingRequest, keys: list[int], now: float, uniform: float, replicas: Collection[str] | None
    ) -> Choice:
        runs = self.index.match(keys, self._coming)
        names = self._replicas if replicas is None else replicas
        candidates = []
        for name in names:
            each = self._replicas[name]
            candidates.append(Candidate(name, each.filled, each.queue.waiting_s(now), runs.get(name, NO_RUNS)))
        return choose(request.num_tokens, self._page_tokens, candidates, uniform)

    def done(self, ticket: int, now: float) -> None:
        """A request has its first token, or has ended without one. Calling it again changes nothing."""
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
        """Forget the pages that have settled, and the requests that were lost."""
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
        """Mark these pages as coming at a replica. Returns those that were not marked before."""
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
        """The work that waits at a replica."""
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
