"""The self-check of a model at load: several architectures are silently wrong when chunked or restored.

The model's own answer in one forward pass without a cache is the reference. mlx-lm itself always runs its models with a
cache, and some fail or answer otherwise without one: their reference is one forward pass with a fresh cache of the
library. The same prompt is then run in one shot, in runs, token by token, in batches, restored, rewound and branched: on
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
from contextlib import suppress

import mlx.core as mx

from bough.engines.mlx.compute import MlxLaneCompute
from bough.engines.mlx.device import is_out_of_memory
from bough.engines.mlx.forward import MlxForward
from bough.engines.mlx.layers import install_attention
from bough.engines.mlx.layout import MlxLayout, MlxPages
from bough.engines.mlx.library import VERSION
from bough.engines.mlx.loading.model import main_type, weights_of
from bough.engines.mlx.self_check.probe import probe
from bough.engines.mlx.self_check.small_copy import make_random, make_small_copy
from bough.engines.self_check import checks
from bough.engines.self_check.check import (
    COPY_TOKENS,
    CheckedModel,
    SelfCheck,
    drop_unproven,
    hash_features,
    needs_copy,
    reference_tokens,
)
from bough.engines.self_check.reference import ComputeLogits, Reference, usual_ids
from bough.engines.shared.code import hash_sources
from bough.engines.shared.compute import PlainCompute, Verdict
from bough.engines.shared.row_memory import LaneSizes
from bough.errors import ModelError, UnsupportedModel

ATTENTION = "mlx"
_FINE = 1e-4
_COARSE = 0.5
_OTHERWISE = 1e-2  # in spreads; two forward passes that differ by more are different answers
_FORMAT = 2  # raise it when the check itself changes
_NO_FEATURES = {"_name_or_path", "name_or_path", "transformers_version"}


def verdict_key(forward: MlxForward) -> str:
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
        {name: value for name, value in forward.config.items() if name not in _NO_FEATURES},
    ]
    return hash_features(features)


def self_check(forward: MlxForward, layout: MlxLayout) -> Verdict:
    """Try every way of running the model, the best first. Afterwards its memory is released.

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


def _try_all(forward: MlxForward, layout: MlxLayout) -> Verdict:
    check = SelfCheck(is_out_of_memory)
    candidates = _candidates(forward, layout)
    can_batch = install_attention(forward.model) or not layout.rows
    verdict = check.check_lanes(ATTENTION, candidates, can_batch) if layout.groups else None
    if verdict is None:
        return check.check_plain(ATTENTION, candidates[0], layout.unknown)
    return drop_unproven(verdict, candidates)


def _candidates(forward: MlxForward, layout: MlxLayout) -> list[CheckedModel]:
    """The real model first, then its copies."""
    dtype = main_type(forward.model)
    is_coarse = dtype != mx.float32 or bool(forward.config.get("quantization"))
    small = make_small_copy(forward, layout) if needs_copy(layout.groups, is_coarse) else None
    copies = _copy_candidates(small, dtype) if small is not None else []
    num_tokens = reference_tokens(layout.groups, is_coarse, bool(copies))
    reference = _make_reference(forward, num_tokens, layout.vocab_size or forward.text["vocab_size"])
    if is_coarse:
        noise = SelfCheck(is_out_of_memory).measure(checks.chunked, PlainCompute(forward, keeps_cache=True), reference)
        tolerance = min(max(2 * noise, _COARSE * reference.scale), reference.scale)
    else:
        tolerance = _fine_tolerance(forward, reference, max(1.0, reference.scale))
    return [_candidate(forward, layout, reference, tolerance, is_coarse=is_coarse), *copies]


def _copy_candidates(small: MlxForward, dtype: mx.Dtype) -> list[CheckedModel]:
    """The small copy, and for half precision a copy of it in that type, compared with the reference of the float32 one."""
    layout = probe(small)
    reference = _make_reference(small, COPY_TOKENS, layout.vocab_size)
    candidates = [_candidate(small, layout, reference, _fine_tolerance(small, reference, reference.scale), " (small copy)")]
    if dtype != mx.float32:
        half = make_random(small.config, dtype)
        label = f" (small copy, {str(dtype).removeprefix('mlx.core.')})"
        with suppress(UnsupportedModel):  # the device cannot run it: on a CPU only quantized experts run so
            tolerance = 3 * reference.noise(_compute_logits(half))
            candidates.append(_candidate(half, probe(half), reference, tolerance, label))
    return candidates


def _candidate(
    forward: MlxForward, layout: MlxLayout, reference: Reference, tolerance: float, label: str = "", is_coarse: bool = False
) -> CheckedModel:
    sizes = LaneSizes(len(reference.ids), COPY_TOKENS)

    def compute(can_batch: bool) -> MlxLaneCompute:
        return MlxLaneCompute(forward, layout, MlxPages(layout), sizes, can_batch)

    return CheckedModel(forward, layout, compute, reference, tolerance, label, is_coarse)


def _make_reference(forward: MlxForward, num_tokens: int, vocab_size: int) -> Reference:
    return Reference(_compute_logits(forward), num_tokens, usual_ids(forward.config, vocab_size))


def _compute_logits(forward: MlxForward) -> ComputeLogits:
    return lambda prompts: [_reference_logits(forward, prompt.ids) for prompt in prompts]


def _reference_logits(forward: MlxForward, ids: Sequence[int]) -> mx.array:
    """The logits without a cache, or where that fails or gives other logits, with a fresh cache of the library."""
    plain, cached = _logits(forward, ids, has_cache=False), _logits(forward, ids, has_cache=True)
    if isinstance(cached, Exception):
        if isinstance(plain, Exception):
            name = type(forward.model).__module__
            raise UnsupportedModel(f"{name} fails on {len(ids)} tokens: {type(plain).__name__}: {plain}") from plain
        return plain
    is_same = isinstance(plain, mx.array) and float(abs(plain - cached).max()) <= _OTHERWISE * float(cached.std())
    return plain if isinstance(plain, mx.array) and is_same else cached


def _logits(forward: MlxForward, ids: Sequence[int], has_cache: bool) -> mx.array | Exception:
    """The logits after each of `ids` in one forward pass, or what the model raised."""
    try:
        return forward.all_logits(ids, forward.make_cache() if has_cache else None)
    except Exception as error:  # a model that needs a cache, or cannot have one, may raise anything
        if is_out_of_memory(error):
            raise
        return error


def _fine_tolerance(forward: MlxForward, reference: Reference, scale: float) -> float:
    return min(max(_FINE * scale, 3 * _device_noise(forward, reference)), _OTHERWISE * scale)


def _device_noise(forward: MlxForward, reference: Reference) -> float:
    """The distance between the answers of the CPU and of the device; 0 if the CPU has none, or is the device."""
    if mx.default_device() == mx.cpu:
        return 0.0
    try:
        with mx.stream(mx.cpu):
            return reference.noise(_compute_logits(forward))
    except UnsupportedModel:
        return 0.0
