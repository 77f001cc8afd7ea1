"""The self-check of a model at load: several architectures are silently wrong when chunked or restored.

The model's own answer in one forward pass without a cache is the reference. mlx-lm itself always runs its models with a
cache, and some fail or answer otherwise without one: those are compared with one forward pass with a fresh cache of the
library's. The same prompt is then run in one shot, in runs, token by token, in batches, restored, rewound and branched: on
the real weights, and on a small random copy in float32 where windows, recurrent states or rounding call for it.

Tolerances. In float32 the largest logit difference may be 1e-4, or 1e-4 times the spread of the logits where that is more
than one; on the copy always 1e-4 spreads. A GPU may multiply in fewer bits than float32 has: the difference may be three
times that between the GPU's answer and the CPU's, up to 1e-2 spreads. In half precision and with quantized weights rounding
alone moves logits: real weights need only stay within half a spread, or twice what the library's own cache differs by when
a prompt comes in several runs, up to one spread. That catches another prefix's state and little else. The float32 copy
shows finer mistakes. A copy in half precision shows those of kernels: it may be three times as far from the float32 copy
as one stock forward pass is. Where no copy can be built, chunks and reuse that need a fine check are not allowed.

Nothing that is made here outlives the check but the verdict.
"""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from bough.engines.mlx.compute import LaneCompute, LibraryCompute, RecomputeCompute
from bough.engines.mlx.device import is_out_of_memory
from bough.engines.mlx.forward import Forward
from bough.engines.mlx.lanes.layers import install_attention
from bough.engines.mlx.lanes.pages import Pages
from bough.engines.mlx.layout import Layout
from bough.engines.mlx.library import VERSION
from bough.engines.mlx.loading.model import main_type, weights_of
from bough.engines.mlx.self_check.probe import probe
from bough.engines.mlx.self_check.small_copy import make_random, make_small_copy
from bough.engines.self_check import checks
from bough.engines.self_check.check import (
    COPY_TOKENS,
    Candidate,
    SelfCheck,
    drop_unproven,
    needs_copy,
    reference_tokens,
)
from bough.engines.self_check.reference import Reference, usual_ids
from bough.engines.self_check.verdicts import hash_features
from bough.engines.shared.code import hash_sources
from bough.engines.shared.compute import Verdict
from bough.engines.shared.row_memory import LaneSizes
from bough.errors import ModelError, UnsupportedModel

ATTENTION = "mlx"
_FINE = 1e-4
_COARSE = 0.5
_OTHERWISE = 1e-2  # in spreads; two forward passes that differ by more are different answers
_FORMAT = 2  # raise it when the check itself changes
_NO_FEATURES = {"_name_or_path", "name_or_path", "transformers_version"}


def verdict_key(forward: Forward) -> str:
    """A hash of all that a verdict depends on; the name in the configuration does not count."""
    features = [
        _FORMAT,
        "mlx",
        importlib.metadata.version("mlx"),
        VERSION,
        str(mx.default_device()),
        mx.device_info().get("architecture", ""),
        sorted({str(array.dtype) for array in weights_of(forward.model).values()}),
        type(forward.model).__qualname__,
        hash_sources([type(forward.model)]),
        _features_of(forward.config),
    ]
    return hash_features(features)


def self_check(forward: Forward, layout: Layout) -> Verdict:
    """Try every way of running the model, the best first. The memory that this took is released.

    Raises UnsupportedModel if no way is right, and ModelError if there is too little memory for the check.
    """
    try:
        return _try_all(forward, layout)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(f"too little memory is free to check what this model can do: {error}") from error
    finally:
        gc.collect()  # lanes and copies refer to themselves: without this their arrays would stay for a while
        mx.clear_cache()


def _try_all(forward: Forward, layout: Layout) -> Verdict:
    check = SelfCheck(is_out_of_memory)
    candidates = _candidates(forward, layout)
    has_hook = install_attention(forward.model)
    verdict = check.check_lanes(ATTENTION, candidates, can_batch=has_hook or not layout.rows) if layout.groups else None
    if verdict is None:
        library, recompute = LibraryCompute(forward), RecomputeCompute(forward)
        return check.check_plain(ATTENTION, candidates[0], library, recompute, layout.unknown)
    return drop_unproven(verdict, candidates)


