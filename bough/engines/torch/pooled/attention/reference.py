"""The kernels' attention in plain torch and float32, item by item: for devices without them, and as their reference.

Rows are read exactly as the plan says. Rows that no item covers are never read: they may contain anything.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bough.engines.shared.pool.plan import CAUSAL, FIELDS, GROWING, PAGE
from bough.engines.torch.attention import Scores
from bough.engines.torch.pooled.attention.bucket import PlanTensors, StepBucket

_LOWEST = -1e30  # lower than any score, and finite, so that differences are numbers
_SMALLEST = 1e-30


class PlainAttention:
    """Attention by a plan, for one bucket; slow, since it takes time for each item of each layer."""

    programs = 16

    def __init__(self, bucket: StepBucket) -> None:
        self._bucket = bucket

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, pos: Tensor, plan: PlanTensors, scores: Scores
    ) -> Tensor:
        if self._bucket.is_run:
            write_rows(k.transpose(0, 2), v.transpose(0, 2), rows, plan.places)
        order = plan.order.tolist()
        parts = _Parts(q, int(plan.parts.max()))
        items = plan.items.view(-1, FIELDS)
        num_items = int((items[:, 0] == 0).nonzero()[0])
        for num, first, start, end, part, kind, *slots in items[:num_items].tolist():
            lanes = order[first : first + num] if num > 1 else [first]
            positions = pos[lanes, 0]
            if kind == GROWING:
                _write_new(k[first], v[first], rows[slots[0]], int(positions), start, end)
            if kind in (GROWING, CAUSAL):
                end = min(end, int(positions.max()) + 1)
            if scores.window:
                low = max(start, int(positions.min()) - scores.window + 1)
                start, slots = low, slots[low // PAGE - start // PAGE :]
            if start < end:
                visible = _find_visible(kind, positions, start, end, scores)
                parts.add(lanes, part, _read(rows, slots, start, end), visible, scores)
        return parts.join(plan.parts, scores.sinks).to(q.dtype)


class _Parts:
    """The results of all parts of all entries, each with its log-sum-exp: minus infinity for a part without rows."""

    def __init__(self, q: Tensor, most: int) -> None:
        entries, queries, _, dim = q.shape
        self._q = q[:, :, 0].float()
        self._results = torch.zeros(entries, queries, most, dim, device=q.device)
        self._lse = torch.full((entries, queries, most), float("-inf"), device=q.device)

    def add(self, lanes: Sequence[int], part: int, read: Tensor, visible: Tensor | None, scores: Scores) -> None:
        """Add one item: `read` has its keys and values, [2, heads, rows, dim], `visible` says which lane sees which row."""
        keys, values = read.float()
        q = self._q[lanes].view(len(lanes), keys.shape[0], -1, keys.shape[2])
        s = torch.einsum("lhgd,hnd->lhgn", q, keys) * scores.scale
        if scores.softcap:
            s = torch.tanh(s / scores.softcap) * scores.softcap
        if visible is not None:
            s = s.masked_fill(~visible[:, None, None], float("-inf"))
        highest = s.amax(-1).clamp(min=_LOWEST)
        weights = torch.exp(s - highest[..., None])
        total = weights.sum(-1)
        result = torch.einsum("lhgn,hnd->lhgd", weights, values) / total.clamp(min=_SMALLEST)[..., None]
        self._results[lanes, :, part] = result.flatten(1, 2)
        self._lse[lanes, :, part] = (highest + total.log()).flatten(1, 2)

    def join(self, num_parts: Tensor, sinks: Tensor | None) -> Tensor:
        """The parts of each entry as one result, [entries, 1, queries, dim]; a sink takes weight and adds nothing."""
        is_part = torch.arange(self._lse.shape[2], device=num_parts.device) < num_parts[:, None]
        lse = self._lse.masked_fill(~is_part[:, None], float("-inf"))
        highest = lse.amax(-1).clamp(min=_LOWEST)
        if sinks is not None:
            highest = torch.maximum(highest, sinks.float())
        weights = torch.exp(lse - highest[..., None])
        total = weights.sum(-1)
        if sinks is not None:
            total = total + torch.exp(sinks.float() - highest)
        joined = torch.einsum("eqp,eqpd->eqd", weights, self._results)
        return (joined / total.clamp(min=_SMALLEST)[..., None])[:, None]


def write_rows(k: Tensor, v: Tensor, rows: Tensor, places: Tensor) -> None:
    at = (places >= 0).nonzero()[:, 0]
    slots, within = places[at].long() // PAGE, places[at].long() % PAGE
    rows[slots, 0, :, within] = k[0, :, at].transpose(0, 1)
    rows[slots, 1, :, within] = v[0, :, at].transpose(0, 1)


def gather_rows(rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    is_row = (places >= 0)[None, None, :, None]
    at = places.long().clamp(min=0)
    keys, values = (rows[at // PAGE, plane, :, at % PAGE].transpose(0, 1)[None] for plane in (0, 1))
    return torch.where(is_row, keys, 0), torch.where(is_row, values, 0)


def _write_new(k: Tensor, v: Tensor, slot: Tensor, position: int, start: int, end: int) -> None:
    """Write a lane's new row to its growing item, if it belongs there."""
    if start <= position < end:
        slot[0, :, position % PAGE] = k[:, 0]
        slot[1, :, position % PAGE] = v[:, 0]


def _read(rows: Tensor, slots: Sequence[int], start: int, end: int) -> Tensor:
    """The keys and values of rows [start, end), [2, heads, rows, dim]."""
    first_page = start // PAGE
    ranges = (
        (slots[page - first_page], max(start, page * PAGE) - page * PAGE, min(end, (page + 1) * PAGE) - page * PAGE)
        for page in range(first_page, (end - 1) // PAGE + 1)
    )
    return torch.cat([rows[slot, :, :, low:high] for slot, low, high in ranges], 2)


def _find_visible(kind: int, positions: Tensor, start: int, end: int, scores: Scores) -> Tensor | None:
    """Which lane sees which row, [lanes, rows]; None if each sees all."""
    if kind != CAUSAL and not scores.window:
        return None
    numbers = torch.arange(start, end, device=positions.device)
    visible = numbers <= positions[:, None]
    return visible & (numbers > positions[:, None] - scores.window) if scores.window else visible
