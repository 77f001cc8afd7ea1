"""The same small world on a real engine and a tiny model: every forward pass is compared with one that has no cache.

That one is transformers' own, of another model with the same weights, whichever engine is looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from bough.cache.prefix_cache import PrefixCache
from bough.cache.session import Session
from bough.cache.tree.state import Kind, Lane, State, Tier
from bough.engines.shared.pool.arena import Arena
from bough.types import Draw, SamplingParams
from tests.scenarios.world import World
from tests.tiny_models import make_model

TOLERANCE = 1e-4
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {"sliding_window": 4},
    "gpt_oss": {"sliding_window": 4},
    "qwen3_next": {},
    "lfm2": {},
    "falcon_h1": {},
    "mamba2": {},
    "granitemoehybrid": {},
}


@dataclass(frozen=True)
class Subject:
    """An engine with the model of that name, a way to make its forward passes fail, and the arena of a pool."""

    name: str
    engine: Any
    failing_after: Callable[[int], AbstractContextManager[Any]]  # this layer, or the last one if there are fewer
    arena: Arena | None = None


class WatchedEngine:
    """A real engine that counts what it evaluates and can be made to fail in the middle of a forward pass.

    On a pool a token is chosen after the prompt and after each step, so that a step is computed ahead, most often in vain.
    """

    def __init__(self, subject: Subject) -> None:
        self._engine = subject.engine
        self._goes_ahead = subject.arena is not None
        self._failing_after = subject.failing_after
        self.evaluated: list[int] = []
        self._latest: list[Any] = []
        self.fail_next: str | None = None
        self.fail_after_groups = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @property
    def groups(self) -> Any:
        return self._engine.groups

    def evaluate(self, lane: Lane, ids: Sequence[int]) -> Any:
        if self.fail_next == "evaluate":
            self.fail_next = None
            with self._failing_after(self.fail_after_groups):
                return self._engine.evaluate(lane, ids)
        logits = self._engine.evaluate(lane, ids)
        self.evaluated.append(len(ids))
        self._latest = [logits]
        return logits

    def step(self, lanes: Sequence[Lane], ids: Sequence[int]) -> list[Any]:
        if not self._goes_ahead or self.fail_next is not None:
            return [self.evaluate(lane, [token]) for lane, token in zip(lanes, ids, strict=True)]
        self._choose()
        self._latest = list(self._engine.step(lanes, ids))
        self.evaluated += [1] * len(ids)
        logits = self._latest
        self._choose()
        return logits

    def _choose(self) -> None:
        """Choose tokens for the latest logits, once."""
        if self._latest:
            self._engine.sample(self._latest, [Draw(SamplingParams())] * len(self._latest))
        self._latest = []


class ModelWorld(World):
    """A world whose requests run on a tiny random model. After every forward pass its logits are compared."""

    num_visits, num_turns = 12, 15

    def __init__(self, subject: Subject, page_tokens: int = 2, **settings: Any) -> None:
        engine = subject.engine
        assert engine.capabilities.can_reuse, engine.capabilities.reason
        self._name = subject.name
        self._held_before = engine.held_bytes
        self._arena = subject.arena
        self._used_before = subject.arena.used_bytes if subject.arena is not None else 0
        if subject.arena is not None:  # which computes twice as much, and in plain torch
            self.num_visits, self.num_turns = 6, 8
        self.has_wide_window = any(group.kind is Kind.WINDOW for group in engine.groups)
        super().__init__(page_tokens=page_tokens, engine=WatchedEngine(subject), **settings)

    def chats_bytes(self, num_chats: int, num_tokens: int, num_states: int) -> int:
        """In a pool a chat has slots of its own, of which each fits here, beside that of what they share."""
        if self._arena is None:
            return super().chats_bytes(num_chats, num_tokens, num_states)
        slots = {group: num_states if group.kind is Kind.RECURRENT else num_chats + 1 for group in self.engine.groups}
        return sum(num * self._arena.slot_bytes(group) for group, num in slots.items())

    def check(self) -> None:
        self.cache.check()
        if self._arena is None:
            assert self.engine.held_bytes - self._held_before == self.cache.memory.tree_bytes
        else:
            check_arena(self._arena, self.cache, self._used_before)
        for session in self.sessions:
            if session.is_whole and not session.is_closed:
                assert session.lane.offset == session.offset

    def after_forward(self, session: Session, logits: Any) -> None:
        expected = _answer(self._name, tuple(session.tokens.tolist()))
        difference = max(abs(a - b) for a, b in zip(logits.tolist(), expected, strict=True))
        assert difference <= TOLERANCE, f"{difference:.1e} off after {session.offset} tokens"


def check_arena(arena: Arena, cache: PrefixCache, others_bytes: int = 0) -> None:
    """Each slot that is used is one of the tree or of a lane, and counted once. `others_bytes` are of neither."""
    arena.check()
    lanes: list[Any] = [slot.lane for slot in cache.lanes.slots]
    promised = sum(rows.promised_bytes for lane in lanes for rows in lane.row_groups())
    taken = sum(lane.nbytes for lane in lanes) - promised
    kept = [item for item in cache.forest.items() if isinstance(item, State) and item.tier is Tier.DEVICE]
    unused = sum(arena.slot_bytes(state.group) - state.nbytes for state in kept)  # a slot may be larger than its state
    assert arena.used_bytes - others_bytes == cache.memory.tree_bytes + taken + unused


@functools.cache  # scenarios repeat themselves, and each other
def _answer(name: str, ids: tuple[int, ...]) -> list[float]:
    """The logits after these tokens, without any cache."""
    with torch.inference_mode():
        logits: list[float] = _reference(name)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].tolist()
    return logits


@functools.cache
def _reference(name: str) -> Any:
    torch.set_num_threads(1)  # more get in each other's way at this size
    return make_model(name, **ARCHITECTURES[name])
