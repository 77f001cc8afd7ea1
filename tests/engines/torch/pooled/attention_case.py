"""A step of attention over random lanes, run by a bucket's buffers and computed again lane by lane in double precision."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bough.engines.shared.pool.plan import PAGE, Piece, Plan, find_places, make_plan, make_run_plan
from bough.engines.torch.attention import Scores
from bough.engines.torch.pooled.attention.bucket import ItemAttention, StepBucket
from bough.engines.torch.pooled.attention.buffers import PlanBuffers
from tests.engines.shared.pool.random_lanes import RandomLanes, cut_before

LAYERS, LAYER = 2, 1
Choice = Callable[[StepBucket], ItemAttention | None]


@dataclass(frozen=True)
class Case:
    """The shape of one layer, how it makes its scores, and where it runs."""

    heads: int = 2
    group: int = 2
    dim: int = 16
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_shared: bool = True
    max_parts: int = 24
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape).to(self.device, self.dtype)


@dataclass(frozen=True)
class Outcome:
    """What a step gave, and what each entry should have got; the pool as it is, and as it should be."""

    output: Tensor
    expected: Tensor
    rows: Tensor
    expected_rows: Tensor
    plan: Plan

    def check(self, tolerance: float) -> None:
        """Results agree as far as rounding goes, padding is zero, and new rows are the only ones that were written."""
        num = self.expected.shape[0]
        difference = (self.output[:num, 0].double() - self.expected).norm(dim=-1) / self.expected.norm(dim=-1)
        assert difference.max() < tolerance
        assert not self.output[num:].any()
        assert torch.equal(self.rows.nan_to_num(nan=7.0), self.expected_rows.nan_to_num(nan=7.0))


def run_step(case: Case, choice: Choice, *, seed: int = 0, num_lanes: int = 5, prefix: int = 600) -> Outcome:
    """A step of lanes on a random tree, with one entry of the bucket left over."""
    torch.manual_seed(seed)
    tree = RandomLanes(random.Random(seed), PAGE)
    if prefix:
        tree.trunks = [tree.extend([], prefix)]
        tree.add_trunk(100)
    lanes, offsets = tree.make(num_lanes, 300)
    if case.window:
        lanes = [cut_before(lane, max(0, min(offsets) - case.window)) for lane in lanes]
    bucket = _bucket(case, num_lanes + 1, is_run=False)
    buffers = PlanBuffers(bucket, choice(bucket))
    plan = make_plan(lanes, offsets, buffers.shape)
    num_slots = tree.num_slots
    earlier = [tree.extend([], 2000) for _ in range(num_lanes + 1)]
    buffers.put(make_plan(earlier, [1999] * len(earlier), buffers.shape))  # a longer plan, of which nothing may be left
    buffers.put(plan)
    rows = _fill_pool(case, num_slots, [_clip(lane, offset) for lane, offset in zip(lanes, offsets, strict=True)])
    step = _Step(case, buffers, rows, [*offsets, 0])
    return step.run(
        [(lane, offset, [number]) for number, (lane, offset) in enumerate(zip(lanes, offsets, strict=True))],
        plan,
    )


def run_tokens(case: Case, choice: Choice, *, seed: int = 0, past: int = 300, num: int = 20) -> Outcome:
    """A run of tokens on one lane whose last rows lie in a slot of their own, with two entries left over."""
    torch.manual_seed(seed)
    tree = RandomLanes(random.Random(seed), PAGE)
    pieces = tree.extend(tree.extend(tree.extend([], max(0, past - 20)), past), past + num + 5)
    bucket = _bucket(case, num + 2, is_run=True)
    buffers = PlanBuffers(bucket, choice(bucket))
    plan = make_run_plan(pieces, past, num, buffers.shape)
    buffers.put(plan, find_places(pieces, past, past + num))
    rows = _fill_pool(case, tree.num_slots, [_clip(pieces, past)])
    step = _Step(case, buffers, rows, [*range(past, past + num), 0, 0])
    return step.run([(pieces, past + token, list(range(token + 1))) for token in range(num)], plan)


class _Step:
    """Inputs for all entries of a bucket, and the layer of the pool that they run on."""

    def __init__(self, case: Case, buffers: PlanBuffers, pool: Tensor, positions: Sequence[int]) -> None:
        self.case, self.buffers, self.pool = case, buffers, pool
        entries = len(positions)
        self.q = case.randn(entries, 1, case.heads * case.group, case.dim).transpose(1, 2)
        self.k, self.v = (case.randn(entries, 1, case.heads, case.dim).transpose(1, 2) for _ in "kv")
        self.pos = torch.tensor(positions, device=case.device)[:, None]
        self.sinks = case.randn(case.heads * case.group) if case.has_sinks else None

    def run(self, entries: Sequence[tuple[Sequence[Piece], int, Sequence[int]]], plan: Plan) -> Outcome:
        """Each entry has a lane, a position, and the entries whose new rows it sees; its own is the last of these."""
        case = self.case
        expected_pool = self.pool.clone()
        for pieces, position, seen in entries:
            (place,) = find_places(pieces, position, position + 1)
            expected_pool[place // PAGE, 0, LAYER, :, place % PAGE] = self.k[seen[-1], :, 0]
            expected_pool[place // PAGE, 1, LAYER, :, place % PAGE] = self.v[seen[-1], :, 0]
        layer = expected_pool[:, :, LAYER]
        expected = [self._expect(layer, pieces, position, seen[-1]) for pieces, position, seen in entries]
        scores = Scores(case.dim**-0.5, case.window, case.softcap, self.sinks)
        output = self.buffers.attend(self.q, self.k, self.v, self.pool[:, :, LAYER], self.pos, scores)
        return Outcome(output, torch.stack(expected), self.pool, expected_pool, plan)

    def _expect(self, rows: Tensor, pieces: Sequence[Piece], position: int, entry: int) -> Tensor:
        """One entry's softmax over the rows that it sees, in double precision."""
        case = self.case
        first = max(pieces[0][1], position - case.window + 1) if case.window else 0
        places = torch.tensor(find_places(pieces, first, position + 1), device=rows.device)
        k, v = (rows[places // PAGE, plane, :, places % PAGE].double() for plane in (0, 1))
        q = self.q[entry, :, 0].view(case.heads, case.group, case.dim).double()
        s = torch.einsum("hgd,nhd->hgn", q, k) * case.dim**-0.5
        s = torch.tanh(s / case.softcap) * case.softcap if case.softcap else s
        if self.sinks is not None:
            s = torch.cat([s, self.sinks.double().view(case.heads, case.group, 1)], -1)
        return torch.einsum("hgn,nhd->hgd", s.softmax(-1)[..., : len(places)], v).flatten(0, 1)


def _bucket(case: Case, entries: int, *, is_run: bool) -> StepBucket:
    device = torch.device(case.device)
    return StepBucket(
        entries,
        case.heads,
        case.group,
        case.dim,
        case.dtype,
        device,
        is_run,
        case.has_shared,
        max_parts=case.max_parts,
        max_items=400,
    )


def _clip(pieces: Sequence[Piece], offset: int) -> list[Piece]:
    return [(slot, start, min(end, offset)) for slot, start, end in pieces if start < offset]


def _fill_pool(case: Case, num_slots: int, lanes: Sequence[Sequence[Piece]]) -> Tensor:
    """A pool with random rows where a lane has some, and NaN everywhere else."""
    pool = torch.full(
        (num_slots, 2, LAYERS, case.heads, PAGE, case.dim), float("nan"), device=case.device, dtype=case.dtype
    )
    for slot, start, end in sorted({piece for pieces in lanes for piece in pieces}):
        low, high = start % PAGE, start % PAGE + end - start
        pool[slot, :, LAYER, :, low:high] = case.randn(2, case.heads, high - low, case.dim)
    return pool
