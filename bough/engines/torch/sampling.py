"""Choosing the next token from tensors that the host reads, and log-probabilities of the raw distribution on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bough.engines.sampling import Scores, sample_row, score_row
from bough.types import Alternative, Draw, SampledToken

_NUM_SCORED = 64  # rows of a prompt at a time: ranking takes several times their memory
_PRECISE = (torch.float32, torch.float64)


def sample(logits: Sequence[Tensor], draws: Sequence[Draw]) -> list[SampledToken]:
    """Choose one token for each row of logits, which stay as they are. No row's result depends on the others.

    Raises EngineError if a row has NaN or no finite logit, or if its mask forbids every token.
    """
    return [sample_row(_on_host(row), draw) for row, draw in zip(logits, draws, strict=True)]


def score(rows: Tensor, token_ids: Sequence[int], num_top: int) -> list[SampledToken]:
    """The log-probability of a given token in each row of logits, and the likeliest ones there, some rows at a time."""
    if not rows.is_cuda:
        return [score_row(_on_host(row), each, num_top) for row, each in zip(rows, token_ids, strict=True)]
    results: list[SampledToken] = []
    for start in range(0, len(token_ids), _NUM_SCORED):
        part = token_ids[start : start + _NUM_SCORED]
        results += score_on_device(rows[start : start + len(part)], part, num_top)
    return results


def score_on_device(rows: Tensor, token_ids: Sequence[int], num_top: int) -> list[SampledToken]:
    """The same by the rows' device, of which only the results come to the host."""
    ids = torch.tensor(token_ids, device=rows.device)
    logprobs = Logprobs(rows, ids, dict.fromkeys(range(len(token_ids)), num_top))
    if rows.is_cuda:
        torch.cuda.current_stream(rows.device).synchronize()
    results = [SampledToken(token_id) for token_id in token_ids]
    logprobs.add_to(results)
    return results


def _on_host(row: Tensor) -> Scores:
    """A row of logits for NumPy: on a CPU where it is."""
    found: Scores = (row if row.dtype in _PRECISE else row.float()).numpy(force=True)
    return found


class Logprobs:
    """The log-probabilities of the raw distribution, for the rows that asked for them, on their way to the host."""

    def __init__(self, logits: Tensor, ids: Tensor, asking: Mapping[int, int]) -> None:
        """`asking` has the number of alternatives of each such row."""
        self._asking = asking
        indices = torch.tensor(list(asking), pin_memory=ids.is_cuda).to(ids.device, non_blocking=True)
        rows = logits[indices].float()
        ranked = _rank(rows, max(asking.values()))
        wanted = torch.cat([ids[indices].unsqueeze(-1), ranked], dim=-1)
        logprobs = torch.log_softmax(rows, dim=-1).gather(-1, wanted)
        self._numbers = start_reading(torch.cat([logprobs.double(), ranked.double()], dim=-1))

    def add_to(self, results: list[SampledToken]) -> None:
        """Add them to the rows that asked. The copy to the host must have ended."""
        for (row, num_top), (own, *numbers) in zip(self._asking.items(), self._numbers.tolist(), strict=True):
            half = len(numbers) // 2
            top = map(Alternative, map(int, numbers[half : half + num_top]), numbers[:num_top])
            results[row] = SampledToken(results[row].token_id, own, tuple(top))


def start_reading(values: Tensor) -> Tensor:
    """Start a copy to new pinned memory on the host, which no later batch overwrites."""
    return torch.empty_like(values, device="cpu", pin_memory=values.is_cuda).copy_(values, non_blocking=True)


def _rank(rows: Tensor, count: int) -> Tensor:
    """The ids of each row's `count` largest values, or all, in falling order, ties by id. Does not wait for the device."""
    bits = (rows + 0.0).view(torch.int32).long()  # -0.0 is 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (ordered << 32) - torch.arange(rows.shape[-1], device=rows.device)
    return -keys.topk(min(count, rows.shape[-1]), dim=-1).values & 0xFFFFFFFF
