"""The parameters of a batch of draws for the sampling kernels, packed so that they take few copies to the device.

Numbers that every draw has are in `SamplingTable`: one line of `COLUMNS` doubles for each row. Masks, biases and penalties,
which few draws have, are in `ScoreChanges`: these rows get a copy of their scores, and so do those with top-n-sigma.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bough.engines.sampling import find_penalised
from bough.types import Draw, SamplingParams

COLUMNS = 6  # scale, top-k (0: none), top-p (1: none), min-p, uniform, row of the copied scores (-1: none)
_UNIFORM, _SCORE_ROW = 4, 5
_LARGEST_SCALE = 3e38  # of a float32: a temperature next to 0
_NUM_BIASES = 64  # the latest that stay packed, 16 KB each
_Bytes: TypeAlias = "bytes | bytearray | array[Any]"


class Stage(IntEnum):
    """The kernels that a row needs: those of its stage and of all earlier ones."""

    GREEDY = 0
    DRAW = 1
    LIMIT = 2
    TWO_LIMITS = 3  # top-p of the tokens that top-k keeps


class SamplingTable:
    """The lines of a batch. Parameters that did not change since the last batch are not packed or sent again."""

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._params: list[SamplingParams | None] = [None] * max_rows
        self._stages = [Stage.GREEDY] * max_rows
        self._values = array("d", bytes(8 * COLUMNS * max_rows))
        self._sent = array("d")
        self._tensor = torch.empty(0, dtype=torch.float64, device=device)

    def put(self, draws: Sequence[Draw]) -> list[int]:
        """Pack a batch; returns the rows that need a copy of their scores, in the order of these copies."""
        changed: list[int] = []
        values = self._values
        for row, draw in enumerate(draws):
            params = draw.params
            if params is not self._params[row]:  # they are frozen
                self._put_params(row, params)
            if params.temperature > 0:
                values[row * COLUMNS + _UNIFORM] = draw.uniform
            is_changed = params.logit_bias or draw.allowed is not None or find_penalised(draw) is not None
            is_changed = is_changed or params.top_n_sigma > 0
            values[row * COLUMNS + _SCORE_ROW] = len(changed) if is_changed else -1
            if is_changed:
                changed.append(row)
        return changed

    def _put_params(self, row: int, params: SamplingParams) -> None:
        scale = min(math.log2(math.e) / params.temperature, _LARGEST_SCALE) if params.temperature > 0 else 0.0
        top_k = params.top_k if params.top_k < self._vocab_size else 0
        line = (scale, top_k, params.top_p, params.min_p, 0.0, -1.0)
        self._values[row * COLUMNS : (row + 1) * COLUMNS] = array("d", line)
        self._stages[row] = Stage(Stage.DRAW + (top_k > 0) + (params.top_p < 1)) if params.temperature else Stage.GREEDY
        self._params[row] = params

    def find_stage(self, num_rows: int) -> Stage:
        return max(self._stages[:num_rows])

    def send(self, num_rows: int) -> Tensor:
        """The lines of the batch on the device; copied only if one differs from the last batch's."""
        values = self._values[: num_rows * COLUMNS]
        if values != self._sent[: len(values)]:
            self._tensor = send(values, self._device).view(torch.float64)
            self._sent = values
        return self._tensor


class ScoreChanges(NamedTuple):
    """Masks, biases and penalties of the rows that have any, on the device.

    A line of `changed` has a row of logits and the index of its mask, or -1. A line of segments has a row of the copied
    scores, and the range of its entries in the token ids and values.
    """

    changed: Tensor
    masks: Tensor
    bias_segments: Tensor
    bias_ids: Tensor
    biases: Tensor
    penalty_segments: Tensor
    penalised_ids: Tensor
    counts: Tensor
    penalties: Tensor

    @classmethod
    def send(cls, draws: Sequence[Draw], changed: Sequence[int], vocab_size: int, device: torch.device) -> ScoreChanges:
        """Pack the changes of these rows and send them in one copy. Runs no Python for each token."""
        own = [draws[row] for row in changed]
        lines, masks = _list_masks(own, changed, count_mask_bytes(vocab_size))
        biased = [(row, *_pack_bias(draw.params.logit_bias)) for row, draw in enumerate(own) if draw.params.logit_bias]
        penalised = [(row, seen) for row, draw in enumerate(own) if (seen := find_penalised(draw)) is not None]
        params = [own[row].params for row, _ in penalised]
        penalties = [(each.repeat_penalty, each.presence_penalty, each.frequency_penalty) for each in params]
        tensors: list[tuple[torch.dtype, Sequence[_Bytes]]] = [
            (torch.int64, [lines]),
            (torch.uint8, masks),
            (torch.int64, [_list_segments([(row, len(ids)) for row, ids, _ in biased])]),
            (torch.int64, [ids for _, ids, _ in biased]),
            (torch.float64, [biases for _, _, biases in biased]),
            (torch.int64, [_list_segments([(row, len(seen.ids)) for row, seen in penalised])]),
            (torch.int64, [seen.ids for _, seen in penalised]),
            (torch.int64, [seen.counts for _, seen in penalised]),
            (torch.float64, [array("d", each) for each in penalties]),
        ]
        return cls(*_send_all(tensors, device))


def count_mask_bytes(vocab_size: int) -> int:
    return (vocab_size + 7) // 8


def _list_masks(draws: Sequence[Draw], rows: Sequence[int], num_bytes: int) -> tuple[array[int], list[bytes]]:
    """The lines of `changed`, and the masks; tokens beyond the end of a short mask are forbidden."""
    lines = array("q")
    masks: list[bytes] = []
    for row, draw in zip(rows, draws, strict=True):
        lines.extend((row, -1 if draw.allowed is None else len(masks)))
        if draw.allowed is not None:
            masks.append(draw.allowed[:num_bytes].ljust(num_bytes, b"\0"))
    return lines, masks


def _list_segments(lengths: Sequence[tuple[int, int]]) -> array[int]:
    """Lines of (row, start, end) for consecutive entries, from each row and its number of entries."""
    lines, start = array("q"), 0
    for row, length in lengths:
        lines.extend((row, start, start + length))
        start += length
    return lines


@lru_cache(maxsize=_NUM_BIASES)
def _pack_bias(bias: tuple[tuple[int, float], ...]) -> tuple[array[int], array[float]]:
    """Token ids and biases, packed once for each request."""
    return array("q", (token_id for token_id, _ in bias)), array("d", (each for _, each in bias))


def _send_all(tensors: Sequence[tuple[torch.dtype, Sequence[_Bytes]]], device: torch.device) -> list[Tensor]:
    """Send tensors of several types, each from the pieces of its content, in one copy."""
    packed, ends = bytearray(), list[tuple[int, int]]()
    for _, pieces in tensors:
        start = len(packed)
        packed += b"".join(pieces)
        ends.append((start, len(packed)))
        packed += bytes(-len(packed) % 16)  # the next one is aligned
    sent = send(packed, device).view(torch.uint8)
    return [sent[start:end].view(dtype) for (dtype, _), (start, end) in zip(tensors, ends, strict=True)]


def send(data: _Bytes, device: torch.device) -> Tensor:
    """A copy on the device, as words of 8 bytes. Does not wait for CUDA: torch keeps the pinned memory until then."""
    words = torch.frombuffer(data, dtype=torch.int64)  # not bytes: torch would use several threads for that many
    return words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words.clone()
