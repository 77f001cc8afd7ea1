"""The work that waits at one replica: of the requests that were sent there and have not reported their first token."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Work:
    """What one request will take at its replica, as it was predicted; and the pages that it will have computed, by key."""

    tokens: int
    load_bytes: int
    seconds: float
    coming: tuple[int, ...] = ()


@dataclass
class ReplicaQueue:
    """Requests in the order in which they were sent. The first is under way since `started_s`."""

    works: dict[int, Work] = field(default_factory=dict)
    tokens: int = 0
    load_bytes: int = 0
    seconds: float = 0.0
    first_s: float = 0.0  # what the first one takes in all
    started_s: float = 0.0
    delay_s: float = 0.0  # what the replica itself says a request waits besides, such as for a lane

    def add(self, ticket: int, work: Work, now: float) -> None:
        if not self.works:
            self.first_s, self.started_s = work.seconds, now
        self.works[ticket] = work
        self.tokens += work.tokens
        self.load_bytes += work.load_bytes
        self.seconds += work.seconds

    def remove(self, ticket: int, now: float) -> Work:
        """A request has its first token, or has ended without one."""
        is_first = next(iter(self.works)) == ticket
        work = self.works.pop(ticket)
        self.tokens -= work.tokens
        self.load_bytes -= work.load_bytes
        self.seconds = self.seconds - work.seconds if self.works else 0.0
        if is_first:
            first = next(iter(self.works.values()), None)
            self.first_s, self.started_s = (0.0 if first is None else first.seconds), now
        return work

    def waiting_s(self, now: float) -> float:
        """Seconds until all of it is done. What the first one has already taken is subtracted, up to its prediction."""
        if not self.works:
            return self.delay_s
        return self.seconds - min(self.first_s, now - self.started_s) + self.delay_s

    def check(self) -> None:
        """Assert that the sums are those of the requests."""
        works = list(self.works.values())
        assert self.tokens == sum(work.tokens for work in works)
        assert self.load_bytes == sum(work.load_bytes for work in works)
        assert abs(self.seconds - sum(work.seconds for work in works)) < 1e-6
        assert not works or self.first_s == works[0].seconds
