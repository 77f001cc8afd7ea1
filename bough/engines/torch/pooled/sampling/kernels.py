"""Kernels that choose tokens: no row is sorted, and no number is copied to the host between two of them.

A row of scores is cut into parts of `BLOCK` tokens. Most kernels run once for each row and part and write sums of their
part; the next kernel adds them up, always in the same order. So a row's choice does not depend on its neighbours.

The score at which top-k or top-p ends is found in two steps. A sorted sample of the row gives pivots that cut it into
`BINS` bins of about equal size. The exact count and weight above each pivot show which bin has the end; its scores are
gathered, and bisection over the bits of a float finds the end among them. That takes at most 32 rounds for every
distribution. Bins of very different sizes, as of a row with many equal scores, only take longer.

`table` has one line of `COLUMNS` doubles for each row, which `table.py` describes. `scales` is log2(e) / temperature, and 0
for rows that are greedy or have failed: kernels skip those. Importing this module needs triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 2048  # tokens of a part
SAMPLE = 1024  # scores of a row that the pivots are taken from
BINS = 8
CHUNK = 16384  # scores of a bin that stay in registers: an eighth of a vocabulary of 128k

_COLUMNS = tl.constexpr(6)
_SCALE, _TOP_K, _TOP_P, _MIN_P, _UNIFORM, _SCORE_ROW = (tl.constexpr(column) for column in range(6))
_NOT_FINITE, _NONE_ALLOWED = tl.constexpr(-1), tl.constexpr(-2)


# Scores: a copy of the logits, for rows with a mask, biases or penalties


@triton.jit
def copy_scores(logits, row_stride, scores, changed, masks, mask_bytes, vocab_size, BLOCK: tl.constexpr):
    """Copy one part of a changed row as float32, with -inf where its mask forbids. `changed` has (row, mask or -1)."""
    score_row = tl.program_id(0)
    row, mask_row = tl.load(changed + 2 * score_row), tl.load(changed + 2 * score_row + 1)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab_size
    x = tl.load(logits + row * row_stride + ids, mask=is_token, other=float("-inf")).to(tl.float32)
    if mask_row >= 0:
        octets = tl.load(masks + mask_row * mask_bytes + ids // 8, mask=is_token, other=0).to(tl.int32)
        x = tl.where(((octets >> (ids % 8)) & 1) != 0, x, float("-inf"))
    tl.store(scores + score_row.to(tl.int64) * vocab_size + ids, x, mask=is_token)


@triton.jit
def add_biases(scores, segments, token_ids, biases, vocab_size, BLOCK: tl.constexpr):
    """Add biases to some scores. A line of `segments` has (row of `scores`, start, end)."""
    segment = segments + 3 * tl.program_id(0)
    place = tl.load(segment + 1) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_entry = place < tl.load(segment + 2)
    ids = tl.load(token_ids + place, mask=is_entry, other=-1)
    is_entry = is_entry & (ids >= 0) & (ids < vocab_size)  # an id beyond the vocabulary would crash a GPU for good
    address = scores + tl.load(segment) * vocab_size + ids
    x = tl.load(address, mask=is_entry, other=0.0).to(tl.float64)
    tl.store(address, (x + tl.load(biases + place, mask=is_entry, other=0.0)).to(tl.float32), mask=is_entry)


@triton.jit
def penalise_scores(scores, segments, token_ids, counts, penalties, vocab_size, BLOCK: tl.constexpr):
    """Lower the scores of tokens seen before. A line of `penalties` has those for repetition, presence and frequency."""
    segment, penalty = segments + 3 * tl.program_id(0), penalties + 3 * tl.program_id(0)
    place = tl.load(segment + 1) + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_entry = place < tl.load(segment + 2)
    ids = tl.load(token_ids + place, mask=is_entry, other=-1)
    is_entry = is_entry & (ids >= 0) & (ids < vocab_size)
    address = scores + tl.load(segment) * vocab_size + ids
    x = tl.load(address, mask=is_entry, other=0.0).to(tl.float64)
    repeat, presence, frequency = tl.load(penalty), tl.load(penalty + 1), tl.load(penalty + 2)
    x = tl.where(x > 0, x / repeat, x * repeat) - presence
    x -= frequency * tl.load(counts + place, mask=is_entry, other=0).to(tl.float64)
    tl.store(address, x.to(tl.float32), mask=is_entry)


# The likeliest token


@triton.jit
def find_part_maxima(
    logits, row_stride, scores, table, maxima, ids_of_maxima, raw_maxima, vocab_size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest score of one part of a row, its lowest id, and the largest logit: +inf if there is a NaN."""
    row, part = tl.program_id(0), tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    tl.store(raw_maxima + row * PARTS + part, tl.max(x, 0))
    score_row = tl.load(table + row * _COLUMNS + _SCORE_ROW).to(tl.int64)
    if score_row >= 0:
        x = tl.load(scores + score_row * vocab_size + ids, mask=ids < vocab_size, other=float("-inf"))
    largest, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(maxima + row * PARTS + part, largest)
    tl.store(ids_of_maxima + row * PARTS + part, part * BLOCK + at)


