"""Triton kernels over a pool's slots: attention by the items of a plan, the join of their parts, rows in and out.

Rows of one layer are [slots, 2, heads, PAGE, D]: `slot_stride` elements from slot to slot, `value_offset` from a key to its
value. D is the head's size, D_PAD the next power of two. Rows that no item covers are never used: they may contain
anything. Exponentials are powers of two: scores are multiplied by log2(e).
"""

# fmt: off

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = 1.4426950408889634
NEG = tl.constexpr(-1.0e30)  # lower than any score, and finite, so that differences are numbers
FIELDS = tl.constexpr(16)
WHOLE = tl.constexpr(0)
GROWING = tl.constexpr(1)
CAUSAL = tl.constexpr(2)


@triton.jit
def attend_items(
    desc, q_ptr, q_lane, q_head, k_ptr, k_lane, k_head, v_ptr, v_lane, v_head, rows_ptr, slot_stride, value_offset,
    order_ptr, pos_ptr, items_ptr, acc_ptr, lse_ptr, max_parts, scale, softcap,
    HEADS: tl.constexpr, HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr,
    M1: tl.constexpr, N: tl.constexpr, N_GROWING: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, HAS_SHARED: tl.constexpr, IS_RUN: tl.constexpr,
):
    """All items of a plan, dealt to a fixed number of programs: one launch, the same for any lengths and any sharing.

    A unit is one key head of one item; an item without lanes ends the list. Except for queries and rows, everything that a
    unit needs is in its item, so that reading rows begins early.
    """
    query = (q_ptr, q_lane, q_head)
    new = (k_ptr, k_lane, k_head, v_ptr, v_lane, v_head)
    pool = (rows_ptr, slot_stride, value_offset)
    plan = (order_ptr, pos_ptr)
    out = (acc_ptr, lse_ptr, max_parts)
    unit = tl.program_id(0)
    at = items_ptr + unit // HEADS * FIELDS
    lanes = tl.load(at)
    while lanes > 0:
        head = unit % HEADS
        kind = tl.load(at + 5)
        item = (lanes, tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4))
        slots = (tl.load(at + 6), tl.load(at + 7), tl.load(at + 8), tl.load(at + 9),
                 tl.load(at + 10), tl.load(at + 11), tl.load(at + 12), tl.load(at + 13))
        unit += tl.num_programs(0)
        at = items_ptr + unit // HEADS * FIELDS
        following = tl.load(at)
        if not IS_RUN:  # not one `if` with branches: each branch would get shared memory of its own
            if kind == GROWING:
                _attend_unit(desc, query, new, pool, plan, item, slots, head, out, scale, softcap,
                             HQ, G, D, D_PAD, M1, N_GROWING, PAGE, WINDOW, SOFTCAP, STAGES, TMA, True, GROWING)
            if (kind == WHOLE) & (lanes == 1):
                _attend_unit(desc, query, new, pool, plan, item, slots, head, out, scale, softcap,
                             HQ, G, D, D_PAD, M1, N, PAGE, WINDOW, SOFTCAP, STAGES, TMA, True, WHOLE)
        if HAS_SHARED:
            if (kind == WHOLE) & ((lanes > 1) | IS_RUN):
                _attend_unit(desc, query, new, pool, plan, item, slots, head, out, scale, softcap,
                             HQ, G, D, D_PAD, M, N, PAGE, WINDOW, SOFTCAP, STAGES, TMA, False, WHOLE)
        if IS_RUN:
            if kind == CAUSAL:
                _attend_unit(desc, query, new, pool, plan, item, slots, head, out, scale, softcap,
                             HQ, G, D, D_PAD, M, N, PAGE, WINDOW, SOFTCAP, STAGES, TMA, False, CAUSAL)
        lanes = following


