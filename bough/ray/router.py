"""The request router of the replicas, which Serve runs wherever a handle is used.

It sends a request where `bough.routing` predicts the first token soonest. It reads news from the `Holdings` actor a few
times a second; missing news cost only time. Everything here runs on the event loop of Serve's router, except
`note_first_token` and `stop`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from dataclasses import replace
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from bough.ray.holdings import News, find_holdings
from bough.ray.replicas import register_router
from bough.routing import Copy, Router, RoutingRequest
from bough.routing.page_reports import unpack_message
from bough.server.serving.remote.held_pages import ROUTED_TOKENS
from bough.server.serving.remote.replicas import RemoteRequest, ReplicaLost

log = logging.getLogger(__name__)

NEWS_S = 0.1
STOP_S = 5.0
WAITING_S = 0.5
"""The predicted wait for each request in a replica's queue for a lane, besides its prefill."""


class ReplicaRouter(RequestRouter):
    """Sends an operation to the replica whose id at Serve is its argument `replica_id`, and a request to the soonest."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._policy = Router(ROUTED_TOKENS)
        self._names: dict[str, str] = {}  # by the id at Serve
        self._tickets: dict[str, int] = {}  # by the id of the request
        self._holdings = find_holdings(self.app_name)
        self._sequence = 0
        self._news: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        register_router(self)

    def note_first_token(self, request_id: str) -> None:
        if self._loop is not None and request_id in self._tickets:
            self._loop.call_soon_threadsafe(self._done, request_id)

    def stop(self) -> None:
        """Stop reading news. Called on another thread than the event loop's."""
        if self._loop is not None and self._news is not None:
            asyncio.run_coroutine_threadsafe(_end(self._news), self._loop).result(STOP_S)

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
        if self._news is None:  # a router of operations alone needs no news
            self._loop = asyncio.get_running_loop()
            self._news = asyncio.create_task(self._follow_news(), name="bough-router-news")
        asked: Any = pending_request.args[0] if pending_request.args else None
        if not isinstance(asked, RemoteRequest) or pending_request.future.done():  # it was cancelled while it waited
            return [candidate_replicas]
        try:
            chosen, copy = self._rank(candidate_replicas, asked)
            pending_request.args = [replace(asked, copy=copy), *pending_request.args[1:]]
            return chosen
        except Exception:  # Serve would let the request wait forever
            log.exception("a request was routed without a prediction, by a mistake of ours")
            return [candidate_replicas]

    def _rank(
        self, candidates: list[RunningReplica], asked: RemoteRequest
    ) -> tuple[list[list[RunningReplica]], Copy | None]:
        """The best replica first, then the others, those to avoid last; and what the store should copy there."""
        wanted = [each for each in candidates if each.replica_id.unique_id not in asked.avoid] or candidates
        named = {name: each for each in wanted if (name := self._names.get(each.replica_id.unique_id)) is not None}
        if len(named) < len(wanted):  # some are not known yet: let Serve compare the queues
            return [wanted, candidates], None
        self._done(asked.request_id)
        routed = self._policy.route(
            RoutingRequest(max(1, asked.num_tokens), asked.digests), time.monotonic(), _spread(asked), sorted(named)
        )
        self._tickets[asked.request_id] = routed.ticket
        return [[named[routed.replica]], wanted, candidates], routed.best.copy

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
        """Apply news; returns the replicas whose listing is needed."""
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
            except (ValueError, KeyError) as error:  # of another version; the gap in the numbers is noticed
                log.warning("a message about pages cannot be read: %s", error)
                continue
            if policy.apply(message):
                wanted.add(message.replica)
        self._sequence = news.sequence
        self._tickets = {asked: ticket for asked, ticket in self._tickets.items() if policy.is_under_way(ticket)}
        return sorted(set(names.values()) if news.has_gap else wanted | fresh)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _spread(asked: RemoteRequest) -> float:
    """A number in [0, 1) that decides between ties. Equal for equal prompts, even if they are shorter than a page."""
    return zlib.crc32(asked.request.tokens.key) / 2**32
