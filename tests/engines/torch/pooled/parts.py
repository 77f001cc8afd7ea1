"""A tiny model on a pool on the CPU, without an engine around it, and what the same model says without any cache."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bough.cache.tree.state import Group, GroupSource, Kind, Page, State
from bough.engines.shared.pool.arena import Arena
from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.layout import TorchLayout
from bough.engines.torch.model_loader import prepare
from bough.engines.torch.pooled.compute import PooledCompute
from bough.engines.torch.pooled.lane import PooledTorchLane
from bough.engines.torch.pooled.memory import PoolMemory
from bough.engines.torch.pooled.pages import PooledPages
from bough.engines.torch.pooled.pool import Pool
from bough.engines.torch.pooled.wiring import POOL_ATTENTION, Wiring, register_pool_attention
from bough.engines.torch.self_check.probe import probe
from bough.types import Draw, SamplingParams
from tests.tiny_models import make_model

GREEDY = Draw(SamplingParams())
TOLERANCE = 1e-4
BUDGET_BYTES = 16 << 20
NAN_BYTE = 0xFF  # four of them are no number


@dataclass(frozen=True, eq=False)
class Parts:
    """A pool whose memory is full of NaN where nothing was written. `lanes` are those that `lane` has made."""

    name: str
    forward: TorchForward
    layout: TorchLayout
    wiring: Wiring
    pool: Pool
    lanes: list[PooledTorchLane] = field(default_factory=list)

    @property
    def compute(self) -> PooledCompute:
        return self.pool.compute

    @property
    def pages(self) -> PooledPages:
        return self.pool.pages

    @property
    def memory(self) -> PoolMemory:
        return self.pool.memory

    @property
    def arena(self) -> Arena:
        return self.pool.memory.arena

    @property
    def row_groups(self) -> list[Group]:
        return list(self.layout.rows)

    def lane(self, room: int, ids: Sequence[int] = ()) -> PooledTorchLane:
        """A lane that holds these tokens, with room for more."""
        lane = self.compute.make_lane()
        self.lanes.append(lane)
        lane.reserve(room)
        if ids:
            self.compute.evaluate(lane, ids)
        return lane

    @contextmanager
    def empty_afterwards(self) -> Iterator[Parts]:
        """All slots are free again when the lanes are cleared, but those that belong to no lane."""
        before = self.arena.used_bytes
        yield self
        for lane in self.lanes:
            lane.clear()
        self.lanes.clear()
        self.arena.check()
        assert self.arena.used_bytes == before, "slots were not given back"
        assert self.pages.held_bytes == 0

    def sample(self, *logits: Tensor) -> list[int]:
        """The most likely token after each."""
        return [each.token_id for each in self.compute.sample(logits, [GREEDY] * len(logits))]

    def is_answer(self, logits: Tensor, ids: Sequence[int]) -> bool:
        """Whether these are the logits after `ids`, as the model has them without a cache."""
        expected = stock_logits(self.name, tuple(ids))
        return float((logits.float() - expected).abs().max()) <= TOLERANCE

    def keep(self, lane: PooledTorchLane) -> dict[Group, GroupSource]:
        """All that restores the lane where it stands: a page for each slot."""
        return {
            group: GroupSource(state=lane.capture(group))
            if group.kind is Kind.RECURRENT
            else GroupSource(pages=self.publish(lane, group, group.first_needed(lane.offset), lane.offset))
            for group in self.layout.groups
        }

    def keep_rows(self, *pages: Page) -> dict[Group, GroupSource]:
        """What restores a lane of a model with one row group and nothing else."""
        (group,) = self.layout.groups
        return {group: GroupSource(pages=pages)}

    def publish(self, lane: PooledTorchLane, group: Group, start: int, end: int) -> tuple[Page, ...]:
        return tuple(lane.publish(group, span.start, span.end) for span in lane.spans(group, start, end))

    def release(self, kept: dict[Group, GroupSource]) -> None:
        for item in items_of(kept):
            self.pages.release(item)


def items_of(kept: dict[Group, GroupSource]) -> list[Page | State]:
    return [item for source in kept.values() for item in (*source.pages, *([source.state] if source.state else []))]


def make_parts(
    name: str, *, budget_bytes: int = BUDGET_BYTES, context: int = 2048, slack: int = 512, goes_ahead: bool = True
) -> Parts:
    """The model of that name on a pool of its own."""
    torch.set_num_threads(1)
    register_pool_attention()
    forward = TorchForward(prepare(make_model(name)))
    layout = probe(forward)
    forward.model.set_attn_implementation(POOL_ATTENTION)
    wiring = Wiring(forward, layout)
    pool = Pool(forward, layout, wiring, LaneSizes(context, slack), budget_bytes, goes_ahead=goes_ahead)
    fill_with_nan(layout, pool.memory)
    return Parts(name, forward, layout, wiring, pool)


def fill_with_nan(layout: TorchLayout, memory: PoolMemory) -> None:
    """Only the states that are always zero stay so."""
    for rows in memory.rows.values():
        rows.untyped_storage().fill_(NAN_BYTE)
    for group in layout.states:
        memory.slot_bytes(memory.blank[group]).zero_()


def make_ids(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 97) for _ in range(length)]


@functools.cache
def stock_logits(name: str, ids: tuple[int, ...]) -> Tensor:
    """The logits after these tokens, by transformers alone."""
    with torch.inference_mode():
        logits: Tensor = _stock(name)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    return logits


@functools.cache
def _stock(name: str) -> Any:
    return make_model(name)


@dataclass
class Passes:
    """The forward passes of a model: the number of entries and tokens of each."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)


@contextmanager
def watching(parts: Parts) -> Iterator[Passes]:
    """Note each forward pass of the model."""
    passes = Passes()
    hook = parts.forward.model.register_forward_pre_hook(
        lambda module, args, kwargs: passes.shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield passes
    finally:
        hook.remove()


@contextmanager
def failing(parts: Parts) -> Iterator[None]:
    """Forward passes run into an error after all layers have taken the tokens in."""

    def stop(*_: object) -> None:
        raise RuntimeError("made to fail")

    hook = parts.forward.model.register_forward_hook(stop)
    try:
        yield
    finally:
        hook.remove()
