"""The self-check of a model at load: several architectures are silently wrong when chunked or restored.

The model's own answer in one forward pass without a cache is the reference, with the attention that its family's own code
defines ("eager"): others may leave things out, as transformers 5.17 does with gemma2's soft cap in "sdpa". The same prompt
is then run in one shot, in runs, token by token, restored, rewound and branched: on the real weights, and on a small random
copy in float32 where windows, recurrent states or rounding call for it. Each attention is tried, Bough's own first, until
one allows everything. Where the CPU kernels know the model's structure, the whole step in one call is tried before
transformers' modules, also at positions near the end of the context: a family may scale something by the position.
Packed weights are unpacked, and torch computes with them, for the reference.

Tolerances. In float32 the largest logit difference may be 1e-4, or 1e-4 times the spread of the logits where that is more
than one; on the copy always 1e-4 spreads. In half precision rounding alone moves logits: between "sdpa" and "eager" by 0.36
spreads on a random model of 8 billion weights, and by 0.2 between one run and several with stock attention. So real weights
need only stay within twice the former, or half a spread (a whole one with experts, of which rounding may choose others),
which catches another prefix's state and little else. The float32 copy shows finer mistakes. A copy in half precision shows
those of kernels: it may be three times as far from the float32 copy as one stock forward pass is. Where no copy can be
built, chunks and reuse that need a fine check are not allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import transformers

from bough.cache.tree.state import PAGE_TOKENS
from bough.engines.self_check.check import (
    COPY_TOKENS,
    Candidate,
    SelfCheck,
    drop_unproven,
    needs_copy,
    reference_tokens,
)
from bough.engines.self_check.reference import ComputeLogits, Reference, usual_ids
from bough.engines.self_check.verdicts import hash_features
from bough.engines.shared.code import hash_sources
from bough.engines.shared.compute import Verdict
from bough.engines.shared.context import DEFAULT_CONTEXT
from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch import attention
from bough.engines.torch.compute import LaneCompute, LibraryCompute, RecomputeCompute
from bough.engines.torch.cpu.packing import packed_weights
from bough.engines.torch.cpu.route import IN_TORCH, WeightsChoice
from bough.engines.torch.cpu.step import WholeStep
from bough.engines.torch.cpu.structure import UnknownStructure
from bough.engines.torch.device import device_of, dtype_of, is_out_of_memory
from bough.engines.torch.forward import Forward
from bough.engines.torch.lanes.pages import Pages
from bough.engines.torch.layout import Layout
from bough.engines.torch.pooled.attention import operator
from bough.engines.torch.pooled.compute import PooledCompute
from bough.engines.torch.pooled.lanes.memory import why_not_pooled
from bough.engines.torch.pooled.passes.wiring import Wiring
from bough.engines.torch.pooled.pool import Pool
from bough.engines.torch.self_check.probe import probe
from bough.engines.torch.self_check.small_copy import make_small_copy
from bough.errors import UnsupportedModel

_REFERENCE = "eager"
_FORMAT = 9  # raise it when the check itself changes
_FAR_TOKENS = 12
_CHECK_LANES = 4
_SPREADS, _SPREADS_WITH_EXPERTS = 0.5, 1.0  # of the logits, that rounding in half precision may move them
_LONGEST_SHORT = 24  # tokens: of the runs of a check some are long ones on a pool, and some are not
_NO_FEATURES = {"_name_or_path", "name_or_path", "transformers_version"}


def verdict_key(model: Any, wanted_attention: str, choice: WeightsChoice = IN_TORCH, *, pools: bool = False) -> str:
    """A hash of all that a verdict depends on; the name in the configuration does not count."""
    kernels = choice.route.products.kernels if choice.route is not None else None
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NO_FEATURES}
    features = [
        _FORMAT,
        transformers.__version__,
        torch.__version__,
        device_of(model).type,
        str(dtype_of(model)),
        wanted_attention,
        model.config._attn_implementation,
        type(model).__name__,
        hash_sources([type(model)]),
        config,
        [kernels.isa, kernels.code_hash] if kernels is not None else [],
        sorted({each.matrix.type for each in packed_weights(model)}),
        choice.quantization,
        pools,
    ]
    return hash_features(features)


def self_check(
    forward: Forward, layout: Layout, wanted: str, choice: WeightsChoice = IN_TORCH, *, pools: bool = False
) -> Verdict:
    """Try every way of running the model, the best first. `wanted` is an attention's name or "auto".

    With `pools` a pool of slots is tried before lanes with buffers of their own.
    """
    with torch.backends.cudnn.flags(allow_tf32=False):  # rounding to ten bits would hide the differences
        candidates, check = _candidates(forward, layout, choice), SelfCheck(is_out_of_memory)
        whole, why_not = _try_whole_step(check, candidates, layout, wanted, choice)
        if whole is not None:
            return whole
        stock = forward.model.config._attn_implementation
        pooled, why_not_pooled = _try_pool(check, candidates, layout, wanted) if pools else (None, "")
        _set_attention(forward.model, stock)
        verdict = pooled or _try_modules(check, candidates, layout, wanted)
        return replace(verdict, why_no_whole_step=why_not, why_not_pooled=why_not_pooled)


def _try_whole_step(
    check: SelfCheck, candidates: list[Candidate], layout: Layout, wanted: str, choice: WeightsChoice
) -> tuple[Verdict | None, str]:
    """The verdict for the whole step in one call if it allows everything, or else why it is not used."""
    route = choice.route
    if route is None:
        return None, choice.why_not
    if not layout.groups:
        return None, layout.unknown
    if wanted not in ("auto", attention.NAME):
        return None, f"the setting attention is {wanted}"
    try:
        steps = [route.make_step(each.forward.model, _layout_of(each)) for each in candidates]
    except UnknownStructure as error:
        return None, str(error)
    whole = [_with_step(each, step) for each, step in zip(candidates, steps, strict=True)]
    verdict = check.check_lanes(attention.NAME, whole, can_batch=True)
    if verdict is None or not (verdict.can_reuse and verdict.can_batch):
        return None, (verdict.reason if verdict else "") or "its logits differ from those of the model's own code"
    far = max(_measure_far(check, each, step) / each.tolerance for each, step in zip(candidates, steps, strict=True))
    if not far <= 1:
        return None, f"its logits near the end of the context differ from the model's own by {far:.1e} times the tolerance"
    return replace(verdict, whole_step=True), ""


def _with_step(candidate: Candidate, step: WholeStep) -> Candidate:
    return replace(candidate, compute=_computes(candidate.forward, _layout_of(candidate), candidate.reference, step))


def _layout_of(candidate: Candidate) -> Layout:
    layout: Any = candidate.compute(False).layout
    return layout  # type: ignore[no-any-return]


def _measure_far(check: SelfCheck, candidate: Candidate, step: WholeStep) -> float:
    return check.measure(lambda *_: _far_difference(candidate, step), candidate.compute(False), candidate.reference)


def _far_difference(candidate: Candidate, step: WholeStep) -> float:
    """The largest difference of logits on an empty lane at the last positions of the context."""
    forward, compute = candidate.forward, candidate.compute(False)
    ids = candidate.reference.ids[:_FAR_TOKENS]
    text = forward.model.config.get_text_config(decoder=True)
    first = max(0, (getattr(text, "max_position_embeddings", None) or DEFAULT_CONTEXT) - len(ids))
    lane: Any = compute.make_lane()
    lane.reserve(len(ids))
    positions = torch.arange(first, first + len(ids))[None]
    stock = forward.model.config._attn_implementation
    _set_attention(forward.model, _REFERENCE)
    with torch.inference_mode():
        wanted = forward.call(forward.tensor_of(ids), positions, None, use_cache=False).logits[0]
    _set_attention(forward.model, stock)
    return float((step.evaluate_at(lane, ids, first) - wanted).abs().max())


def _try_pool(check: SelfCheck, candidates: list[Candidate], layout: Layout, wanted: str) -> tuple[Verdict | None, str]:
    """The verdict for a pool if that allows everything, or else why it is not used."""
    if wanted not in ("auto", operator.NAME):
        return None, f"the setting attention is {wanted}"
    if why_not := why_not_pooled(layout, is_test=candidates[0].forward.device.type == "cpu"):
        return None, why_not
    if not all(_set_attention(each.forward.model, operator.NAME) for each in candidates):
        return None, "transformers does not take its attention"
    try:
        wirings = [Wiring(each.forward, _layout_of(each)) for each in candidates]
    except Exception as error:  # a model may fail in any way when it is used as its authors did not
        return None, str(error)
    pools: list[Pool] = []
    try:
        pooled = [_on_pool(each, wiring, pools) for each, wiring in zip(candidates, wirings, strict=True)]
        verdict = check.check_lanes(operator.NAME, pooled, can_batch=True)
    finally:
        for pool in pools:
            pool.close()
    if verdict is None or not (verdict.can_reuse and verdict.can_batch):
        return None, (verdict.reason if verdict else check.why_no_lanes) or "steps of several lanes come out differently"
    verdict = drop_unproven(verdict, candidates)
    return (replace(verdict, is_pooled=True), "") if verdict.can_reuse else (None, verdict.reason)


def _on_pool(candidate: Candidate, wiring: Wiring, pools: list[Pool]) -> Candidate:
    """The same candidate on a small pool, which is added to `pools`: the few lanes of a check, of one sequence each."""
    layout, sizes = _layout_of(candidate), LaneSizes(len(candidate.reference.ids), COPY_TOKENS)
    slots = _CHECK_LANES * (len(candidate.reference.ids) // PAGE_TOKENS + 4)
    budget_bytes = slots * sum(PAGE_TOKENS * rows.row_bytes for rows in layout.rows.values())
    budget_bytes += 4 * slots * sum(state.nbytes for state in layout.states.values())
    made: list[Pool] = []

    def compute(can_batch: bool) -> PooledCompute:
        if not made:
            pool = Pool(
                candidate.forward, layout, wiring, sizes, budget_bytes, goes_ahead=False, longest_short=_LONGEST_SHORT
            )
            made.append(pool)
            pools.append(pool)
        return made[0].compute

    return replace(candidate, compute=compute)


def _try_modules(check: SelfCheck, candidates: list[Candidate], layout: Layout, wanted: str) -> Verdict:
    stock = candidates[0].forward.model.config._attn_implementation
    names = list(dict.fromkeys([attention.NAME, stock, "eager"])) if wanted == "auto" else [wanted]
    best: Verdict | None = None
    for name in names if layout.groups else ():
        verdict = _check_lanes(check, name, candidates, layout)
        if verdict is not None and (best is None or verdict.worth > best.worth):
            best = verdict
        if best is not None and best.can_reuse:
            break
    if best is None:
        return _check_plain(check, stock if wanted == "auto" else wanted, candidates, layout)
    return drop_unproven(best, candidates)


def _check_lanes(check: SelfCheck, name: str, candidates: list[Candidate], layout: Layout) -> Verdict | None:
    """What our own lanes can do with this attention, or None if they cannot even continue a prompt."""
    if not all(_set_attention(candidate.forward.model, name) for candidate in candidates):
        return None
    return check.check_lanes(name, candidates, can_batch=name == attention.NAME or not layout.rows)


def _check_plain(check: SelfCheck, name: str, candidates: list[Candidate], layout: Layout) -> Verdict:
    """Without groups: with the model's own cache if that is right, else with none."""
    models = [candidate.forward.model for candidate in candidates]
    if not all(_set_attention(model, name) for model in models):
        raise UnsupportedModel(f"{type(models[0]).__name__} does not run with the attention {name!r}")
    real = candidates[0]
    library, recompute = LibraryCompute(real.forward), RecomputeCompute(real.forward)
    return check.check_plain(name, real, library, recompute, layout.unknown)


