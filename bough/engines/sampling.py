"""Choosing the next token on the host, as `SamplingParams` defines it: row by row, in NumPy's double precision.

A row is read where it is, so this serves every engine whose logits the host can read; CUDA has kernels of its own
(`torch/pooled/sampling`). Few tokens of a row are looked at twice: limits are found without sorting the row. The samplers
of mlx-lm and transformers filter in another order and draw otherwise, so they do not cover this definition.
`tests/reference_sampler.py` is the definition in plain Python.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bough.errors import EngineError
from bough.types import Alternative, Draw, SampledToken, SamplingParams, TokenCounts

Scores = NDArray[np.floating[Any]]
Positions = NDArray[np.intp]

NOT_FINITE = "the largest logit is not a finite number: the model's output is broken"
NONE_ALLOWED = "no token can be chosen: the grammar's mask forbids all of them"

_NUM_BIASES = 64  # the latest that are kept as arrays
_GROUP_SIZE = 64  # larger ones leave more to look at, smaller ones more maxima
_SLACK = 1e-6  # far above what rounding moves, far below what would let many more tokens through


def is_plain(draw: Draw) -> bool:
    """Whether the draw is plain argmax: no temperature, bias, mask, penalties or log-probabilities."""
    params = draw.params
    is_unchanged = not params.logit_bias and draw.allowed is None and find_penalised(draw) is None
    return params.temperature == 0 and params.logprobs is None and is_unchanged


def find_penalised(draw: Draw) -> TokenCounts | None:
    """The tokens whose scores the penalties change, with their counts; None if there are none.

    Some may be beyond the vocabulary: an engine has to leave those out.
    """
    return draw.seen if draw.seen is not None and draw.seen.ids and draw.params.has_penalties else None


def sample_row(row: Scores, draw: Draw) -> SampledToken:
    """Choose one token by a row of logits in float32 or float64, which stays as it is.

    Raises EngineError if the row has NaN or no finite logit, or if its mask forbids every token.
    """
    if not np.isfinite(row.max()):
        raise EngineError(NOT_FINITE)
    with np.errstate(over="ignore"):  # what overflows is infinitely unlikely, as it should be
        token_id = _choose(_allow(_penalise(_bias(row, draw.params), draw), draw.allowed), draw)
    return SampledToken(token_id) if draw.params.logprobs is None else score_row(row, token_id, draw.params.logprobs)


def score_row(row: Scores, token_id: int, num_top: int) -> SampledToken:
    """The log-probability of a given token in a row of logits, and the likeliest ones there."""
    best = row.max()
    log_total = float(best) + math.log(np.exp(row - best).sum(dtype=np.float64))
    top = tuple(Alternative(each, float(row[each]) - log_total) for each in _rank(row, num_top))
    return SampledToken(token_id, float(row[token_id]) - log_total, top)


@dataclass(frozen=True)
class _Candidates:
    """The tokens still in question, in the order of their ids; `ids` is None as long as these are all."""

    scores: Scores
    ids: Positions | None = None

    def keep(self, positions: Positions) -> _Candidates:
        return _Candidates(self.scores[positions], positions if self.ids is None else self.ids[positions])

    def token_id(self, position: int) -> int:
        return position if self.ids is None else int(self.ids[position])


def _bias(row: Scores, params: SamplingParams) -> Scores:
    """The row with the request's biases added; the row itself if there are none."""
    if not params.logit_bias:
        return row
    token_ids, biases = _read_bias(params.logit_bias, len(row))
    scores = row.astype(np.float64)
    scores[token_ids] += biases
    return scores


@lru_cache(maxsize=_NUM_BIASES)
def _read_bias(bias: tuple[tuple[int, float], ...], vocab_size: int) -> tuple[Positions, NDArray[np.float64]]:
    """Token ids within the vocabulary and their biases as arrays, made once for a request."""
    known = [(token_id, each) for token_id, each in bias if token_id < vocab_size]
    return np.array([token_id for token_id, _ in known], np.intp), np.array([each for _, each in known], np.float64)


def _penalise(row: Scores, draw: Draw) -> Scores:
    """The row with the scores of seen tokens lowered; the row itself if no token is penalised."""
    seen = find_penalised(draw)
    if seen is None:
        return row
    params = draw.params
    token_ids, counts = np.array(seen.ids), np.array(seen.counts)  # copies, because the arrays change with the next token
    is_known = (token_ids >= 0) & (token_ids < len(row))
    token_ids, counts = token_ids[is_known], counts[is_known]
    scores = row.astype(np.float64)
    old = scores[token_ids]
    new = np.where(old > 0, old / params.repeat_penalty, old * params.repeat_penalty)
    scores[token_ids] = new - params.presence_penalty - params.frequency_penalty * counts
    return scores