@triton.jit
def choose_likeliest(
    table, maxima, ids_of_maxima, raw_maxima, best, scales, thresholds, rooms, ids, codes, num_parts, PARTS: tl.constexpr
):
    """The likeliest token of a row, or the code of a failure; the row then has no threshold yet."""
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    place, is_part = row * PARTS + part, part < num_parts
    raw = tl.max(tl.load(raw_maxima + place, mask=is_part, other=float("-inf")), 0)
    values = tl.load(maxima + place, mask=is_part, other=float("-inf"))
    largest, at = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    is_finite, is_possible = tl.abs(raw) < float("inf"), tl.abs(largest) < float("inf")
    code = tl.load(ids_of_maxima + row * PARTS + at).to(tl.int64)
    code = tl.where(is_finite, tl.where(is_possible, code, _NONE_ALLOWED), _NOT_FINITE)
    scale = tl.load(table + row * _COLUMNS + _SCALE).to(tl.float32)
    tl.store(codes + row, code)
    tl.store(ids + row, tl.maximum(code, 0))
    tl.store(best + row, largest)
    tl.store(scales + row, tl.where(code >= 0, scale, 0.0))
    tl.store(thresholds + row, float("-inf"))
    tl.store(rooms + row, 0)


# Shared by the kernels below


@triton.jit
def _load_scores(logits, row_stride, scores, table, row, ids, is_token, vocab_size):
    """Scores of a row: its own copy if it has one, else the logits."""
    score_row = tl.load(table + row * _COLUMNS + _SCORE_ROW).to(tl.int64)
    if score_row >= 0:
        x = tl.load(scores + score_row * vocab_size + ids, mask=is_token, other=float("-inf"))
    else:
        x = tl.load(logits + row.to(tl.int64) * row_stride + ids, mask=is_token, other=float("-inf")).to(tl.float32)
    return x


@triton.jit
def _weigh(x, best, scale):
    """Probabilities relative to the likeliest token's."""
    return tl.where(x > float("-inf"), tl.exp2((x - best) * scale), 0.0)


@triton.jit
def _has_limit(table, row, SECOND: tl.constexpr):
    """Whether a row has a limit for this round: the first is for top-k or top-p, the second for top-p after top-k."""
    has_top_k = tl.load(table + row * _COLUMNS + _TOP_K) > 0
    has_top_p = tl.load(table + row * _COLUMNS + _TOP_P) < 1
    return has_top_k & has_top_p if SECOND else has_top_k | has_top_p


# Top-k and top-p


