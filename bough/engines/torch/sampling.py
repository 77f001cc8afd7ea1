"""Choosing the next token from logits, as `SamplingParams` defines it.

Rows of the same kind are computed together, on their device and in double precision, and come to the host in one copy.
No row's result depends on the others. `tests/reference_sampler.py` is the definition in plain Python.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from bough.engines.shared.sampling import NONE_ALLOWED, NOT_FINITE, find_penalised, is_plain
from bough.errors import EngineError
from bough.types import Alternative, Draw, Sampled, TokenCounts

_NUM_CANDIDATES = 1024  # top-p looks at this many of the largest first: a full sort costs ten times more
_NUM_SCORED = 64  # rows of a prompt at a time: ranking takes several times their memory
_NUM_BIASES = 64  # the latest that stay on the device, 16 KB each
_NOT_FINITE, _NONE_ALLOWED = -1, -2  # instead of a token id, so that failures need no copy of their own
_FAILURES = {_NOT_FINITE: NOT_FINITE, _NONE_ALLOWED: NONE_ALLOWED}


def sample(logits: Sequence[Tensor], draws: Sequence[Draw]) -> list[Sampled]:
    """Choose one token for each row of logits, which stay as they are.

    Raises EngineError if a row has NaN or no finite logit, or if its mask forbids every token.
    """
    assert len(logits) == len(draws)
    chosen: dict[int, Sampled] = {}
    for indices in _group(logits, draws):
        rows = torch.stack([logits[index] for index in indices])
        chosen.update(zip(indices, _sample_rows(rows, [draws[index] for index in indices]), strict=True))
    return [chosen[index] for index in range(len(draws))]


def _group(logits: Sequence[Tensor], draws: Sequence[Draw]) -> Iterable[list[int]]:
    """The indices of rows that fit in one tensor; rows of plain argmax have groups of their own."""
    groups = defaultdict(list)
    for index, (row, draw) in enumerate(zip(logits, draws, strict=True)):
        groups[row.device, row.dtype, row.shape, is_plain(draw)].append(index)
    return groups.values()


def _sample_rows(rows: Tensor, draws: Sequence[Draw]) -> list[Sampled]:
    token_ids = _choose(rows, draws).tolist()
    for token_id in token_ids:
        if token_id < 0:
            raise EngineError(_FAILURES[token_id])
    return _describe(rows, token_ids, draws)


def _choose(rows: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The chosen token id of each row, or the code of a failure."""
    if all(map(is_plain, draws)):
        largest = rows.argmax(dim=-1, keepdim=True)
        return torch.where(rows.gather(-1, largest).isfinite(), largest, _NOT_FINITE).squeeze(-1)
    scores = _mask(_penalise(_bias(rows.to(_precise(rows.device)), draws), draws), draws)
    token_ids = scores.argmax(dim=-1, keepdim=True)
    best = scores.gather(-1, token_ids)
    if any(draw.params.temperature > 0 for draw in draws):
        is_greedy = _column([draw.params.temperature == 0 for draw in draws], scores) > 0
        token_ids = torch.where(is_greedy, token_ids, _draw(_weigh(scores, best, draws), draws))
    token_ids = torch.where(best.isfinite(), token_ids, _NONE_ALLOWED)
    return torch.where(rows.amax(dim=-1, keepdim=True).isfinite(), token_ids, _NOT_FINITE).squeeze(-1)


def _precise(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no doubles


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)