def _allow(scores: Scores, allowed: bytes | None) -> _Candidates:
    """The tokens that a grammar allows; a mask that is too short forbids the rest."""
    if allowed is None:
        return _Candidates(scores)
    octets = np.frombuffer(allowed.ljust((len(scores) + 7) // 8, b"\0"), dtype=np.uint8)
    bits = np.unpackbits(octets, count=len(scores), bitorder="little")
    return _Candidates(scores).keep(np.flatnonzero(bits.view(np.bool_)))


def _choose(candidates: _Candidates, draw: Draw) -> int:
    """The token with the largest score, or the one that the draw's number falls on."""
    params = draw.params
    best = float(candidates.scores.max(initial=-math.inf))
    if not math.isfinite(best):
        raise EngineError(NONE_ALLOWED)
    if params.temperature == 0:
        return candidates.token_id(int(candidates.scores.argmax()))
    if params.top_n_sigma > 0:  # so many standard deviations of the possible scores below the best
        possible = candidates.scores[candidates.scores > -math.inf].astype(np.float64)
        least = best - params.top_n_sigma * possible.std()
        candidates = candidates.keep(np.flatnonzero(candidates.scores >= least))
    candidates = _limit(candidates, best, params)
    weights = _weigh(candidates.scores, best, params.temperature)
    weights[weights < params.min_p] = 0
    # The first sum above a number is never that of a token without weight, and the last is above: `uniform` is below 1.
    cumulative = weights.cumsum()
    return candidates.token_id(int(cumulative.searchsorted(draw.uniform * cumulative[-1], side="right")))


def _limit(candidates: _Candidates, best: float, params: SamplingParams) -> _Candidates:
    """The tokens that top-k and then top-p keep; without those too unlikely for min-p where that is cheaper."""
    scores = candidates.scores
    if 0 < params.top_k < len(scores):
        candidates = candidates.keep(_find_largest(scores, params.top_k))
    elif params.min_p > 0 and params.top_p == 1:  # otherwise top-p counts their mass
        least = best + params.temperature * math.log(params.min_p)
        least -= _SLACK * (abs(best) + abs(least) + params.temperature)  # `weights` decide about those at the limit
        candidates = candidates.keep(np.flatnonzero(scores >= least))
    if params.top_p < 1:
        candidates = candidates.keep(_find_mass(candidates.scores, best, params))
    return candidates


def _weigh(scores: Scores, best: float, temperature: float) -> NDArray[np.float64]:
    """Each token's probability relative to the likeliest, after temperature."""
    weights = scores.astype(np.float64)
    weights -= best
    weights /= temperature
    return np.exp(weights, out=weights)


def _find_mass(scores: Scores, best: float, params: SamplingParams) -> Positions:
    """The positions of the fewest tokens that have the share `top_p` of the weight, in rising order."""
    weights = _weigh(scores, best, params.temperature)
    total = weights.sum()
    # Sorting takes longest, and tokens lighter than this weigh together less than what top-p leaves out.
    too_light = (1 - params.top_p) * total / len(weights) / 2
    ranked = np.sort(scores[weights > too_light])[::-1]
    mass = _weigh(ranked, best, params.temperature).cumsum()
    count = min(int(np.count_nonzero(mass < params.top_p * total)) + 1, len(ranked))
    return _find_down_to(scores, ranked[count - 1], count)


def _find_largest(scores: Scores, count: int) -> Positions:
    """The positions of the `count` largest scores (or all), in rising order; of equal ones the first."""
    near = np.flatnonzero(scores >= _find_bound(scores, count))
    if len(near) <= count:
        return near
    values = scores[near]
    return near[_find_down_to(values, np.partition(values, -count)[-count], count)]


def _find_down_to(scores: Scores, least: np.floating[Any], count: int) -> Positions:
    """The positions of the `count` largest scores, the last of which is `least`; of equal ones the first."""
    is_larger = scores > least
    room = count - int(np.count_nonzero(is_larger))
    is_larger[np.flatnonzero(scores == least)[:room]] = True
    return np.flatnonzero(is_larger)


def _find_bound(scores: Scores, count: int) -> float:
    """A score that at least `count` tokens reach and few more: looking for the largest among all takes ten times longer.

    It is the `count`-th of the largest of groups, each of which contributes at least one token.
    """
    group_size = min(_GROUP_SIZE, len(scores) // (4 * count))
    if group_size < 2:
        return -math.inf
    whole = scores[: len(scores) // group_size * group_size]
    maxima = whole.reshape(group_size, -1).max(axis=0)
    return float(np.partition(maxima, -count)[-count])


def _rank(row: Scores, count: int) -> list[int]:
    """The ids of the `count` largest (or all), in falling order, of equal ones the lowest first."""
    if count == 0:
        return []
    largest = _find_largest(row, count)
    ranked: list[int] = largest[np.argsort(-row[largest], kind="stable")].tolist()
    return ranked