def _candidates(forward: Forward, layout: Layout, choice: WeightsChoice) -> list[Candidate]:
    """The real model first, then its copies. Leaves the attention as it was."""
    with choice.route.products_in_torch() if choice.route is not None else nullcontext():
        return _make_candidates(forward, layout, choice.quantization == "int4")


def _make_candidates(forward: Forward, layout: Layout, rounds_activations: bool) -> list[Candidate]:
    model = forward.model
    stock = model.config._attn_implementation
    is_half = rounds_activations or dtype_of(model) in (torch.bfloat16, torch.float16)
    small = make_small_copy(model, layout.kinds) if needs_copy(layout.groups, is_half) else None
    copies = _copy_candidates(small, dtype_of(model)) if small is not None else []
    num_tokens = reference_tokens(layout.groups, is_half, bool(copies))
    _set_attention(model, _REFERENCE)
    reference = _make_reference(forward, num_tokens, layout.vocab_size or model.config.get_text_config().vocab_size)
    _set_attention(model, stock)
    tolerance = 1e-4 * max(1.0, reference.scale)
    if is_half:
        spreads = _SPREADS_WITH_EXPERTS if _has_experts(model) else _SPREADS
        tolerance = max(2 * reference.noise(_reference_logits(forward)), spreads * reference.scale)
    return [_candidate(forward, layout, reference, tolerance, is_coarse=is_half), *copies]


