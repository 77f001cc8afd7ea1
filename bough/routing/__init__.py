"""Which replica answers soonest: a pure policy over what is known of each replica. Standard library only."""

from bough.routing.choice import Copy
from bough.routing.page_reports import Outbox, PageMessage, PageNote
from bough.routing.rates import ReplicaRates
from bough.routing.router import Router, RoutingRequest

__all__ = [
    "Copy",
    "Outbox",
    "PageMessage",
    "PageNote",
    "ReplicaRates",
    "Router",
    "RoutingRequest",
]
