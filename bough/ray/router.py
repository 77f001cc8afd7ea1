"""The request router of the replicas, which Serve runs wherever a handle is used.

It sends a request where `bough.routing` predicts the first token soonest. It asks the `Holdings` actor for news a few times
a second; what it does not know costs time only. Everything here runs on the event loop of Serve's router, except
`note_first_token`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from dataclasses import replace
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from bough.cache.tree.tokens import pack
from bough.ray import first_tokens
from bough.ray.holdings import News, find_holdings
from bough.routing import Copy, Outcome, Router, RoutingRequest
from bough.routing.messages import unpack_message
from bough.server.serving.remote.held_pages import ROUTED_TOKENS
from bough.server.serving.remote.messages import RemoteRequest
from bough.server.serving.remote.replicas import ReplicaLost

log = logging.getLogger(__name__)

NEWS_S = 0.1
STOP_S = 5.0
WAITING_S = 0.5
"""What a request that waits for a lane counts, besides its prefill."""


class ReplicaRouter(RequestRouter):
    """Sends an operation to the replica that it is for, and a request to the one that answers soonest.

    The argument `replica_id` of an operation is a replica's id at Serve.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._policy = Router(ROUTED_TOKENS)
        self._names: dict[str, str] = {}  # by the id at Serve
        self._tickets: dict[str, int] = {}  # by the id of the request
        self._holdings = find_holdings(self.app_name)
        self._sequence = 0
        self._news: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        first_tokens.ROUTERS.add(self)

    def note_first_token(self, request_id: str) -> None:
        """A request has its first token, or has ended without one. Any thread may call it."""
        if self._loop is not None and request_id in self._tickets:
            self._loop.call_soon_threadsafe(self._done, request_id)

    def stop(self) -> None:
        """Hear no more of the replicas. Another thread than that of the event loop calls it."""
        if self._loop is not None and self._news is not None:
            asyncio.run_coroutine_threadsafe(self._stop(self._news), self._loop).result(STOP_S)

    async def _stop(self, news: asyncio.Task[None]) -> None:
        news.cancel()
        await asyncio.gather(news, return_exceptions=True)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else Serve asks again and again without a pause
        wanted = pending_request.kwargs.get("replica_id") or ""
        if wanted:
            found = [each for each in candidate_replicas if each.replica_id.unique_id == wanted]
            if not found and not pending_request.future.done():
                pending_request.future.set_exception(ReplicaLost(f"no replica has the id {wanted}"))
            return [found or candidate_replicas]  # with a list, Serve notices that the request has ended
        if self._news is None:  # a router that passes on operations alone needs to know no pages
            self._loop = asyncio.get_running_loop()
            self._news = asyncio.create_task(self._follow_news(), name="bough-router-news")
        asked: Any = pending_request.args[0] if pending_request.args else None
        if not isinstance(asked, RemoteRequest) or pending_request.future.done():  # it was cancelled while it waited
            return [candidate_replicas]
        try:
            chosen, copy = self._rank(candidate_replicas, asked)
            pending_request.args = [replace(asked, copy=copy), *pending_request.args[1:]]
            return chosen
        except Exception:  # Serve would let the request wait for ever
            log.exception("a request was routed without a prediction, by a mistake of ours")
            return [candidate_replicas]

    def _rank(
        self, candidates: list[RunningReplica], asked: RemoteRequest
    ) -> tuple[list[list[RunningReplica]], Copy | None]:
        """The best replica first, then the others, those to avoid last; and what the store should bring there."""
        wanted = [each for each in candidates if each.replica_id.unique_id not in asked.avoid] or candidates
        named = {
            self._names[each.replica_id.unique_id]: each for each in wanted if each.replica_id.unique_id in self._names
        }
        if len(named) < len(wanted):  # of some nothing is known yet: leave it to the lengths of the queues
            return [wanted, candidates], None
        self._done(asked.request_id)
        routed = self._policy.route(
            RoutingRequest(max(1, asked.num_tokens), asked.digests), time.monotonic(), _spread(asked), sorted(named)
        )
        self._tickets[asked.request_id] = routed.ticket
        return [[named[routed.replica]], wanted, candidates], routed.choice.copy

    def _done(self, request_id: str) -> None:
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            self._policy.done(ticket, time.monotonic())

    async def _follow_news(self) -> None:
        wanted: list[str] = []
        while True:
            try:
                wanted = self._apply(await self._holdings.read_news.remote(self._sequence, wanted))
            except Exception as error:
                log.warning("the router hears nothing of the replicas now: %s", error)
                await asyncio.sleep(1.0)
            await asyncio.sleep(NEWS_S)

    def _apply(self, news: News) -> list[str]:
        """Take up what is new; returns the replicas whose listing is needed."""
        policy, wanted = self._policy, set[str]()
        names = {report.replica_id: name for name, report in news.replicas.items()}
        for name in set(self._names.values()) - set(names.values()):
            policy.remove(name)
        fresh = set(names.values()) - set(self._names.values())
        self._names = names
        for name, report in news.replicas.items():
            policy.add(name, report.rates)
            policy.note_delay(name, WAITING_S * report.figures.get("queue", 0))
        for data in news.messages:
            try:
                message = unpack_message(data)
            except (ValueError, KeyError) as error:  # of another version; that it is missing is noticed by its number
                log.warning("a message about pages cannot be read: %s", error)
                continue
            if policy.apply(message) is Outcome.NEEDS_LISTING:
                wanted.add(message.replica)
        self._sequence = news.sequence
        self._tickets = {asked: ticket for asked, ticket in self._tickets.items() if policy.is_under_way(ticket)}
        return sorted(set(names.values()) if news.has_gap else wanted | fresh)


def _spread(asked: RemoteRequest) -> float:
    """A number in [0, 1) that decides between ties: the same for equal prompts, which may be shorter than a page."""
    return zlib.crc32(pack(asked.request.encoded.ids)) / 2**32
