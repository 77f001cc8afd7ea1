"""What a model can do right, found out at load: several architectures are silently wrong when chunked or restored.

The model's own answer in one forward pass without a cache is the reference, with the attention that its family's own code
defines ("eager"): others may leave things out, as transformers 5.17 does with gemma2's soft cap in "sdpa". The same prompt
is then run in one shot, in runs, token by token, restored, rewound and branched: on the real weights, and on a small random
copy in float32 where windows, recurrent states or rounding call for it. Each attention is tried, Bough's own first, until
one allows everything.

Tolerances. In float32 the largest logit difference may be 1e-4, or 1e-4 times the spread of the logits where that is more
than one; on the copy always 1e-4 spreads. In half precision rounding alone moves logits: between "sdpa" and "eager" by 0.36
spreads on a random model of 8 billion weights, and by 0.2 between one run and several with stock attention. So real weights
need only stay within twice the former, or half a spread, which catches another prefix's state and little else. The float32
copy judges what is finer, and a copy in half precision the kernels: it may be three times as far from the float32 copy as
one stock forward pass is. Where no copy can be built, what only a fine check would find is not allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bough.cache.state import Kind
from bough.errors import ModelError, UnsupportedModel
from bough.torch_engine import attention, trial
from bough.torch_engine.compute import Compute, LaneCompute, LibraryCompute, RecomputeCompute
from bough.torch_engine.failures import is_out_of_memory
from bough.torch_engine.forward import Forward
from bough.torch_engine.layout import Layout
from bough.torch_engine.pages import Pages
from bough.torch_engine.probe import probe
from bough.torch_engine.small_copy import make_small_copy
from bough.torch_engine.trial import Trial

_REFERENCE = "eager"
WAYS = ("lanes", "library", "recompute")
REAL_TOKENS = 40
COPY_TOKENS = 150
_SLIGHTLY_OFF = 100  # times the tolerance: a step that is off by its own clamping, not by another's state

_STEP_CHECKS: dict[str, Callable[[Compute, Trial], float]] = {"one-shot": trial.one_shot, "stepped": trial.stepped}
_REUSE_CHECKS: dict[str, Callable[[LaneCompute, Trial], float]] = {
    "restored": trial.restored,
    "rewound": trial.rewound,
    "branched": trial.branched,
}


@dataclass(frozen=True)
class Verdict:
    """How to run a model, and what it can do so.

    `way` is "lanes" (state in lanes of our own), "library" (in the model's own cache) or "recompute" (nowhere).
    """

    attention: str
    way: str = "lanes"
    can_chunk: bool = True
    can_reuse: bool = True
    can_batch: bool = False
    reason: str = ""
    differences: dict[str, float] = field(default_factory=dict)

    @property
    def worth(self) -> tuple[bool, bool, bool]:
        return self.can_reuse, self.can_chunk, self.way == "lanes"


@dataclass(frozen=True)
class _Subject:
    """One model to try: the real one or its small copy."""

    forward: Forward
    layout: Layout
    trial: Trial
    tolerance: float
    label: str = ""
    is_coarse: bool = False  # rounding hides small mistakes

    def compute(self, can_batch: bool = False) -> LaneCompute:
        pages = Pages(self.layout, self.forward.device)
        return LaneCompute(self.forward, self.layout, pages, len(self.trial.ids), COPY_TOKENS, can_batch)


def self_check(forward: Forward, layout: Layout, wanted: str) -> Verdict:
    """Try every way that there is, the best first. `wanted` is an attention's name or "auto"."""
    with torch.backends.cudnn.flags(allow_tf32=False):  # convolutions of ten bits would drown what is looked for
        return _try_all(forward, layout, wanted)


def _try_all(forward: Forward, layout: Layout, wanted: str) -> Verdict:
    stock = forward.model.config._attn_implementation
    subjects = _subjects(forward, layout)
    names = list(dict.fromkeys([attention.NAME, stock, "eager"])) if wanted == "auto" else [wanted]
    best: Verdict | None = None
    for name in names if layout.groups else ():
        verdict = _judge_lanes(name, subjects)
        if verdict is not None and (best is None or verdict.worth > best.worth):
            best = verdict
        if best is not None and best.can_reuse:
            break
    if best is None:
        return _judge_plain(stock if wanted == "auto" else wanted, subjects, layout)
    return _without_doubt(best, subjects)


def _without_doubt(verdict: Verdict, subjects: list[_Subject]) -> Verdict:
    """The same verdict, less what was only checked coarsely: runs and reuse of windows and states, if there is no copy."""
    has_more = any(group.kind is not Kind.FULL for group in subjects[0].layout.groups)
    if not (subjects[0].is_coarse and len(subjects) == 1 and has_more and verdict.can_chunk):
        return verdict
    reason = (
        "half precision hides small mistakes in its windows or states, and no small copy of it could be built to find them"
    )
    return replace(verdict, can_chunk=False, can_reuse=False, reason=reason)


def _judge_lanes(name: str, subjects: list[_Subject]) -> Verdict | None:
    """What lanes of our own can do with this attention, or None if they cannot even continue a prompt."""
    if not all(_set_attention(subject.forward.model, name) for subject in subjects):
        return None
    verdict = Verdict(name)
    for subject in subjects:
        verdict = _judge_subject(verdict, subject)
        if verdict.way != "lanes":
            return None
    can_batch = name == attention.NAME or not subjects[0].layout.rows
    return replace(verdict, can_batch=can_batch and _can_batch(subjects))


def _judge_subject(verdict: Verdict, subject: _Subject) -> Verdict:
    compute = subject.compute()
    found = {check: _measure(run, compute, subject.trial) for check, run in _STEP_CHECKS.items()}
    found["chunked"] = _measure(trial.chunked, compute, subject.trial)
    if found["one-shot"] > subject.tolerance or found["stepped"] > _SLIGHTLY_OFF * subject.tolerance:
        return replace(verdict, way="")
    can_chunk = verdict.can_chunk and found["chunked"] <= subject.tolerance
    can_reuse = verdict.can_reuse and can_chunk and found["stepped"] <= subject.tolerance
    if can_reuse:
        found |= {check: _measure(run, compute, subject.trial) for check, run in _REUSE_CHECKS.items()}
        can_reuse = all(difference <= subject.tolerance for difference in found.values())
    reason = _reason(found, subject) or verdict.reason
    labelled = {f"{check}{subject.label}": difference for check, difference in found.items()}
    return replace(
        verdict, can_chunk=can_chunk, can_reuse=can_reuse, reason=reason, differences=verdict.differences | labelled
    )


def _judge_plain(name: str, subjects: list[_Subject], layout: Layout) -> Verdict:
    """Without groups: with the model's own cache if that is right, else with none."""
    models = [subject.forward.model for subject in subjects]
    if not all(_set_attention(model, name) for model in models):
        raise UnsupportedModel(f"{type(models[0]).__name__} does not run with the attention {name!r}")
    why = layout.unknown or "its state cannot be kept in lanes: steps after a prompt come out differently"
    real = subjects[0]
    library = LibraryCompute(real.forward)
    found = {check: _measure(run, library, real.trial) for check, run in _STEP_CHECKS.items()}
    found["chunked"] = _measure(trial.chunked, library, real.trial)
    if max(found["one-shot"], found["stepped"]) <= real.tolerance:
        can_chunk = found["chunked"] <= real.tolerance and not real.is_coarse
        return Verdict(name, "library", can_chunk, False, False, f"{why}; it runs with its own cache, without reuse", found)
    found = {"one-shot": _measure(trial.one_shot, RecomputeCompute(real.forward), real.trial)}
    if found["one-shot"] > real.tolerance:
        raise UnsupportedModel(
            f"{type(models[0]).__name__} gives different answers to one prompt ({found['one-shot']:.1e})"
        )
    return Verdict(
        name, "recompute", True, False, False, f"{why}; every token is computed from the start: slow, but right", found
    )


def _subjects(forward: Forward, layout: Layout) -> list[_Subject]:
    """The real model first, then its copies. Leaves the attention as it was."""
    model = forward.model
    stock = model.config._attn_implementation
    is_half = next(model.parameters()).dtype in (torch.bfloat16, torch.float16)
    needs_copy = bool(layout.groups) and (is_half or any(group.kind is not Kind.FULL for group in layout.groups))
    small = make_small_copy(model, layout.kinds) if needs_copy else None
    copies = _copy_subjects(small, next(model.parameters()).dtype) if small is not None else []
    num_tokens = _longer(layout) if needs_copy and not copies else REAL_TOKENS
    _set_attention(model, _REFERENCE)
    real_trial = Trial(forward, num_tokens, layout.vocab_size or model.config.get_text_config().vocab_size)
    _set_attention(model, stock)
    tolerance = 1e-4 * max(1.0, real_trial.scale)
    if is_half:
        tolerance = max(2 * real_trial.noise(forward), 0.5 * real_trial.scale)
    return [_Subject(forward, layout, real_trial, tolerance, is_coarse=is_half), *copies]


def _copy_subjects(small: Any, dtype: torch.dtype) -> list[_Subject]:
    """The small copy, and for half precision a copy of it in that type, judged by the float32 one's reference."""
    forward = Forward(small)
    layout = probe(forward)
    if not layout.groups:
        return []
    _set_attention(small, _REFERENCE)
    found = Trial(forward, COPY_TOKENS, layout.vocab_size)
    subjects = [_Subject(forward, layout, found, 1e-4 * found.scale, " (small copy)")]
    if dtype != torch.float32:
        half = Forward(copy.deepcopy(small).to(dtype))
        label = f" (small copy, {str(dtype).removeprefix('torch.')})"
        subjects.append(_Subject(half, probe(half), found, 3 * found.noise(half), label))
    return subjects


def _longer(layout: Layout) -> int:
    """A prompt that passes every window, where that is affordable."""
    return min(max([COPY_TOKENS, *(group.window + REAL_TOKENS for group in layout.groups)]), 1200)


def _can_batch(subjects: list[_Subject]) -> bool:
    return all(_measure(trial.batched, each.compute(can_batch=True), each.trial) <= each.tolerance for each in subjects)


def _measure(run: Callable[[Any, Trial], float], compute: Compute, found: Trial) -> float:
    """The largest difference, or infinity where the model cannot do it at all."""
    try:
        return run(compute, found)
    except Exception as error:  # a model may fail in any way when it is used as its authors did not
        if is_out_of_memory(error):
            raise ModelError(f"the memory does not suffice to check what this model can do: {error}") from error
        return float("inf")


def _set_attention(model: Any, name: str) -> bool:
    if model.config._attn_implementation != name:
        try:
            model.set_attn_implementation(name)
        except (ValueError, ImportError, KeyError):
            return False
    return bool(model.config._attn_implementation == name)


def _reason(found: dict[str, float], subject: _Subject) -> str:
    worst = max(found, key=lambda check: found[check])
    if found[worst] <= subject.tolerance:
        return ""
    by = f"differ from those of one forward pass by {found[worst]:.1e}" if found[worst] < float("inf") else "cannot be had"
    return f"its logits, {worst}{subject.label}, {by}"