@triton.jit
def take_sample(logits, row_stride, scores, table, scales, pivots, vocab_size, SAMPLE: tl.constexpr, BINS: tl.constexpr):
    """Cut a row into bins of about equal size: pivots in falling order, the last of which is -inf."""
    row = tl.program_id(0)
    if (tl.load(scales + row) == 0) | (not _has_limit(table, row, False)):
        return
    rank = tl.arange(0, SAMPLE)
    ids = (rank.to(tl.int64) * vocab_size) // SAMPLE
    x = tl.sort(_load_scores(logits, row_stride, scores, table, row, ids, ids < vocab_size, vocab_size), descending=True)
    width: tl.constexpr = SAMPLE // BINS
    tl.store(pivots + row * BINS + rank // width, x, mask=(rank % width == width - 1) & (rank < SAMPLE - 1))
    tl.store(pivots + row * BINS + BINS - 1, float("-inf"))


@triton.jit
def measure_bins(
    logits, row_stride, scores, table, best, scales, pivots, bin_counts, bin_weights, vocab_size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """For one part: the number and weight of the scores at or above each pivot."""
    row, part = tl.program_id(0), tl.program_id(1)
    scale = tl.load(scales + row)
    if (scale == 0) | (not _has_limit(table, row, False)):
        return
    ids = part * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab_size
    x = _load_scores(logits, row_stride, scores, table, row, ids, is_token, vocab_size)
    weights = _weigh(x, tl.load(best + row), scale)
    for each in tl.static_range(BINS):
        is_above = is_token & (x >= tl.load(pivots + row * BINS + each))
        place = (row * BINS + each) * PARTS + part
        tl.store(bin_counts + place, tl.sum(is_above.to(tl.int32), 0))
        tl.store(bin_weights + place, tl.sum(tl.where(is_above, weights, 0.0), 0))


@triton.jit
def _find_target(table, row, total_weight, kept_weights, SECOND: tl.constexpr):
    """The weight or count to be reached from the largest score downwards, and whether it is a weight."""
    top_k, top_p = tl.load(table + row * _COLUMNS + _TOP_K), tl.load(table + row * _COLUMNS + _TOP_P)
    if SECOND:
        is_weight = top_k > 0
        target = top_p * tl.load(kept_weights + row)
    else:
        is_weight = top_k == 0
        target = tl.where(is_weight, top_p * total_weight, top_k)
    return tl.maximum(target, 1e-30), is_weight  # with 0 there would be no end


@triton.jit
def _sum_bins(counts, weights, row, num_parts, PARTS: tl.constexpr, BINS: tl.constexpr):
    """The counts and weights at or above each pivot of a row."""
    part = tl.arange(0, PARTS)[None, :]
    place, is_part = (row * BINS + tl.arange(0, BINS)[:, None]) * PARTS + part, part < num_parts
    count = tl.sum(tl.load(counts + place, mask=is_part, other=0), 1)
    return count, tl.sum(tl.load(weights + place, mask=is_part, other=0.0).to(tl.float64), 1)


@triton.jit
def _find_bin(table, row, counts, weights, kept_weights, BINS: tl.constexpr, SECOND: tl.constexpr):
    """The first bin with which the target is reached, the target, and whether that is a weight."""
    target, is_weight = _find_target(table, row, tl.max(weights, 0), kept_weights, SECOND)
    reached = tl.where(is_weight, weights, counts.to(tl.float64))
    return tl.minimum(tl.sum((reached < target).to(tl.int32), 0), BINS - 1), target, is_weight


@triton.jit
def gather_bin(
    logits, row_stride, scores, table, scales, pivots, bin_counts, bin_weights, kept_weights, gathered, vocab_size,
    num_parts, PARTS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Append one part's scores within the bin that has the end, in the order of ids."""
    row, part = tl.program_id(0), tl.program_id(1)
    if (tl.load(scales + row) == 0) | (not _has_limit(table, row, SECOND)):
        return
    counts, weights = _sum_bins(bin_counts, bin_weights, row, num_parts, PARTS, BINS)
    bin_id, _, _ = _find_bin(table, row, counts, weights, kept_weights, BINS, SECOND)
    parts = tl.arange(0, PARTS)
    earlier = row * BINS * PARTS + parts
    start = tl.sum(tl.load(bin_counts + earlier + bin_id * PARTS, mask=parts < part, other=0), 0)
    start -= tl.sum(tl.load(bin_counts + earlier + (bin_id - 1) * PARTS, mask=(parts < part) & (bin_id > 0), other=0), 0)
    upper = tl.load(pivots + row * BINS + bin_id - 1, mask=bin_id > 0, other=float("inf"))
    ids = part * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab_size
    x = _load_scores(logits, row_stride, scores, table, row, ids, is_token, vocab_size)
    is_inside = is_token & (x >= tl.load(pivots + row * BINS + bin_id)) & (x < upper)
    place = start + tl.cumsum(is_inside.to(tl.int32), 0) - 1
    tl.store(gathered + row.to(tl.int64) * vocab_size + place, x, mask=is_inside)


@triton.jit
def _to_key(x):
    """An integer that orders as the float does."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _to_float(key):
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _load_chunk(gathered, start, size, CHUNK: tl.constexpr):
    place = start + tl.arange(0, CHUNK)
    return tl.load(gathered + place, mask=place < size, other=float("nan"))  # which compares with nothing


@triton.jit
def find_threshold(
    table, best, scales, pivots, bin_counts, bin_weights, kept_weights, gathered, thresholds, rooms, vocab_size, num_parts,
    PARTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """The last score that a limit keeps, and how many scores equal to it are kept (`rooms`): those with the lowest ids."""
    row = tl.program_id(0)
    scale = tl.load(scales + row)
    if (scale == 0) | (not _has_limit(table, row, SECOND)):
        return
    largest = tl.load(best + row)
    gathered += row.to(tl.int64) * vocab_size
    counts, weights = _sum_bins(bin_counts, bin_weights, row, num_parts, PARTS, BINS)
    bin_id, target, is_weight = _find_bin(table, row, counts, weights, kept_weights, BINS, SECOND)
    bins = tl.arange(0, BINS)
    count_above = tl.sum(tl.where(bins == bin_id - 1, counts, 0), 0)
    weight_above = tl.sum(tl.where(bins == bin_id - 1, weights, 0.0), 0)
    size = tl.sum(tl.where(bins == bin_id, counts, 0), 0) - count_above
    above = tl.where(is_weight, weight_above, count_above.to(tl.float64))

    first = _load_chunk(gathered, 0, size, CHUNK)
    measure = tl.where(is_weight, _weigh(first, largest, scale), 1.0)
    low = _to_key(tl.load(pivots + row * BINS + bin_id))  # with all from here on the target is reached
    upper = tl.load(pivots + row * BINS + bin_id - 1, mask=bin_id > 0, other=float("inf"))
    high = tl.minimum(_to_key(upper), _to_key(largest) + 1)  # here it is not
    while high - low > 1:
        middle = (low + high) >> 1
        pivot = _to_float(middle)
        reached = above + tl.sum(tl.where(first >= pivot, measure, 0.0), 0).to(tl.float64)
        for start in range(CHUNK, size, CHUNK):
            x = _load_chunk(gathered, start, size, CHUNK)
            more = tl.where(is_weight, _weigh(x, largest, scale), 1.0)
            reached += tl.sum(tl.where(x >= pivot, more, 0.0), 0).to(tl.float64)
        is_reached = reached >= target
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)

    threshold = _to_float(low)
    num_equal = 0
    for start in range(0, size, CHUNK):
        x = _load_chunk(gathered, start, size, CHUNK)
        is_above = x > threshold
        count_above += tl.sum(is_above.to(tl.int32), 0)
        weight_above += tl.sum(tl.where(is_above, _weigh(x, largest, scale), 0.0), 0).to(tl.float64)
        num_equal += tl.sum((x == threshold).to(tl.int32), 0)
    weight = _weigh(threshold, largest, scale).to(tl.float64)
    missing = tl.where(is_weight, (target - weight_above) / tl.maximum(weight, 1e-300), target - count_above)
    room = tl.ceil(tl.minimum(tl.maximum(missing, 1.0), tl.maximum(num_equal, 1).to(tl.float64))).to(tl.int32)
    if SECOND:  # the end of top-p is not behind that of top-k
        last, last_room = tl.load(thresholds + row), tl.load(rooms + row)
        room = tl.where(threshold > last, room, tl.where(threshold == last, tl.minimum(room, last_room), last_room))
        threshold = tl.maximum(threshold, last)
    tl.store(thresholds + row, threshold)
    tl.store(rooms + row, room)
    tl.store(kept_weights + row, weight_above + room * weight)


# The draw


@triton.jit
def weigh_parts(
    logits, row_stride, scores, table, best, scales, thresholds, part_weights, part_equals, vocab_size,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For one part: the weight of the scores above the threshold and the number equal to it, without those below min-p."""
    row, part = tl.program_id(0), tl.program_id(1)
    scale = tl.load(scales + row)
    if scale == 0:
        return
    ids = part * BLOCK + tl.arange(0, BLOCK)
    x = _load_scores(logits, row_stride, scores, table, row, ids, ids < vocab_size, vocab_size)
    weights = _weigh(x, tl.load(best + row), scale)
    threshold = tl.load(thresholds + row)
    is_likely = (weights > 0) & (weights >= tl.load(table + row * _COLUMNS + _MIN_P).to(tl.float32))
    tl.store(part_weights + row * PARTS + part, tl.sum(tl.where(is_likely & (x > threshold), weights, 0.0), 0))
    tl.store(part_equals + row * PARTS + part, tl.sum((is_likely & (x == threshold)).to(tl.int32), 0))


@triton.jit
def draw_tokens(
    logits, row_stride, scores, table, best, scales, thresholds, rooms, part_weights, part_equals, ids_out, codes,
    vocab_size, num_parts, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first token, in the order of ids, at which the weight of what is kept exceeds the draw's share of it."""
    row = tl.program_id(0)
    scale = tl.load(scales + row)
    if scale == 0:
        return
    largest, threshold = tl.load(best + row), tl.load(thresholds + row)
    parts = tl.arange(0, PARTS)
    equals = tl.load(part_equals + row * PARTS + parts, mask=parts < num_parts, other=0)
    kept = tl.minimum(tl.maximum(tl.load(rooms + row) - (tl.cumsum(equals, 0) - equals), 0), equals)
    above = tl.load(part_weights + row * PARTS + parts, mask=parts < num_parts, other=0.0).to(tl.float64)
    weights = above + kept * _weigh(threshold, largest, scale).to(tl.float64)
    running = tl.cumsum(weights, 0)
    wanted = tl.load(table + row * _COLUMNS + _UNIFORM) * tl.max(running, 0)
    last = tl.max(tl.where(weights > 0, parts, 0), 0)  # rounding may leave nothing beyond
    part = tl.minimum(tl.min(tl.where((weights > 0) & (running > wanted), parts, PARTS), 0), last)
    before = tl.sum(tl.where(parts < part, weights, 0.0), 0)
    room = tl.sum(tl.where(parts == part, kept, 0), 0)

    place = tl.arange(0, BLOCK)
    ids = part * BLOCK + place
    x = _load_scores(logits, row_stride, scores, table, row, ids, ids < vocab_size, vocab_size)
    weight = _weigh(x, largest, scale)
    is_likely = (weight > 0) & (weight >= tl.load(table + row * _COLUMNS + _MIN_P).to(tl.float32))
    is_equal = is_likely & (x == threshold)
    is_kept = (is_likely & (x > threshold)) | (is_equal & (tl.cumsum(is_equal.to(tl.int32), 0) <= room))
    reached = before + tl.cumsum(tl.where(is_kept, weight, 0.0).to(tl.float64), 0)
    found = tl.min(tl.where(is_kept & (reached > wanted), place, BLOCK), 0)
    token = part * BLOCK + tl.minimum(found, tl.max(tl.where(is_kept, place, 0), 0))
    tl.store(ids_out + row, token.to(tl.int64))
    tl.store(codes + row, token.to(tl.int64))