def _candidates(forward: Forward, layout: Layout) -> list[Candidate]:
    """The real model first, then its copies."""
    dtype = main_type(forward.model)
    is_coarse = dtype != mx.float32 or bool(forward.config.get("quantization"))
    small = make_small_copy(forward, layout) if needs_copy(layout.groups, is_coarse) else None
    copies = _copy_candidates(small, dtype) if small is not None else []
    num_tokens = reference_tokens(layout.groups, is_coarse, bool(copies))
    reference = _make_reference(forward, num_tokens, layout.vocab_size or forward.text["vocab_size"])
    tolerance = (
        _coarse_tolerance(forward, reference)
        if is_coarse
        else _fine_tolerance(forward, reference, max(1.0, reference.scale))
    )
    return [_candidate(forward, layout, reference, tolerance, is_coarse=is_coarse), *copies]


def _copy_candidates(small: Forward, dtype: mx.Dtype) -> list[Candidate]:
    """The small copy, and for half precision a copy of it in that type, compared with the reference of the float32 one."""
    layout = probe(small)
    reference = _make_reference(small, COPY_TOKENS, layout.vocab_size)
    candidates = [_candidate(small, layout, reference, _fine_tolerance(small, reference, reference.scale), " (small copy)")]
    return candidates if dtype == mx.float32 else [*candidates, *_half_candidates(small, reference, dtype)]


def _half_candidates(small: Forward, reference: Reference, dtype: mx.Dtype) -> list[Candidate]:
    """The small copy in half precision, unless the device cannot run it: on a CPU only quantized experts run so."""
    half = make_random(small.config, dtype)
    label = f" (small copy, {str(dtype).removeprefix('mlx.core.')})"
    try:
        tolerance = 3 * reference.noise(lambda ids: _reference_logits(half, ids))
    except UnsupportedModel:
        return []
    return [_candidate(half, probe(half), reference, tolerance, label)]


def _candidate(
    forward: Forward, layout: Layout, reference: Reference, tolerance: float, label: str = "", is_coarse: bool = False
) -> Candidate:
    sizes = LaneSizes(len(reference.ids), COPY_TOKENS)

    def compute(can_batch: bool) -> LaneCompute:
        return LaneCompute(forward, layout, Pages(layout), sizes, can_batch)

    return Candidate(forward, layout.groups, compute, reference, tolerance, label, is_coarse)


def _make_reference(forward: Forward, num_tokens: int, vocab_size: int) -> Reference:
    return Reference(lambda ids: _reference_logits(forward, ids), num_tokens, usual_ids(forward.config, vocab_size))


def _reference_logits(forward: Forward, ids: Sequence[int]) -> mx.array:
    """The logits without a cache, or where that fails or gives other logits, with a fresh cache of the library."""
    plain, cached = _logits(forward, ids, has_cache=False), _logits(forward, ids, has_cache=True)
    if isinstance(cached, Exception):
        if isinstance(plain, Exception):
            name = type(forward.model).__module__
            raise UnsupportedModel(f"{name} fails on {len(ids)} tokens: {type(plain).__name__}: {plain}") from plain
        return plain
    is_same = isinstance(plain, mx.array) and float(abs(plain - cached).max()) <= _OTHERWISE * float(cached.std())
    return plain if isinstance(plain, mx.array) and is_same else cached


def _logits(forward: Forward, ids: Sequence[int], has_cache: bool) -> mx.array | Exception:
    """The logits after each of `ids` in one forward pass, or what the model raised."""
    try:
        return forward.all_logits(ids, forward.make_cache() if has_cache else None)
    except Exception as error:  # a model that needs a cache, or cannot have one, may raise anything
        if is_out_of_memory(error):
            raise
        return error


def _fine_tolerance(forward: Forward, reference: Reference, scale: float) -> float:
    return min(max(_FINE * scale, 3 * _device_noise(forward, reference)), _OTHERWISE * scale)


def _device_noise(forward: Forward, reference: Reference) -> float:
    """How far the CPU's answer is from that of the device; nothing where the CPU has none, or is the device."""
    if mx.default_device() == mx.cpu:
        return 0.0
    try:
        with mx.stream(mx.cpu):
            return reference.noise(lambda ids: _reference_logits(forward, ids))
    except UnsupportedModel:
        return 0.0


def _coarse_tolerance(forward: Forward, reference: Reference) -> float:
    noise = SelfCheck(is_out_of_memory).measure(checks.chunked, LibraryCompute(forward), reference)
    return min(max(2 * noise, _COARSE * reference.scale), reference.scale)


def _features_of(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _NO_FEATURES}
