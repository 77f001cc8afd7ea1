"""Recorded requests: the form into which all trace formats are read.

A request has lists of block ids. Equal ids mean that the prefixes up to there are equal. Only full blocks count: the
partial last block of a prompt is never reused.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from bough.types import Boundary


@dataclass(frozen=True)
class TraceRequest:
    """One request: the ids of the prompt's full blocks, and of all full blocks with the reply.

    `boundaries` are in blocks, rounded down to the start of a block. They are empty if the trace has none.
    """

    time_s: float
    prompt_tokens: int
    prompt: list[int]
    stored: list[int]
    boundaries: tuple[Boundary, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    block_tokens: int
    requests: list[TraceRequest]

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def num_blocks(self) -> int:
        return len({block for request in self.requests for block in request.stored})

    def unlimited_share(self) -> float:
        """The share of all prompt tokens that a cache without a limit would reuse."""
        held: set[int] = set()
        served = 0
        for request in self.requests:
            served += next((n for n, block in enumerate(request.prompt) if block not in held), len(request.prompt))
            held.update(request.stored)
        return served * self.block_tokens / max(1, self.prompt_tokens)

    def first(self, num_requests: int | None) -> Trace:
        """The first requests only; None: all of them."""
        return replace(self, requests=self.requests[:num_requests])

    def renumbered(self) -> Trace:
        """The same trace with ids from 0, in the order of their first appearance."""
        ids: defaultdict[int, int] = defaultdict(lambda: len(ids))
        return replace(
            self,
            requests=[
                replace(each, prompt=[ids[block] for block in each.prompt], stored=[ids[block] for block in each.stored])
                for each in self.requests
            ],
        )
