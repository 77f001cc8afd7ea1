"""Choosing the next token from logits, as `SamplingParams` defines it.

For plain argmax the device finds the largest logit of all rows, and only ids come to the host. Everything else is computed
on the host, row by row, in NumPy's double precision: Apple's GPUs have none, and share their memory with the host, so
that a row is read where it lies. mlx-lm's own `sample_utils` filters in another order and draws by `mx.random.categorical`,
so it does not cover this definition. `tests/reference_sampler.py` is the definition in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from bough.engines.shared.sampling import NONE_ALLOWED, NOT_FINITE, find_penalised, is_plain
from bough.errors import EngineError
from bough.types import Alternative, Draw, Sampled, SamplingParams

Scores = NDArray[np.floating[Any]]
Positions = NDArray[np.intp]

_NUM_BIASES = 64  # the latest that are kept as arrays
_BROKEN = -1  # instead of a token id, so that finding a failure needs no second wait
_GROUP_SIZE = 64  # larger ones leave more to look at, smaller ones more maxima
_SLACK = 1e-6  # far above what rounding moves, far below what would let many more tokens through


def sample(logits: Sequence[mx.array], draws: Sequence[Draw]) -> list[Sampled]:
    """Choose one token for each row of logits, which stay as they are. No row's result depends on the others.

    Raises EngineError if a row has NaN or no finite logit, or if its mask forbids every token.
    """
    assert len(logits) == len(draws)
    rows = [row.astype(mx.float32) for row in logits]  # which represents every value of the half types exactly
    plain = [index for index, draw in enumerate(draws) if is_plain(draw)]
    others = [index for index, draw in enumerate(draws) if not is_plain(draw)]
    chosen: dict[int, Sampled] = {}
    if plain:
        chosen = dict(zip(plain, read_likeliest(find_likeliest([rows[index] for index in plain])), strict=True))
    mx.eval([rows[index] for index in others])
    chosen.update({index: _sample_row(np.array(rows[index], copy=False), draws[index]) for index in others})
    return [chosen[index] for index in range(len(draws))]


def find_likeliest(rows: Sequence[mx.array]) -> mx.array:
    """The id of each row's largest logit, of equal ones the lowest: not waited for yet, and -1 where there is none."""
    stacked = mx.stack(list(rows))
    is_sound = mx.isfinite(stacked.max(axis=-1))  # NaN is the maximum on every device, but not always the argmax
    return mx.where(is_sound, stacked.argmax(axis=-1).astype(mx.int32), _BROKEN)


def read_likeliest(token_ids: mx.array) -> list[Sampled]:
    """Wait for what `find_likeliest` found and read it."""
    chosen: list[int] = np.array(token_ids).tolist()
    if _BROKEN in chosen:
        raise EngineError(NOT_FINITE)
    return [Sampled(token_id) for token_id in chosen]


@dataclass(frozen=True)
class _Candidates:
    """The tokens still in question, in the order of their ids; `ids` is None as long as these are all."""

    scores: Scores
    ids: Positions | None = None

    def keep(self, positions: Positions) -> _Candidates:
        return _Candidates(self.scores[positions], positions if self.ids is None else self.ids[positions])

    def token_id(self, position: int) -> int:
        return position if self.ids is None else int(self.ids[position])


def _sample_row(row: Scores, draw: Draw) -> Sampled:
    if not np.isfinite(row.max()):
        raise EngineError(NOT_FINITE)
    with np.errstate(over="ignore"):  # what overflows is infinitely unlikely, as it should be
        token_id = _choose(_allow(_penalise(_bias(row, draw.params), draw), draw.allowed), draw)
    return _describe(row, token_id, draw.params.logprobs)


def _bias(row: Scores, params: SamplingParams) -> Scores:
    """The row with what the request adds to the logits of single tokens; the row itself if that is nothing."""
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
    """The row with the scores of tokens that were seen before lowered; the row itself if there is nothing to lower."""
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
    candidates = _limit(candidates, best, params)
    weights = _weigh(candidates.scores, best, params.temperature)
    weights[weights < params.min_p] = 0
    return candidates.token_id(_draw(weights, draw.uniform))


def _limit(candidates: _Candidates, best: float, params: SamplingParams) -> _Candidates:
    """The tokens that top-k and then top-p keep; those too unlikely for min-p may be gone already where that is cheaper."""
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
    """Where the fewest tokens are that have the share `top_p` of the weight, in rising order."""
    weights = _weigh(scores, best, params.temperature)
    total = weights.sum()
    # Sorting takes longest, and tokens lighter than this weigh together less than what top-p leaves out.
    too_light = (1 - params.top_p) * total / len(weights) / 2
    ranked = np.sort(scores[weights > too_light])[::-1]
    mass = _weigh(ranked, best, params.temperature).cumsum()
    count = min(int(np.count_nonzero(mass < params.top_p * total)) + 1, len(ranked))
    return _find_down_to(scores, ranked[count - 1], count)


def _find_largest(scores: Scores, count: int) -> Positions:
    """Where the `count` largest scores are (or all), in rising order; of equal ones the first."""
    near = np.flatnonzero(scores >= _find_bound(scores, count))
    if len(near) <= count:
        return near
    values = scores[near]
    return near[_find_down_to(values, np.partition(values, -count)[-count], count)]


def _find_down_to(scores: Scores, least: np.floating[Any], count: int) -> Positions:
    """Where the `count` largest scores are, the last of which is `least`; of equal ones the first."""
    is_larger = scores > least
    room = count - int(np.count_nonzero(is_larger))
    is_larger[np.flatnonzero(scores == least)[:room]] = True
    return np.flatnonzero(is_larger)


def _find_bound(scores: Scores, count: int) -> float:
    """A score that at least `count` tokens reach and few more: to look for the largest among all takes ten times longer.

    It is the `count`-th of the largest of groups, each of which brings at least one token.
    """
    group_size = min(_GROUP_SIZE, len(scores) // (4 * count))
    if group_size < 2:
        return -math.inf
    whole = scores[: len(scores) // group_size * group_size]
    maxima = whole.reshape(group_size, -1).max(axis=0)
    return float(np.partition(maxima, -count)[-count])


def _draw(weights: Scores, uniform: float) -> int:
    # The first sum above a number is never that of a token without weight, and the last is above: `uniform` is below 1.
    cumulative = weights.cumsum()
    return int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))


def score(rows: mx.array, token_ids: Sequence[int], num_top: int) -> list[Sampled]:
    """How likely a given token is in each row of logits in float32, and the likeliest ones there."""
    mx.eval(rows)
    values = np.array(rows, copy=False)
    return [_describe(row, token_id, num_top) for row, token_id in zip(values, token_ids, strict=True)]


def _describe(row: Scores, token_id: int, num_top: int | None) -> Sampled:
    """The result, with log-probabilities of the raw distribution if they were asked for."""
    if num_top is None:
        return Sampled(token_id)
    best = row.max()
    log_total = float(best) + math.log(np.exp(row - best).sum(dtype=np.float64))
    top = tuple(Alternative(each, float(row[each]) - log_total) for each in _rank(row, num_top))
    return Sampled(token_id, float(row[token_id]) - log_total, top)


def _rank(row: Scores, count: int) -> list[int]:
    """The ids of the `count` largest (or all), in falling order, of equal ones the lowest first."""
    if count == 0:
        return []
    largest = _find_largest(row, count)
    ranked: list[int] = largest[np.argsort(-row[largest], kind="stable")].tolist()
    return ranked
