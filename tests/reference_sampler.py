"""What sampling means, in plain Python: lists, loops and `math`. The engines are compared with this."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from statistics import pstdev

from bough.types import Alternative, Draw, SampledToken


def sample(logits: Sequence[float], draw: Draw) -> SampledToken:
    """Choose one token: the first, in the order of ids, at which the cumulative distribution exceeds the number drawn."""
    token_id = 0
    cumulative = 0.0
    for candidate, probability in enumerate(probabilities(logits, draw)):
        if probability > 0:
            token_id = candidate
            cumulative += probability
            if cumulative > draw.uniform:
                break
    return SampledToken(token_id) if draw.params.logprobs is None else score(logits, token_id, draw.params.logprobs)


def score(logits: Sequence[float], token_id: int, num_top: int) -> SampledToken:
    """How likely a token is in the raw distribution, and the likeliest tokens."""
    raw = log_softmax(logits)
    return SampledToken(token_id, raw[token_id], tuple(Alternative(each, raw[each]) for each in rank(logits)[:num_top]))


def probabilities(logits: Sequence[float], draw: Draw) -> list[float]:
    """The distribution that the token is drawn from."""
    scores = keep_near_best(mask(penalise(bias(logits, draw), draw), draw.allowed), draw.params.top_n_sigma)
    ranked = rank(scores)
    if draw.params.temperature == 0:
        return [float(token_id == ranked[0]) for token_id in range(len(scores))]
    best = scores[ranked[0]]
    weights = [math.exp((score - best) / draw.params.temperature) for score in scores]
    kept = ranked[: draw.params.top_k or len(ranked)]
    kept = keep_mass(kept, weights, draw.params.top_p)
    final = {token_id for token_id in kept if weights[token_id] >= draw.params.min_p}  # the largest weight is 1
    total = math.fsum(weights[token_id] for token_id in final)
    return [weight / total if token_id in final else 0.0 for token_id, weight in enumerate(weights)]


def bias(logits: Sequence[float], draw: Draw) -> list[float]:
    """Add what the request adds to the logits of single tokens."""
    added = dict(draw.params.logit_bias)
    return [logit + added.get(token_id, 0.0) for token_id, logit in enumerate(logits)]


def penalise(logits: Sequence[float], draw: Draw) -> list[float]:
    """Divide positive and multiply negative scores of tokens seen before; then subtract once, and once per time seen."""
    scores = list(logits)
    for token_id, count in zip(draw.seen.ids, draw.seen.counts, strict=True) if draw.seen else ():
        score = scores[token_id]
        score = score / draw.params.repeat_penalty if score > 0 else score * draw.params.repeat_penalty
        score -= draw.params.presence_penalty
        score -= draw.params.frequency_penalty * count
        scores[token_id] = score
    return scores


def mask(scores: Sequence[float], allowed: bytes | None) -> list[float]:
    if allowed is None:
        return list(scores)
    return [score if allowed[index // 8] >> (index % 8) & 1 else -math.inf for index, score in enumerate(scores)]


def keep_near_best(scores: Sequence[float], top_n_sigma: float) -> list[float]:
    """Leave out the scores that are more than so many standard deviations of the possible ones below the largest."""
    if top_n_sigma == 0:
        return list(scores)
    least = max(scores) - top_n_sigma * pstdev(score for score in scores if score > -math.inf)
    return [score if score >= least else -math.inf for score in scores]


def rank(scores: Sequence[float]) -> list[int]:
    """Token ids from the largest score to the smallest, of equal ones the lowest id first."""
    return sorted(range(len(scores)), key=lambda token_id: (-scores[token_id], token_id))


def keep_mass(ranked: Sequence[int], weights: Sequence[float], top_p: float) -> list[int]:
    """The shortest beginning of `ranked` that has at least the share `top_p` of its weight."""
    if top_p == 1:
        return list(ranked)
    total = math.fsum(weights[token_id] for token_id in ranked)
    kept: list[int] = []
    mass = 0.0
    for token_id in ranked:
        kept.append(token_id)
        mass += weights[token_id]
        if mass >= top_p * total:
            break
    return kept


def log_softmax(logits: Sequence[float]) -> list[float]:
    best = max(logits)
    log_total = math.log(math.fsum(math.exp(logit - best) for logit in logits))
    return [logit - best - log_total for logit in logits]


def is_near_border(logits: Sequence[float], draw: Draw, margin: float = 1e-6) -> bool:
    """Whether rounding could decide: a draw next to a step of the distribution, or a token just at a limit."""
    cumulative = 0.0
    for probability in probabilities(logits, draw):
        cumulative += probability
        if probability > 0 and cumulative < 1 - margin and abs(cumulative - draw.uniform) < margin:
            return True
    return draw.params.temperature > 0 and _is_limit_near(
        mask(penalise(bias(logits, draw), draw), draw.allowed), draw, margin
    )


def _is_limit_near(scores: Sequence[float], draw: Draw, margin: float) -> bool:
    params = draw.params
    best = max(scores)
    least = best - params.top_n_sigma * pstdev(score for score in scores if score > -math.inf)
    if params.top_n_sigma > 0 and any(abs(score - least) < margin for score in scores):
        return True
    scores = keep_near_best(scores, params.top_n_sigma)
    ranked = rank(scores)[: params.top_k or len(scores)]
    weights = [math.exp((scores[token_id] - best) / params.temperature) for token_id in ranked]
    total = math.fsum(weights)
    shares = [mass / total for mass in accumulate(weights)]
    near_mass = params.top_p < 1 and any(abs(share - params.top_p) < margin for share in shares)
    return near_mass or any(abs(weight - params.min_p) < margin for weight in weights if params.min_p > 0)
