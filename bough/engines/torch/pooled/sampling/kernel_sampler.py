"""The host's side of sampling by kernels: packs the draws, launches the kernels, and reads the results one step later.

A batch of plain argmax takes two kernels and one copy; others take the kernels that their rows need, and each kernel skips
the other rows. Importing this module needs triton.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from bough.engines.sampling import NONE_ALLOWED, NOT_FINITE
from bough.engines.torch.pooled.sampling import kernels
from bough.engines.torch.pooled.sampling.kernels import BINS, BLOCK, CHUNK, SAMPLE
from bough.engines.torch.pooled.sampling.table import SamplingTable, ScoreChanges, Stage, count_mask_bytes, send
from bough.engines.torch.sampling import Logprobs, start_reading
from bough.errors import EngineError
from bough.types import Draw, SampledToken

_cuda: Any = torch.cuda  # which is not fully typed
_FAILURES = {-1: NOT_FINITE, -2: NONE_ALLOWED}  # as the kernels write them instead of a token id


class KernelChoices:
    """The choices of one batch: on the device, and on their way to the host."""

    def __init__(self, ids: Tensor, codes: Tensor, logprobs: Logprobs | None) -> None:
        self.ids = ids
        self._codes = start_reading(codes)
        self._logprobs = logprobs
        self._event = _cuda.Event(blocking=True) if ids.is_cuda else None
        if self._event is not None:
            self._event.record()

    def read(self) -> list[SampledToken]:
        if self._event is not None:
            self._event.synchronize()
        codes = self._codes.tolist()
        if min(codes, default=0) < 0:
            raise EngineError(next(_FAILURES[code] for code in codes if code < 0))
        results = [SampledToken(token_id) for token_id in codes]
        if self._logprobs is not None:
            self._logprobs.add_to(results)
        return results


class KernelSampler:
    """Chooses tokens by kernels. All launches must be on one stream: they share small buffers."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self._vocab_size = vocab_size
        self._device = device
        self._table = SamplingTable(vocab_size, max_rows, device)
        self._num_parts = triton.cdiv(vocab_size, BLOCK)
        self._padded_parts = max(16, triton.next_power_of_2(self._num_parts))
        shape = (max_rows, self._padded_parts)
        self._maxima, self._raw_maxima, self._part_weights = torch.empty(3, *shape, device=device)
        self._ids_of_maxima, self._part_equals = torch.empty(2, *shape, dtype=torch.int32, device=device)
        self._best, self._scales, self._thresholds = torch.empty(3, max_rows, device=device)
        self._rooms = torch.empty(max_rows, dtype=torch.int32, device=device)
        self._kept_weights = torch.empty(max_rows, dtype=torch.float64, device=device)
        self._pivots = torch.empty(max_rows, BINS, device=device)
        self._bin_weights = torch.empty(max_rows, BINS, self._padded_parts, device=device)
        self._bin_counts = torch.empty_like(self._bin_weights, dtype=torch.int32)

    def launch(self, logits: Tensor, draws: Sequence[Draw]) -> KernelChoices:
        """Launch the kernels for one batch; does not wait for them."""
        num_rows = len(draws)
        changed = self._table.put(draws)
        table = self._table.send(num_rows)
        scores = self._change_scores(logits, draws, changed) if changed else self._best  # which is not looked at
        source = (logits, logits.stride(0), scores, table)
        ids, codes = torch.empty(2, num_rows, dtype=torch.int64, device=self._device)
        self._choose_likeliest(source, ids, codes)
        stage = self._table.find_stage(num_rows)
        if stage >= Stage.LIMIT:
            self._find_thresholds(source, num_rows, stage)
        if stage >= Stage.DRAW:
            self._draw(source, ids, codes)
        asking = {row: draw.params.logprobs for row, draw in enumerate(draws) if draw.params.logprobs is not None}
        return KernelChoices(ids, codes, Logprobs(logits, ids, asking) if asking else None)

    def _change_scores(self, logits: Tensor, draws: Sequence[Draw], changed: Sequence[int]) -> Tensor:
        """Copies of the rows that have a mask, biases, penalties or top-n-sigma, changed by these."""
        size = self._vocab_size
        scores = torch.empty(len(changed), size, device=self._device)
        changes = ScoreChanges.send(draws, changed, size, self._device)
        kernels.copy_scores[(len(changed), self._num_parts)](
            logits, logits.stride(0), scores, changes.changed, changes.masks, count_mask_bytes(size), size, BLOCK=BLOCK
        )
        biased = [len(draw.params.logit_bias) for draw in draws]
        if any(biased):
            grid = (len(changes.bias_segments) // 3, triton.cdiv(max(biased), BLOCK))
            kernels.add_biases[grid](scores, changes.bias_segments, changes.bias_ids, changes.biases, size, BLOCK=BLOCK)
        if len(changes.penalty_segments):
            longest = max(len(draw.seen.ids) for draw in draws if draw.seen is not None)
            penalised = (changes.penalty_segments, changes.penalised_ids, changes.counts, changes.penalties)
            grid = (len(changes.penalty_segments) // 3, triton.cdiv(longest, BLOCK))
            kernels.penalise_scores[grid](scores, *penalised, size, BLOCK=BLOCK)
        sigmas = array("d", (draws[row].params.top_n_sigma for row in changed))
        if any(sigmas):  # in torch: few requests have it
            scores = _keep_near_best(scores.double(), send(sigmas, self._device).view(torch.float64).unsqueeze(-1)).float()
        return scores

    def _choose_likeliest(self, source: tuple[Any, ...], ids: Tensor, codes: Tensor) -> None:
        parts = self._padded_parts
        maxima = (self._maxima, self._ids_of_maxima, self._raw_maxima)
        kernels.find_part_maxima[(len(ids), self._num_parts)](*source, *maxima, self._vocab_size, PARTS=parts, BLOCK=BLOCK)
        ends = (self._best, self._scales, self._thresholds, self._rooms)
        kernels.choose_likeliest[(len(ids),)](
            source[-1], *maxima, *ends, ids, codes, self._num_parts, PARTS=parts, num_warps=1
        )

    def _find_thresholds(self, source: tuple[Any, ...], num_rows: int, stage: Stage) -> None:
        size, parts, counts = self._vocab_size, self._padded_parts, (self._bin_counts, self._bin_weights)
        grid, row_grid = (num_rows, self._num_parts), (num_rows,)
        gathered = torch.empty(num_rows, size, device=self._device)
        kernels.take_sample[row_grid](*source, self._scales, self._pivots, size, SAMPLE=SAMPLE, BINS=BINS)
        kernels.measure_bins[grid](
            *source, self._best, self._scales, self._pivots, *counts, size, PARTS=parts, BLOCK=BLOCK, BINS=BINS, num_warps=2
        )
        bins = (self._pivots, *counts, self._kept_weights, gathered)
        for is_second in (False, True)[: 1 + (stage == Stage.TWO_LIMITS)]:
            kernels.gather_bin[grid](
                *source, self._scales, *bins, size, self._num_parts, PARTS=parts, BLOCK=BLOCK, BINS=BINS, SECOND=is_second
            )
            kernels.find_threshold[row_grid](
                source[-1], self._best, self._scales, *bins, self._thresholds, self._rooms, size, self._num_parts,
                PARTS=parts, BINS=BINS, CHUNK=CHUNK, SECOND=is_second, num_warps=32,
            )  # fmt: skip

    def _draw(self, source: tuple[Any, ...], ids: Tensor, codes: Tensor) -> None:
        size, parts = self._vocab_size, self._padded_parts
        ends, sums = (self._best, self._scales, self._thresholds), (self._part_weights, self._part_equals)
        kernels.weigh_parts[(len(ids), self._num_parts)](*source, *ends, *sums, size, PARTS=parts, BLOCK=BLOCK)
        kernels.draw_tokens[(len(ids),)](
            *source, *ends, self._rooms, *sums, ids, codes, size, self._num_parts, PARTS=parts, BLOCK=BLOCK
        )


def _keep_near_best(scores: Tensor, top_n_sigma: Tensor) -> Tensor:
    """Set scores to -inf that are more than `top_n_sigma` standard deviations of the possible ones below a row's largest.

    A row with the number 0 stays as it is.
    """
    is_possible = scores > -torch.inf
    counts = is_possible.sum(dim=-1, keepdim=True)
    means = torch.where(is_possible, scores, 0).sum(dim=-1, keepdim=True) / counts
    variances = torch.where(is_possible, scores - means, 0).square().sum(dim=-1, keepdim=True) / counts
    least = scores.amax(dim=-1, keepdim=True) - top_n_sigma * variances.sqrt()
    return scores.masked_fill((scores < least) & (top_n_sigma > 0), -torch.inf)
