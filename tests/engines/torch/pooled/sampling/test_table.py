"""What is packed for the sampling kernels, and what is not sent twice."""

from __future__ import annotations

import math

import pytest
import torch

from bough.engines.torch.pooled.sampling.table import COLUMNS, SamplingTable, ScoreChanges, Stage
from bough.types import Draw, SamplingParams, TokenCounts

CPU = torch.device("cpu")
PLAIN, WARM = SamplingParams(), SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)


def lines(table: SamplingTable, draws: list[Draw]) -> list[list[float]]:
    table.put(draws)
    return table.send(len(draws)).view(-1, COLUMNS)[: len(draws)].tolist()


def test_each_row_has_its_own_line():
    table = SamplingTable(100, 4, CPU)

    packed = lines(table, [Draw(PLAIN, 0.7), Draw(WARM, 0.7), Draw(SamplingParams(top_k=100), allowed=b"\1")])

    assert packed[0] == [0.0, 0, 1.0, 0.0, 0.0, -1]  # the number drawn does not matter to the largest logit
    assert packed[1] == pytest.approx([2 * math.log2(math.e), 3, 0.9, 0.1, 0.7, -1])
    assert packed[2] == [0.0, 0, 1.0, 0.0, 0.0, 0]


def test_lines_are_sent_again_only_if_they_changed():
    table = SamplingTable(100, 4, CPU)
    table.put([Draw(PLAIN), Draw(WARM, 0.1)])
    first = table.send(2)

    table.put([Draw(PLAIN, 0.5), Draw(WARM, 0.1)])
    assert table.send(2) is first
    table.put([Draw(PLAIN)])
    assert table.send(1) is first
    assert lines(table, [Draw(PLAIN), Draw(WARM, 0.2)])[1][4] == 0.2
    assert lines(table, [Draw(WARM, 0.3), Draw(PLAIN)])[0][1:5] == pytest.approx([3, 0.9, 0.1, 0.3])
    assert lines(table, [Draw(WARM, 0.3), Draw(PLAIN), Draw(PLAIN)])[2][0] == 0


@pytest.mark.parametrize(
    ("params", "stage"),
    [
        ({}, Stage.GREEDY),
        ({"top_k": 4, "top_p": 0.5}, Stage.GREEDY),
        ({"temperature": 1.0, "min_p": 0.1}, Stage.DRAW),
        ({"temperature": 1.0, "top_k": 100}, Stage.DRAW),
        ({"temperature": 1.0, "top_k": 99}, Stage.LIMIT),
        ({"temperature": 1.0, "top_p": 0.9}, Stage.LIMIT),
        ({"temperature": 1.0, "top_p": 0.9, "top_k": 4}, Stage.TWO_LIMITS),
    ],
)
def test_a_batch_goes_as_far_as_its_furthest_row(params: dict[str, float], stage: Stage):
    table = SamplingTable(100, 4, CPU)
    table.put([Draw(PLAIN), Draw(SamplingParams(**params)), Draw(PLAIN)])

    assert table.find_stage(3) == stage
    assert table.find_stage(1) == Stage.GREEDY


def test_changes_of_several_rows_arrive_in_one_piece():
    biased = SamplingParams(logit_bias={4: 1.5, 2: -1.0})
    penalised = SamplingParams(repeat_penalty=2.0, presence_penalty=0.5)
    draws = [
        Draw(PLAIN, seen=TokenCounts([1])),
        Draw(biased, allowed=b"\xff"),
        Draw(penalised, seen=TokenCounts([7, 7, 9])),
        Draw(PLAIN, allowed=b"\1\2\3\4"),
    ]
    changed = SamplingTable(20, 4, CPU).put(draws)

    sent = ScoreChanges.send(draws, changed, 20, CPU)

    assert changed == [1, 2, 3]
    assert sent.changed.view(-1, 2).tolist() == [[1, 0], [2, -1], [3, 1]]
    assert sent.masks.view(-1, 3).tolist() == [[255, 0, 0], [1, 2, 3]]
    assert (sent.bias_segments.tolist(), sent.bias_ids.tolist(), sent.biases.tolist()) == ([0, 0, 2], [2, 4], [-1.0, 1.5])
    assert (sent.penalty_segments.tolist(), sent.penalised_ids.tolist(), sent.counts.tolist()) == (
        [1, 0, 2],
        [7, 9],
        [2, 1],
    )
    assert sent.penalties.tolist() == [2.0, 0.5, 0.0]