def _has_experts(model: Any) -> bool:
    text = model.config.get_text_config(decoder=True)
    return any((getattr(text, name, None) or 0) > 1 for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _copy_candidates(small: Any, dtype: torch.dtype) -> list[Candidate]:
    """The small copy, and for half precision a copy of it in that type, compared with the reference of the float32 one."""
    forward = Forward(small)
    layout = probe(forward)
    if not layout.groups:
        return []
    _set_attention(small, _REFERENCE)
    reference = _make_reference(forward, COPY_TOKENS, layout.vocab_size)
    candidates = [_candidate(forward, layout, reference, 1e-4 * reference.scale, " (small copy)")]
    if dtype != torch.float32:
        half = Forward(copy.deepcopy(small).to(dtype))
        label = f" (small copy, {str(dtype).removeprefix('torch.')})"
        candidates.append(_candidate(half, probe(half), reference, 3 * reference.noise(_reference_logits(half)), label))
    return candidates


def _candidate(
    forward: Forward, layout: Layout, reference: Reference, tolerance: float, label: str = "", is_coarse: bool = False
) -> Candidate:
    computes = _computes(forward, layout, reference)
    return Candidate(forward, layout.groups, computes, reference, tolerance, label, is_coarse)


def _computes(
    forward: Forward, layout: Layout, reference: Reference, step: WholeStep | None = None
) -> Callable[[bool], LaneCompute]:
    """Makes ways of running the model on lanes, with batches or without."""
    sizes = LaneSizes(len(reference.ids), COPY_TOKENS)
    return lambda can_batch: LaneCompute(forward, layout, Pages(layout, forward.device), sizes, can_batch, step)


def _make_reference(forward: Forward, num_tokens: int, vocab_size: int) -> Reference:
    return Reference(_reference_logits(forward), num_tokens, usual_ids(forward.model.config.to_dict(), vocab_size))


def _reference_logits(forward: Forward) -> ComputeLogits:
    return lambda ids: forward.all_logits(forward.tensor_of(ids))


def _set_attention(model: Any, name: str) -> bool:
    if model.config._attn_implementation != name:
        try:
            model.set_attn_implementation(name)
        except (ValueError, ImportError, KeyError):
            return False
    return bool(model.config._attn_implementation == name)