def _bias(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Add what requests add to the logits of single tokens. Costs O(entries), and one copy of the scores."""
    biased = [row for row, draw in enumerate(draws) if draw.params.logit_bias]
    if not biased:
        return scores
    scores = scores.clone()  # they may be the raw logits
    for row in biased:
        token_ids, biases = _load_bias(draws[row].params.logit_bias, scores.shape[-1], scores.device, scores.dtype)
        scores[row].index_add_(0, token_ids, biases)
    return scores


@lru_cache(maxsize=_NUM_BIASES)
def _load_bias(
    bias: tuple[tuple[int, float], ...], vocab_size: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Token ids and biases on the device, copied there once for a request and not again for each token."""
    known = [(token_id, each) for token_id, each in bias if token_id < vocab_size]  # see `_list_pairs`
    token_ids = torch.tensor([token_id for token_id, _ in known], dtype=torch.int64, device=device)
    return token_ids, torch.tensor([each for _, each in known], dtype=dtype, device=device)


def _penalise(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Lower the scores of tokens that were seen before: all pairs of a row and a token in one go."""
    seen = {row: each for row, draw in enumerate(draws) if (each := find_penalised(draw)) is not None}
    if not seen:
        return scores
    rows, token_ids, counts = _list_pairs(seen, scores.shape[-1]).to(scores.device)  # in one copy
    penalties = [(d.params.repeat_penalty, d.params.presence_penalty, d.params.frequency_penalty) for d in draws]
    repeat, presence, frequency = torch.tensor(penalties, dtype=scores.dtype, device=scores.device)[rows].unbind(-1)
    old = scores[rows, token_ids]
    new = torch.where(old > 0, old / repeat, old * repeat) - presence - frequency * counts
    return scores.index_put((rows, token_ids), new)


def _list_pairs(seen: Mapping[int, TokenCounts], vocab_size: int) -> Tensor:
    """Three lines: rows, tokens that were seen there, and how often. Costs no Python for each token."""
    lengths = torch.tensor([len(each.ids) for each in seen.values()])
    rows = torch.tensor(list(seen)).repeat_interleave(lengths)
    token_ids, counts = _join(each.ids for each in seen.values()), _join(each.counts for each in seen.values())
    is_known = (token_ids >= 0) & (token_ids < vocab_size)  # an id beyond the vocabulary would crash a GPU for good
    return torch.stack([rows, token_ids, counts])[:, is_known]


def _join(arrays: Iterable[array[int]]) -> Tensor:
    """All of the arrays in one tensor, which has a copy of them."""
    return torch.frombuffer(bytearray().join(arrays), dtype=torch.int64)


def _mask(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Set what a grammar forbids to -inf."""
    if all(draw.allowed is None for draw in draws):
        return scores
    num_bytes = (scores.shape[-1] + 7) // 8
    masks = [b"\xff" * num_bytes if draw.allowed is None else draw.allowed for draw in draws]
    packed = bytearray(b"".join(mask[:num_bytes].ljust(num_bytes, b"\0") for mask in masks))
    octets = torch.frombuffer(packed, dtype=torch.uint8).to(scores.device).view(len(draws), num_bytes, 1)
    bits = octets >> torch.arange(8, dtype=torch.uint8, device=scores.device) & 1
    return scores.masked_fill(bits.flatten(1)[:, : scores.shape[-1]] == 0, -torch.inf)


def _weigh(scores: Tensor, best: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Each token's probability relative to the likeliest, after temperature; 0 where a limit leaves the token out."""
    temperatures = _column([draw.params.temperature or 1.0 for draw in draws], scores)
    weights = ((scores - best) / temperatures).exp()
    limited = [row for row, draw in enumerate(draws) if draw.params.top_k or draw.params.top_p < 1]
    if limited:
        weights[limited] = _keep_largest(scores[limited], weights[limited], [draws[row] for row in limited])
    return weights * (weights >= _column([draw.params.min_p for draw in draws], weights))


def _keep_largest(scores: Tensor, weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The weights of the tokens that top-k and then top-p keep, of equal ones the lowest ids; 0 for all others."""
    vocab_size = scores.shape[-1]
    num_candidates = min(vocab_size, max(draw.params.top_k or _NUM_CANDIDATES for draw in draws))
    ranked = scores.topk(num_candidates, dim=-1)
    counts = _count_kept(weights, weights.gather(-1, ranked.indices), draws)
    if num_candidates < vocab_size and counts.max() > num_candidates:
        ranked = scores.topk(vocab_size, dim=-1)
        counts = _count_kept(weights, weights.gather(-1, ranked.indices), draws)
    return weights * _find_largest(scores, ranked.values.gather(-1, counts - 1), counts)


def _find_largest(scores: Tensor, least: Tensor, counts: Tensor | int) -> Tensor:
    """Which tokens are the `counts` largest of each row, the last of which is `least`; of equal ones the lowest ids."""
    is_larger, is_least = scores > least, scores == least
    room = counts - is_larger.sum(dim=-1, keepdim=True)
    return is_larger | (is_least & (is_least.cumsum(dim=-1) <= room))


def _count_kept(weights: Tensor, ranked: Tensor, draws: Sequence[Draw]) -> Tensor:
    """How many of each row's largest weights are kept; more than `ranked` has, if those do not suffice to tell."""
    num_ranked = ranked.shape[-1]
    top_k = _column([min(draw.params.top_k or weights.shape[-1], weights.shape[-1]) for draw in draws], weights)
    top_p = _column([draw.params.top_p if draw.params.top_p < 1 else math.inf for draw in draws], weights)
    mass = (ranked * (torch.arange(num_ranked, device=ranked.device) < top_k)).cumsum(dim=-1)
    total = torch.where(top_k <= num_ranked, mass[:, -1:], weights.sum(dim=-1, keepdim=True))
    is_short = mass < top_p * total
    return torch.minimum(is_short.sum(dim=-1, keepdim=True) + 1, top_k).long()


def _draw(weights: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The first token, in the order of ids, at which the cumulative distribution exceeds the draw's number."""
    # A token without weight gets 0 and can never exceed; the largest sum always does, as the number is below 1.
    cumulative = weights.cumsum(dim=-1) * (weights > 0)
    below_one = 1 - torch.finfo(weights.dtype).eps / 2
    uniforms = _column([min(draw.uniform, below_one) for draw in draws], weights)
    is_beyond = cumulative > uniforms * cumulative.amax(dim=-1, keepdim=True)
    return is_beyond.to(torch.uint8).argmax(dim=-1, keepdim=True)


def score(rows: Tensor, token_ids: Sequence[int], num_top: int) -> list[Sampled]:
    """How likely a given token is in each row of logits, and the likeliest ones there, some rows at a time."""
    results: list[Sampled] = []
    for start in range(0, len(token_ids), _NUM_SCORED):
        part = token_ids[start : start + _NUM_SCORED]
        results += _score(rows[start : start + len(part)], part, num_top)
    return results


def _score(rows: Tensor, token_ids: Sequence[int], num_top: int) -> list[Sampled]:
    ranked = _rank(rows, num_top)
    chosen = torch.tensor(token_ids, device=rows.device).unsqueeze(-1)
    logprobs = torch.log_softmax(rows.float(), dim=-1).gather(-1, torch.cat([chosen, ranked], dim=-1)).tolist()
    return [
        Sampled(token_id, own[0], tuple(map(Alternative, top_ids, own[1:])))
        for token_id, own, top_ids in zip(token_ids, logprobs, ranked.tolist(), strict=True)
    ]


def _describe(rows: Tensor, token_ids: Sequence[int], draws: Sequence[Draw]) -> list[Sampled]:
    """The results, with log-probabilities of the raw distribution where they were asked for."""
    results = [Sampled(token_id) for token_id in token_ids]
    asking = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
    if asking:
        most = max(draws[row].params.logprobs or 0 for row in asking)
        scored = _score(rows[asking], [token_ids[row] for row in asking], most)
        for row, each in zip(asking, scored, strict=True):
            results[row] = replace(each, top=each.top[: draws[row].params.logprobs])
    return results


def _rank(rows: Tensor, count: int) -> Tensor:
    """The ids of each row's `count` largest (or all), in falling order, of equal ones the lowest first."""
    count = min(count, rows.shape[-1])
    if count == 0:
        return torch.empty(len(rows), 0, dtype=torch.long, device=rows.device)
    least = rows.topk(count, dim=-1).values[:, -1:]  # `topk` does not say which of equal ones it takes
    largest = _find_largest(rows, least, count).nonzero()[:, 1].view(len(rows), count)
    return largest.gather(-1, rows.gather(-1, largest).sort(dim=-1, descending=True, stable=True).indices)
