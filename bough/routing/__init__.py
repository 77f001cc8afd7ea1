"""Which replica answers soonest: a pure policy over what is known of each replica. Standard library only."""

from bough.routing.choice import Choice, choose
from bough.routing.index import Outcome, PageIndex
from bough.routing.messages import Batch, Listing, PageNote
from bough.routing.outbox import Outbox
from bough.routing.prediction import Candidate, Copy, Prediction
from bough.routing.rates import ReplicaRates
from bough.routing.router import Router, RoutingRequest

__all__ = [
    "Batch",
    "Candidate",
    "Choice",
    "Copy",
    "Listing",
    "Outbox",
    "Outcome",
    "PageIndex",
    "PageNote",
    "Prediction",
    "ReplicaRates",
    "Router",
    "RoutingRequest",
    "choose",
]
