"""The self-check of a model at load: several architectures are silently wrong when chunked or restored.

The model's own answer in one forward pass without a cache is the reference, with the attention that its family's own code
defines ("eager"): others may leave things out, as transformers 5.17 does with gemma2's soft cap in "sdpa". The same prompt
is then run in one shot, in runs, token by token, restored, rewound and branched: on the real weights, and on a small random
copy in float32 where windows, recurrent states or rounding call for it. Each attention is tried, Bough's own first, until
one allows everything. Where the CPU kernels know the model's structure, the whole step in one call is tried before
transformers' modules, also at positions near the end of the context: a family may scale something by the position. The
step is tried on the model's first layers, as many as have every kind of layer: the reference unpacks each weight, and all
layers of a large model would take it many seconds.
Packed weights are unpacked, and torch computes with them, for the reference.

Tolerances. In float32 the largest logit difference may be 1e-4, or 1e-4 times the spread of the logits where that is more
than one; on the copy always 1e-4 spreads. Beside weights in blocks activations have 16 bits, and the tolerance is 1e-3
spreads, or three times what rounding them in torch moves transformers' own forward pass, up to 1e-2 spreads. The whole
step has this tolerance in one run of the prompt, and must be equal to that run to the bit in every other way. In half
precision rounding alone moves logits: between "sdpa" and "eager" by 0.36 spreads on a random model of 8 billion weights,
and by 0.2 between one run and several with stock attention. So real weights need only stay within twice the former, or
half a spread (a whole one with experts, of which rounding may choose others), which catches another prefix's state and
little else. The float32 copy shows finer mistakes. A copy in half precision shows those of kernels: it may be three times
as far from the float32 copy as one stock forward pass is. Where no copy can be built, chunks and reuse that need a fine
check are not allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import transformers

from bough.cache.tree.state import PAGE_TOKENS
from bough.engines.self_check.check import (
    COPY_TOKENS,
    CheckedModel,
    SelfCheck,
    drop_unproven,
    hash_features,
    needs_copy,
    reference_tokens,
)
from bough.engines.self_check.reference import ComputeLogits, Prompt, Reference, usual_ids
from bough.engines.shared.code import hash_sources
from bough.engines.shared.compute import Verdict
from bough.engines.shared.engine import DEFAULT_CONTEXT
from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch import attention
from bough.engines.torch.compute import TorchLaneCompute
from bough.engines.torch.cpu.packing import packed_weights
from bough.engines.torch.cpu.route import IN_TORCH, WeightsChoice
from bough.engines.torch.cpu.step import WholeStep
from bough.engines.torch.cpu.structure import UnknownStructure
from bough.engines.torch.device import device_of, dtype_of, is_out_of_memory
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.lanes.pages import TorchPages
from bough.engines.torch.layout import TorchLayout
from bough.engines.torch.pooled.memory import why_not_pooled
from bough.engines.torch.pooled.pool import Pool
from bough.engines.torch.pooled.wiring import POOL_ATTENTION, Wiring
from bough.engines.torch.self_check.probe import probe
from bough.engines.torch.self_check.small_copy import first_layers, make_small_copy

_REFERENCE = "eager"
_FORMAT = 15  # raise it when the check itself changes
_CHECK_LANES = 4
_WHOLE_STEP_TOKENS = 24  # equal to the bit is equal at any length; unpacking for the reference costs a large model seconds
_OF_FLOATS = 1e-4  # of the spread of the logits: what rounding in float32 may move
_OF_16_BITS, _MOST_OF_16_BITS = 1e-3, 1e-2  # of the spread, too: what rounding of activations may move
_SPREADS, _SPREADS_WITH_EXPERTS = 0.5, 1.0  # of the logits, that rounding in half precision may move them
_LONGEST_SHORT = 24  # tokens: of the runs of a check some are long ones on a pool, and some are not
_NO_FEATURES = {"_name_or_path", "name_or_path", "transformers_version"}


def verdict_key(model: Any, choice: WeightsChoice = IN_TORCH, *, pools: bool = False, kv: str = "auto") -> str:
    """A hash of all that a verdict depends on; the name in the configuration does not count."""
    kernels = choice.products.kernels if choice.packing is not None else None
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NO_FEATURES}
    features = [
        _FORMAT,
        transformers.__version__,
        torch.__version__,
        device_of(model).type,
        str(dtype_of(model)),
        model.config._attn_implementation,
        type(model).__name__,
        hash_sources([type(model)]),
        config,
        [kernels.isa, kernels.code_hash] if kernels is not None else [],
        sorted({each.matrix.type for each in packed_weights(model)}),
        choice.numerics,
        pools,
        kv,
    ]
    return hash_features(features)


def self_check(
    forward: TorchForward, layout: TorchLayout, choice: WeightsChoice = IN_TORCH, *, pools: bool = False, kv: str = "auto"
) -> Verdict:
    """Try every way of running the model, the best first.

    With `pools` a pool of slots is tried before lanes with buffers of their own. `kv` is the setting.
    """
    with torch.backends.cudnn.flags(allow_tf32=False):  # rounding to ten bits would hide the differences
        check = SelfCheck(is_out_of_memory)
        why_not = _why_no_whole_step(forward.model, layout, choice)
        if choice.packing is not None and not why_not:
            with first_layers(forward.model):
                candidates = _candidates(forward, probe(forward), choice, has_step=True)
                wanted = choice.choose_rows(kv, layout, forward.model)
                whole, why_not = _try_whole_step(check, candidates, choice, wanted)
            if whole is not None:
                return replace(whole, kv=_avoid_clipping(forward, layout, choice, wanted) if kv == "auto" else wanted)
        wanted = "" if kv in ("auto", layout.kv) else kv
        layout = layout.keep_as(wanted)
        candidates = _candidates(forward, layout, choice, has_step=False)
        candidates[0] = _allow_rounding(candidates[0], choice)
        stock = forward.model.config._attn_implementation
        pooled, why_not_pooled = _try_pool(check, candidates, layout) if pools else (None, "")
        _set_attention(forward.model, stock)
        verdict = pooled or _try_modules(check, candidates, layout)
        return replace(verdict, why_no_whole_step=why_not, why_not_pooled=why_not_pooled, kv=wanted)


def _why_no_whole_step(model: Any, layout: TorchLayout, choice: WeightsChoice) -> str:
    """Why the whole step in one call cannot be tried; "" if it can."""
    if choice.packing is None:
        return choice.why_not
    if not layout.groups:
        return layout.unknown
    try:
        choice.make_step(model, layout)
    except UnknownStructure as error:
        return str(error)
    return ""


def _avoid_clipping(forward: TorchForward, layout: TorchLayout, choice: WeightsChoice, kv: str) -> str:
    """This type of rows, or bfloat16 if the whole model makes numbers that float16 cannot hold."""
    if kv != "float16":
        return kv
    kept = layout.keep_as(kv)
    sizes = LaneSizes(_WHOLE_STEP_TOKENS, COPY_TOKENS)
    step = choice.make_step(forward.model, kept)
    compute = TorchLaneCompute(forward, kept, TorchPages(kept, forward.device), sizes, True, step)
    lane = compute.make_lane()
    lane.reserve(_WHOLE_STEP_TOKENS)
    compute.evaluate(lane, usual_ids(forward.model.config.to_dict(), layout.vocab_size)[:_WHOLE_STEP_TOKENS])
    return "bfloat16" if compute.clipped.count else kv


def _try_whole_step(
    check: SelfCheck, candidates: list[CheckedModel], choice: WeightsChoice, kv: str
) -> tuple[Verdict | None, str]:
    """The verdict for the whole step in one call if it allows everything, or else why it is not used.

    In one run of a prompt it must be close to the reference, with rows in float32; with rows of type `kv` every other way
    must be equal to one run to the bit.
    """
    whole, differences = [], {}
    for each in candidates:
        step = choice.make_step(each.forward.model, each.layout)
        whole_logits = _whole_logits(each, step)
        own = check.attempt(lambda each=each, compute=whole_logits: each.reference.computed_by(compute))  # type: ignore[misc]
        if own is None:
            return None, check.why_no_lanes
        difference, far = each.reference.distance(own), each.reference.far_distance(own)
        tolerance = each.tolerance if max(difference, far) <= each.tolerance else _allow_rounding(each, choice).tolerance
        if not difference <= tolerance:
            return None, f"its logits differ from those of the model's own code by {difference:.1e}"
        if not far <= tolerance:
            times = far / tolerance
            return (
                None,
                f"its logits near the end of the context differ from the model's own by {times:.1e} times the tolerance",
            )
        differences[f"one-shot{each.label}"] = difference
        kept = replace(each, layout=each.layout.keep_as(kv))
        if kv:
            kept = replace(kept, compute=_computes(kept.forward, kept.layout, kept.reference))
            step = choice.make_step(kept.forward.model, kept.layout)
            rounded = kept.reference.computed_by(_whole_logits(kept, step))
            differences[f"{kv} rows{each.label}"] = own.distance(rounded)
            own = rounded
        whole.append(replace(kept, compute=_computes(kept.forward, kept.layout, own, step), reference=own, tolerance=0.0))
    verdict = check.check_lanes(attention.NAME, whole, can_batch=True)
    if verdict is None or not (verdict.can_reuse and verdict.can_batch):
        return None, f"its logits depend on how a prompt is split: {verdict.reason if verdict else check.why_no_lanes}"
    return replace(verdict, whole_step=True, differences=verdict.differences | differences), ""


def _whole_logits(candidate: CheckedModel, step: WholeStep) -> ComputeLogits:
    """Computes each prompt in one run on an empty lane."""

    def compute(prompts: Sequence[Prompt]) -> list[Any]:
        lanes: list[Any] = [candidate.compute(False).make_lane() for _ in prompts]
        for lane, prompt in zip(lanes, prompts, strict=True):
            lane.reserve(len(prompt.ids))
        return [step.run_at(lane, each.ids, each.first) for lane, each in zip(lanes, prompts, strict=True)]

    return compute


def _try_pool(check: SelfCheck, candidates: list[CheckedModel], layout: TorchLayout) -> tuple[Verdict | None, str]:
    """The verdict for a pool if that allows everything, or else why it is not used."""
    if why_not := why_not_pooled(layout, is_test=candidates[0].forward.device.type == "cpu"):
        return None, why_not
    if not all(_set_attention(each.forward.model, POOL_ATTENTION) for each in candidates):
        return None, "transformers does not take its attention"
    try:
        wirings = [Wiring(each.forward, each.layout) for each in candidates]
    except Exception as error:  # a model may fail in any way when it is used as its authors did not
        return None, str(error)
    with ExitStack() as pools:
        pooled = [_on_pool(each, wiring, pools) for each, wiring in zip(candidates, wirings, strict=True)]
        verdict = check.check_lanes(POOL_ATTENTION, pooled, can_batch=True)
    if verdict is None or not (verdict.can_reuse and verdict.can_batch):
        return None, (verdict.reason if verdict else check.why_no_lanes) or "steps of several lanes come out differently"
    verdict = drop_unproven(verdict, candidates)
    return (replace(verdict, is_pooled=True), "") if verdict.can_reuse else (None, verdict.reason)


def _on_pool(candidate: CheckedModel, wiring: Wiring, pools: ExitStack) -> CheckedModel:
    """The same candidate on a small pool, which `pools` closes: the few lanes of a check, of one sequence each."""
    layout: TorchLayout = candidate.layout
    slots = _CHECK_LANES * (len(candidate.reference.ids) // PAGE_TOKENS + 4)
    budget_bytes = slots * sum(PAGE_TOKENS * rows.row_bytes for rows in layout.rows.values())
    budget_bytes += 4 * slots * sum(state.nbytes for state in layout.states.values())
    sizes = LaneSizes(len(candidate.reference.ids), COPY_TOKENS)
    pool = Pool(candidate.forward, layout, wiring, sizes, budget_bytes, goes_ahead=False, longest_short=_LONGEST_SHORT)
    pools.callback(pool.close)
    return replace(candidate, compute=lambda can_batch: pool.compute)


def _try_modules(check: SelfCheck, candidates: list[CheckedModel], layout: TorchLayout) -> Verdict:
    stock = candidates[0].forward.model.config._attn_implementation
    best: Verdict | None = None
    for name in dict.fromkeys([attention.NAME, stock, "eager"]) if layout.groups else ():
        verdict = _check_lanes(check, name, candidates, layout)
        if verdict is not None and (best is None or verdict.worth > best.worth):
            best = verdict
        if best is not None and best.can_reuse:
            break
    if best is None:
        _set_attention(candidates[0].forward.model, stock)
        return check.check_plain(stock, candidates[0], layout.unknown)
    return drop_unproven(best, candidates)


def _check_lanes(check: SelfCheck, name: str, candidates: list[CheckedModel], layout: TorchLayout) -> Verdict | None:
    """What our own lanes can do with this attention, or None if they cannot even continue a prompt."""
    if not all(_set_attention(candidate.forward.model, name) for candidate in candidates):
        return None
    return check.check_lanes(name, candidates, can_batch=name == attention.NAME or not layout.rows)


def _candidates(forward: TorchForward, layout: TorchLayout, choice: WeightsChoice, has_step: bool) -> list[CheckedModel]:
    """The real model first, then its copies. Leaves the attention as it was."""
    with choice.products_in_torch():
        return _make_candidates(forward, layout, choice, has_step)


def _make_candidates(
    forward: TorchForward, layout: TorchLayout, choice: WeightsChoice, has_step: bool
) -> list[CheckedModel]:
    model = forward.model
    stock = model.config._attn_implementation
    is_rounded = any(rows.is_rounded for rows in layout.rows.values())
    is_half = choice.rounds_activations or is_rounded or dtype_of(model) in (torch.bfloat16, torch.float16)
    small = make_small_copy(model, layout.kinds) if needs_copy(layout.groups, is_half) else None
    copies = _copy_candidates(small, dtype_of(model), has_step) if small is not None else []
    num_tokens = reference_tokens(layout.groups, is_half, bool(copies))
    if has_step:
        num_tokens = min(num_tokens, _WHOLE_STEP_TOKENS)
    vocab_size = layout.vocab_size or model.config.get_text_config().vocab_size
    _set_attention(model, _REFERENCE)
    reference = _make_reference(forward, num_tokens, vocab_size, has_step)
    _set_attention(model, stock)
    tolerance = (_OF_16_BITS if _has_blocks(model) else _OF_FLOATS) * max(1.0, reference.scale)
    if is_half:
        spreads = _SPREADS_WITH_EXPERTS if _has_experts(model) else _SPREADS
        tolerance = max(2 * reference.noise(_reference_logits(forward)), spreads * reference.scale)
    return [_candidate(forward, layout, reference, tolerance, is_coarse=is_half), *copies]


def _has_blocks(model: Any) -> bool:
    """Whether activations beside some of its weights have 16 bits."""
    return any(each.matrix.is_panels for each in packed_weights(model))


def _allow_rounding(candidate: CheckedModel, choice: WeightsChoice) -> CheckedModel:
    """Raise the tolerance to what rounding activations to 16 bits needs, as torch finds out: some models amplify it."""
    forward, reference = candidate.forward, candidate.reference
    if candidate.is_coarse or not _has_blocks(forward.model):
        return candidate
    stock = forward.model.config._attn_implementation
    _set_attention(forward.model, _REFERENCE)
    with choice.products_in_torch(rounds_activations=True):
        rounding = reference.noise(_reference_logits(forward))
    _set_attention(forward.model, stock)
    most = _MOST_OF_16_BITS * max(1.0, reference.scale)
    return replace(candidate, tolerance=min(max(candidate.tolerance, 3 * rounding), most))


def _has_experts(model: Any) -> bool:
    text = model.config.get_text_config(decoder=True)
    return any((getattr(text, name, None) or 0) > 1 for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def _copy_candidates(small: Any, dtype: torch.dtype, has_step: bool) -> list[CheckedModel]:
    """The small copy, and for half precision a copy of it in that type, compared with the reference of the float32 one."""
    forward = TorchForward(small)
    layout = probe(forward)
    if not layout.groups:
        return []
    _set_attention(small, _REFERENCE)
    reference = _make_reference(forward, COPY_TOKENS, layout.vocab_size, has_step)
    candidates = [_candidate(forward, layout, reference, 1e-4 * reference.scale, " (small copy)")]
    if dtype != torch.float32:
        half = TorchForward(copy.deepcopy(small).to(dtype))
        label = f" (small copy, {str(dtype).removeprefix('torch.')})"
        candidates.append(_candidate(half, probe(half), reference, 3 * reference.noise(_reference_logits(half)), label))
    return candidates


def _candidate(
    forward: TorchForward,
    layout: TorchLayout,
    reference: Reference,
    tolerance: float,
    label: str = "",
    is_coarse: bool = False,
) -> CheckedModel:
    computes = _computes(forward, layout, reference)
    return CheckedModel(forward, layout, computes, reference, tolerance, label, is_coarse)


def _computes(
    forward: TorchForward, layout: TorchLayout, reference: Reference, step: WholeStep | None = None
) -> Callable[[bool], TorchLaneCompute]:
    """Makes ways of running the model on lanes, with batches or without."""
    sizes = LaneSizes(len(reference.ids), COPY_TOKENS)
    return lambda can_batch: TorchLaneCompute(forward, layout, TorchPages(layout, forward.device), sizes, can_batch, step)


def _make_reference(forward: TorchForward, num_tokens: int, vocab_size: int, has_step: bool) -> Reference:
    config = forward.model.config
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or DEFAULT_CONTEXT
    far = max(0, context - num_tokens) if has_step else 0
    return Reference(_reference_logits(forward), num_tokens, usual_ids(config.to_dict(), vocab_size), far)


def _reference_logits(forward: TorchForward) -> ComputeLogits:
    """Computes all prompts in one forward pass: beside packed weights most of its time goes into unpacking them."""

    def compute(prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        ids = torch.tensor([list(each.ids) for each in prompts], device=forward.device)
        return list(forward.all_logits(ids, [each.first for each in prompts]))

    return compute


def _set_attention(model: Any, name: str) -> bool:
    if model.config._attn_implementation != name:
        try:
            model.set_attn_implementation(name)
        except (ValueError, ImportError, KeyError):
            return False
    return bool(model.config._attn_implementation == name)
