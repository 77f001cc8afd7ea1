"""Recorded requests, in the one form that all trace formats are read into.

A request is lists of block ids; equal ids mean equal prefixes up to there. Only full blocks count: the partial last one
of a prompt always misses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bough.types import Boundary


@dataclass(frozen=True)
class TraceRequest:
    """One request: the ids of the prompt's full blocks, and of those that are stored when the reply is there.

    `boundaries` are in blocks, each before the block that holds it; there are none where the trace does not tell.
    """

    time_s: float
    prompt_tokens: int
    prompt: list[int]
    stored: list[int]
    boundaries: tuple[Boundary, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they came."""

    name: str
    block_tokens: int
    requests: list[TraceRequest]

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def num_blocks(self) -> int:
        """Distinct blocks that are ever stored."""
        return len({block for request in self.requests for block in request.stored})

    def unlimited_share(self) -> float:
        """The share of all prompt tokens that a cache which never lets anything go would serve."""
        held: set[int] = set()
        served = 0
        for request in self.requests:
            served += next((n for n, block in enumerate(request.prompt) if block not in held), len(request.prompt))
            held.update(request.stored)
        return served * self.block_tokens / max(1, self.prompt_tokens)

    def renumbered(self) -> Trace:
        """The same trace with ids that count from 0, as they first appear."""
        ids: dict[int, int] = {}
        requests = [
            replace(each, prompt=_renumber(each.prompt, ids), stored=_renumber(each.stored, ids)) for each in self.requests
        ]
        return Trace(self.name, self.block_tokens, requests)


def _renumber(blocks: Sequence[int], ids: dict[int, int]) -> list[int]:
    return [ids.setdefault(block, len(ids)) for block in blocks]
