"""The record of a finished request, for the log and the metrics. It never has prompts or answers."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from bough.types import Usage


@dataclass(frozen=True)
class RequestRecord:
    """One request. `usage` is None if it never began; times are 0 for what did not happen.

    `decode_s` is the time from the first token to the last, `first_token_s` that from the beginning to the first, both
    without the queue. Of several choices the tokens are the sum. `recomputed_tokens` were known, but lay where loading them
    would have taken longer than computing them, or could not be read. `num_texts` is above 0 for embeddings and scores:
    each of these texts waited for its own place, so that the request has neither a queue nor a first token.
    """

    model: str
    usage: Usage | None = None
    completion_tokens: int = 0
    queue_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    host_bytes: int = 0
    disk_bytes: int = 0
    store_bytes: int = 0
    recomputed_tokens: int = 0
    num_texts: int = 0
    error: str | None = None


@dataclass
class RecordSlot:
    """Where the record of one HTTP request is left, for its line in the log, and the id that its answer has."""

    record: RequestRecord | None = None
    request_id: str = ""


current_slot: ContextVar[RecordSlot | None] = ContextVar("bough_record", default=None)
"""The slot of the HTTP request that the running task serves; None outside of one."""


def current_request_id() -> str:
    """The id of the HTTP request that the running task serves; "" outside of one."""
    slot = current_slot.get()
    return slot.request_id if slot is not None else ""


def note_record(record: RequestRecord) -> None:
    """Leave the record in the slot of the HTTP request that the running task serves, if there is one."""
    slot = current_slot.get()
    if slot is not None:
        slot.record = record
