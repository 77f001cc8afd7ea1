"""Bough's attention against the definition: scores, mask, softmax, sum, with every head's keys repeated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bough.engines.torch.attention import LaneRows, attach_lanes, attach_window, attention

MODULE = torch.nn.Module()


def by_definition(
    query: Tensor, key: Tensor, value: Tensor, window: int, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    rows, own = torch.arange(key.shape[2]), torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None]
    hidden = (rows > own) | (rows <= own - window) if window else rows > own
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).transpose(1, 2)


def random_case(num_queries: int, num_rows: int, value_dim: int = 16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (1, 6, num_queries, 16), (1, 2, num_rows, 16), (1, 2, num_rows, value_dim)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)  # type: ignore[return-value]


@pytest.mark.parametrize("window", [0, 1, 7, 40])
@pytest.mark.parametrize(("num_queries", "num_rows"), [(1, 1), (1, 30), (9, 9), (9, 30), (2, 50), (50, 50), (600, 1300)])
@pytest.mark.parametrize("manner", ["plain", "softcap", "sinks"])
def test_it_is_causal_and_aligned_to_the_lower_right(num_queries: int, num_rows: int, window: int, manner: str) -> None:
    query, key, value = random_case(num_queries, num_rows)
    softcap = 5.0 if manner == "softcap" else None
    sinks = torch.linspace(-1, 1, 6) if manner == "sinks" else None

    output, _ = attention(MODULE, query, key, value, None, sliding_window=window or None, softcap=softcap, s_aux=sinks)

    torch.testing.assert_close(output, by_definition(query, key, value, window, softcap, sinks), atol=2e-6, rtol=1e-5)


def test_values_may_be_shorter_than_keys() -> None:
    query, key, value = random_case(4, 20, value_dim=8)

    output, _ = attention(MODULE, query, key, value, None)

    torch.testing.assert_close(output, by_definition(query, key, value, 0, None, None), atol=2e-6, rtol=1e-5)


def test_the_window_of_the_lane_holds_where_the_model_tells_none() -> None:
    query, key, value = random_case(9, 30)

    output, _ = attention(MODULE, query, attach_window(key, 7), value, None)

    torch.testing.assert_close(output, by_definition(query, key, value, 7, None, None), atol=2e-6, rtol=1e-5)


def test_each_entry_of_a_batch_attends_to_the_rows_of_its_own_lane() -> None:
    cases = [random_case(1, num_rows, seed=num_rows) for num_rows in (5, 30, 1)]
    batch = torch.cat([query for query, _, _ in cases])
    keys = attach_lanes(torch.zeros(3, 2, 1, 16), LaneRows(None, 0, lambda: [case[1:] for case in cases]))

    output, _ = attention(MODULE, batch, keys, torch.zeros(3, 2, 1, 16), None)

    for entry, case in zip(output, cases, strict=True):
        torch.testing.assert_close(entry[None], by_definition(*case, 0, None, None), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("unknown", [{"is_causal": False}, {"position_bias": torch.zeros(1)}])
def test_what_it_does_not_know_is_refused(unknown: dict[str, object]) -> None:
    with pytest.raises(NotImplementedError):
        attention(MODULE, *random_case(4, 4), None, **unknown)  # type: ignore[arg-type]