@triton.jit
def _attend_unit(
    desc, query, new, pool, plan, item, slots, head, out, scale, softcap,
    HQ: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    IS_SINGLE: tl.constexpr, KIND: tl.constexpr,
):
    """The queries of an item's lanes for one key head (G of each lane, M rows in all) over the item's rows."""
    q_ptr, q_lane, q_head = query
    rows_ptr, slot_stride, value_offset = pool
    order_ptr, pos_ptr = plan
    lanes, first, start, end, part = item
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D_PAD)
    is_d = d < D
    is_m = m // G < lanes
    if IS_SINGLE:
        lane = tl.zeros([M], tl.int32) + first
    else:
        lane = tl.load(order_ptr + first + m // G, mask=is_m, other=0)
    number = head * G + m % G
    q = tl.load(q_ptr + lane[:, None] * q_lane + number[:, None] * q_head + d[None, :],
                mask=is_m[:, None] & is_d[None, :], other=0.0)
    low, stop = start, end
    largest = tl.full([M], NEG, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D_PAD], tl.float32)
    positions = tl.zeros([M], tl.int32)
    if KIND == GROWING:
        pos = tl.load(pos_ptr + first).to(tl.int32)
        stop = tl.minimum(end, pos)
        has_new = (pos >= start) & (pos < end)
        new_k, new_v = _write_new(new, pool, first, head, slots[0], pos, has_new, d, D, PAGE)
        score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None, :], 1) * scale
        if SOFTCAP:
            score = _cap(score, softcap)
        largest = tl.where(has_new, score, largest)
        total = tl.where(has_new, total + 1.0, total)
        acc += new_v.to(tl.float32)[None, :]
        if WINDOW:
            low = tl.maximum(start, pos - WINDOW + 1)
    elif WINDOW or KIND == CAUSAL:
        positions = tl.load(pos_ptr + lane, mask=is_m, other=0).to(tl.int32)
        if WINDOW:
            low = tl.maximum(start, tl.min(tl.where(is_m, positions, 2147483647), 0) - WINDOW + 1)
        if KIND == CAUSAL:
            stop = tl.minimum(stop, tl.max(positions, 0) + 1)
    begin, until, step = low // N * N, stop, N
    if KIND == WHOLE and not WINDOW:  # whole tiles without masks; the rows that are cut off at both ends follow below
        for row in tl.range((low + N - 1) // N * N, stop // N * N, N, num_stages=STAGES):
            slot = _choose_slot(row // PAGE - start // PAGE, slots)
            if TMA:
                at = slot * (slot_stride // D).to(tl.int32) + head * PAGE + row % PAGE
                k = desc.load([at, 0])
                v = desc.load([at + (value_offset // D).to(tl.int32), 0])
            else:
                tile = (rows_ptr + slot.to(tl.int64) * slot_stride + (head * PAGE + row % PAGE) * D
                        + n[:, None] * D + d[None, :])
                if D == D_PAD:
                    k = tl.load(tile)
                    v = tl.load(tile + value_offset)
                else:
                    k = tl.load(tile, mask=is_d[None, :], other=0.0)
                    v = tl.load(tile + value_offset, mask=is_d[None, :], other=0.0)
            s = tl.dot(q, k.T)
            if SOFTCAP:
                acc, total, largest = _take_in(_cap(s * scale, softcap), 1.0, v, acc, total, largest)
            else:
                acc, total, largest = _take_in(s, scale, v, acc, total, largest)
        begin, until, step = _find_cut_off(low, stop, N)
    for row in tl.range(begin, until, step, num_stages=1 if KIND == WHOLE and not WINDOW else STAGES):
        slot = _choose_slot(row // PAGE - start // PAGE, slots)
        tile = rows_ptr + slot.to(tl.int64) * slot_stride + (head * PAGE + row % PAGE) * D
        numbers = row + n
        is_row = (numbers >= low) & (numbers < stop)
        k = tl.load(tile + n[None, :] * D + d[:, None], mask=is_row[None, :] & is_d[:, None], other=0.0)
        v = tl.load(tile + value_offset + n[:, None] * D + d[None, :], mask=is_row[:, None] & is_d[None, :], other=0.0)
        s = tl.dot(q, k) * scale
        if SOFTCAP:
            s = _cap(s, softcap)
        is_seen = is_row[None, :]
        if WINDOW and KIND != GROWING:
            is_seen = is_seen & (numbers[None, :] > positions[:, None] - WINDOW)
        if KIND == CAUSAL:
            is_seen = is_seen & (numbers[None, :] <= positions[:, None])
        acc, total, largest = _take_in(tl.where(is_seen, s, float("-inf")), 1.0, v, acc, total, largest)
    acc_ptr, lse_ptr, max_parts = out
    own = (lane * HQ + number).to(tl.int64) * max_parts + part
    seen = tl.maximum(total, 1e-30)
    tl.store(lse_ptr + own, tl.where(total > 0, largest + tl.log2(seen), float("-inf")), mask=is_m)
    tl.store(acc_ptr + own[:, None] * D + d[None, :], acc / seen[:, None], mask=is_m[:, None] & is_d[None, :])


@triton.jit
def _write_new(new, pool, lane, head, slot, pos, has_new, d, D: tl.constexpr, PAGE: tl.constexpr):
    """Write a lane's new row to its slot, and return it: reads of the slot in this launch may not see it yet."""
    k_ptr, k_lane, k_head, v_ptr, v_lane, v_head = new
    rows_ptr, slot_stride, value_offset = pool
    mask = tl.where(has_new, d, D) < D
    at = rows_ptr + slot.to(tl.int64) * slot_stride + (head * PAGE + pos % PAGE) * D + d
    k = tl.load(k_ptr + lane * k_lane + head * k_head + d, mask=mask, other=0.0)
    v = tl.load(v_ptr + lane * v_lane + head * v_head + d, mask=mask, other=0.0)
    tl.store(at, k, mask=mask)
    tl.store(at + value_offset, v, mask=mask)
    return k, v


@triton.jit
def _take_in(s, scale, v, acc, total, largest):
    """Add scores (times `scale`) and values to a running softmax."""
    highest = tl.maximum(largest, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - highest[:, None])
    shrink = tl.exp2(largest - highest)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
    return acc, total * shrink + tl.sum(p, 1), highest


@triton.jit
def _find_cut_off(low, stop, N: tl.constexpr):
    """The tiles of [low, stop) that are not whole, as a range: none, one, or the first and the last."""
    left, right = low // N * N, stop // N * N
    has_left = low % N != 0
    begin = tl.where(has_left, left, right)
    until = tl.where(stop % N != 0, right + 1, tl.where(has_left, left + 1, begin))
    return begin, until, tl.maximum(right - left, 1)


@triton.jit
def _choose_slot(i, slots):
    """Choose between registers: a load from a list would keep the loop from prefetching."""
    slot = tl.where(i == 1, slots[1], slots[0])
    slot = tl.where(i == 2, slots[2], slot)
    slot = tl.where(i == 3, slots[3], slot)
    slot = tl.where(i == 4, slots[4], slot)
    slot = tl.where(i == 5, slots[5], slot)
    slot = tl.where(i == 6, slots[6], slot)
    return tl.where(i == 7, slots[7], slot)


@triton.jit
def _cap(s, softcap):
    """Scores (times log2 e) after a soft cap, softcap * tanh(score / softcap), by one exponential."""
    e = tl.exp2(2.0 * s / softcap)
    return softcap * 1.4426950408889634 * (1.0 - 2.0 / (e + 1.0))


@triton.jit
def join_parts(
    acc_ptr, lse_ptr, parts_ptr, sinks_ptr, out_ptr, max_parts,
    HQ: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, P: tl.constexpr, SINKS: tl.constexpr,
):
    """One query head of one entry: its parts as one result, P at a time. An entry without parts gets zeros."""
    entry, number = tl.program_id(0), tl.program_id(1)
    num = tl.load(parts_ptr + entry)
    own = (entry * HQ + number).to(tl.int64)
    d = tl.arange(0, D_PAD)
    is_d = d < D
    largest = NEG * 1.0
    total = 0.0
    result = tl.zeros([D_PAD], tl.float32)
    for begin in range(0, num, P):
        p = begin + tl.arange(0, P)
        is_p = p < num
        lse = tl.load(lse_ptr + own * max_parts + p, mask=is_p, other=float("-inf"))
        acc = tl.load(acc_ptr + (own * max_parts + p)[:, None] * D + d[None, :],
                      mask=is_p[:, None] & is_d[None, :], other=0.0)
        highest = tl.maximum(largest, tl.max(lse, 0))
        weight = tl.exp2(lse - highest)
        shrink = tl.exp2(largest - highest)
        result = result * shrink + tl.sum(acc * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        largest = highest
    if SINKS:
        sink = tl.load(sinks_ptr + number).to(tl.float32) * 1.4426950408889634
        highest = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - highest)
        result = result * shrink
        total = total * shrink + tl.exp2(sink - highest)
    tl.store(out_ptr + own * D + d, (result / tl.maximum(total, 1e-30)).to(out_ptr.dtype.element_ty), mask=is_d)


@triton.jit
def write_rows(
    k_ptr, k_head, k_row, v_ptr, v_head, v_row, rows_ptr, slot_stride, value_offset, places_ptr, num,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, T: tl.constexpr,
):
    """Write T of `num` keys and values of one head to their places."""
    head = tl.program_id(1)
    t = tl.program_id(0) * T + tl.arange(0, T)
    d = tl.arange(0, D_PAD)
    place = tl.load(places_ptr + t, mask=t < num, other=-1)
    mask = (place >= 0)[:, None] & (d < D)[None, :]
    at = _locate(rows_ptr, slot_stride, place, head, d, D, PAGE)
    t = t.to(tl.int64)
    tl.store(at, tl.load(k_ptr + head * k_head + t[:, None] * k_row + d[None, :], mask=mask), mask=mask)
    tl.store(at + value_offset, tl.load(v_ptr + head * v_head + t[:, None] * v_row + d[None, :], mask=mask), mask=mask)


@triton.jit
def gather_rows(
    rows_ptr, slot_stride, value_offset, places_ptr, num, k_ptr, v_ptr,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE: tl.constexpr, T: tl.constexpr,
):
    """Copy T of `num` keys and values of one head from their places to [heads, num, D]; zeros where there is no place."""
    head = tl.program_id(1)
    t = tl.program_id(0) * T + tl.arange(0, T)
    d = tl.arange(0, D_PAD)
    place = tl.load(places_ptr + t, mask=t < num, other=-1)
    is_in = (t < num)[:, None] & (d < D)[None, :]
    mask = (place >= 0)[:, None] & (d < D)[None, :]
    at = _locate(rows_ptr, slot_stride, place, head, d, D, PAGE)
    to = (head.to(tl.int64) * num + t)[:, None] * D + d[None, :]
    tl.store(k_ptr + to, tl.load(at, mask=mask, other=0.0), mask=is_in)
    tl.store(v_ptr + to, tl.load(at + value_offset, mask=mask, other=0.0), mask=is_in)


@triton.jit
def _locate(rows_ptr, slot_stride, place, head, d, D: tl.constexpr, PAGE: tl.constexpr):
    """The addresses of the keys of one head at these places."""
    at = (place // PAGE).to(tl.int64) * slot_stride + (head * PAGE + place % PAGE) * D
    return rows_ptr + at[:, None] + d[None, :]
