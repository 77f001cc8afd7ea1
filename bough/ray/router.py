"""The request router of the replicas, which Serve runs wherever a handle is used."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from bough.server.serving.remote.messages import RemoteRequest
from bough.server.serving.remote.replicas import ReplicaLost


class ReplicaRouter(RequestRouter):
    """Sends an operation to the replica that it is for, and a request to one that is not avoided, the least busy first.

    The argument `replica_id` of an operation is a replica's id at Serve.
    """

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
        asked: Any = pending_request.args[0] if pending_request.args else None
        if isinstance(asked, RemoteRequest) and asked.avoid:
            others = [each for each in candidate_replicas if each.replica_id.unique_id not in asked.avoid]
            return [others, candidate_replicas]
        return [candidate_replicas]
