"""The sampling kernels against the definition in plain Python: on a GPU, or on the CPU by Triton's interpreter."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bough.engines.sampling import NONE_ALLOWED, NOT_FINITE
from bough.engines.torch.sampling import sample
from bough.errors import EngineError
from bough.types import Draw, SampledToken, SamplingParams, TokenCounts
from tests import reference_sampler as reference
from tests.sampling.draws import bits, logs, make_many_draws

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")  # by the interpreter
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BELOW_ONE = 1.0 - 2**-53
MARGIN = 2e-6  # the kernels weigh in float32


ON_CPU = pytest.mark.skipif(not IS_INTERPRETED, reason="needs TRITON_INTERPRET=1")
ON_GPU = (
    pytest.mark.cuda,
    pytest.mark.skipif(IS_INTERPRETED or not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
)


@pytest.fixture(
    params=[
        pytest.param("small cpu", marks=ON_CPU),
        pytest.param("small cuda", marks=ON_GPU),
        pytest.param("cuda", marks=ON_GPU),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Also with small samples and chunks: then bins here have several chunks, and the interpreter takes less time."""
    from bough.engines.torch.pooled.sampling import kernel_sampler

    torch.set_num_threads(1)
    size, _, kind = request.param.rpartition(" ")
    if size == "small":
        monkeypatch.setattr(kernel_sampler, "SAMPLE", 32)
        monkeypatch.setattr(kernel_sampler, "CHUNK", 1024)
    return torch.device(kind)


def launch(rows: Tensor, draws: Sequence[Draw]) -> Any:
    from bough.engines.torch.pooled.sampling.kernel_sampler import KernelSampler

    return KernelSampler(rows.shape[-1], len(draws), rows.device).launch(rows, draws)


def choose(device: torch.device, rows: Sequence[Sequence[float]], draws: Sequence[Draw]) -> list[SampledToken]:
    return launch(torch.tensor(rows, device=device), draws).read()


def choose_ids(device: torch.device, row: Sequence[float], draws: Sequence[Draw]) -> list[int]:
    return [each.token_id for each in choose(device, [row] * len(draws), draws)]


def make_params(chance: random.Random, vocab_size: int) -> SamplingParams:
    """Of every kind. What changes scores is a small power of two, so that no rounding makes scores equal."""
    biased = chance.sample(range(vocab_size), 5) if chance.random() < 0.3 else []
    return SamplingParams(
        temperature=chance.choice([0.0, 0.3, 0.8, 1.0, 2.5]),
        top_k=chance.choice([0, 0, 1, 3, 40, vocab_size // 2, vocab_size + 1]),
        top_p=chance.choice([1.0, 1.0, 1e-9, 0.3, 0.9, 0.999]),
        min_p=chance.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
        repeat_penalty=chance.choice([1.0, 1.0, 2.0, 0.5]),
        presence_penalty=chance.choice([0.0, 0.25, -0.5]),
        frequency_penalty=chance.choice([0.0, 0.125]),
        logprobs=chance.choice([None, None, 0, 3, 20]),
        logit_bias=tuple((token_id, chance.choice([-100.0, 2.5, 4.0])) for token_id in biased),
        top_n_sigma=chance.choice([0.0, 0.0, 1.0, 2.5]),
    )


def make_draw(chance: random.Random, vocab_size: int) -> Draw:
    allowed = chance.sample(range(vocab_size), chance.choice([1, vocab_size // 2])) if chance.random() < 0.3 else None
    return Draw(
        make_params(chance, vocab_size),
        uniform=chance.choice([0.0, chance.random(), chance.random(), BELOW_ONE]),
        seen=TokenCounts(chance.choices(range(vocab_size), k=30)) if chance.random() < 0.5 else None,
        allowed=None if allowed is None else bits(allowed, vocab_size),
    )


def assert_as_defined(rows: Tensor, draws: Sequence[Draw], results: Sequence[SampledToken]) -> int:
    """How many rows could be compared: those that no rounding decides."""
    num_compared = 0
    for values, draw, result in zip(rows.tolist(), draws, results, strict=True):
        if draw.uniform != BELOW_ONE and reference.is_near_border(values, draw, MARGIN):
            continue
        if draw.uniform == BELOW_ONE:  # rounding decides between the last ones
            assert reference.probabilities(values, draw)[result.token_id] > 0
            continue
        num_compared += 1
        expected = reference.sample(values, draw)
        assert result.token_id == expected.token_id, draw
        assert [each.token_id for each in result.top] == [each.token_id for each in expected.top]
        assert (result.logprob is None) == (expected.logprob is None)
        if expected.logprob is not None:
            assert result.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [each.logprob for each in result.top] == pytest.approx([each.logprob for each in expected.top], abs=1e-4)
    return num_compared


@pytest.mark.parametrize(
    ("vocab_size", "count", "dtype", "spread"),
    [
        (1, 2, torch.float32, 1.0),
        (7, 16, torch.float32, 2.0),
        (257, 24, torch.bfloat16, 3.0),
        (2048, 6, torch.float16, 0.01),
        (2049, 12, torch.float16, 1.0),
        (5003, 12, torch.float32, 0.3),
    ],
)
def test_each_row_is_sampled_as_the_reference_defines(
    device: torch.device, vocab_size: int, count: int, dtype: torch.dtype, spread: float
):
    chance = random.Random(vocab_size)
    wide = torch.randn(count, vocab_size + 5, generator=torch.Generator().manual_seed(vocab_size)).mul(spread).to(dtype)
    rows = wide.to(device)[:, 3 : 3 + vocab_size]  # of any stride and alignment
    draws = [make_draw(chance, vocab_size) if vocab_size > 5 else Draw(SamplingParams(temperature=1)) for _ in range(count)]
    before = rows.clone()

    results = launch(rows, draws).read()

    assert assert_as_defined(rows, draws, results) >= count // 2
    assert rows.equal(before)


def test_a_vocabulary_of_50257_is_sampled_as_the_reference_defines(device: torch.device):
    rows = torch.randn(4, 50257, generator=torch.Generator().manual_seed(2)).mul(3).to(torch.bfloat16).to(device)
    draws = [
        Draw(SamplingParams(logprobs=20)),
        Draw(SamplingParams(temperature=0.8, top_k=400, min_p=0.01), uniform=0.7),
        Draw(SamplingParams(temperature=0.3, top_p=0.9), uniform=0.4),
        Draw(SamplingParams(temperature=0.3, repeat_penalty=2), 0.6, TokenCounts(range(9, 50000)), b"\x5a" * 6283),
    ]

    assert assert_as_defined(rows, draws, launch(rows, draws).read()) == len(draws)


def test_the_kernels_choose_what_the_functions_choose(device: torch.device):
    rows = torch.randn(7, 5000, generator=torch.Generator().manual_seed(3)).mul(3).to(torch.bfloat16).to(device)
    draws = make_many_draws(len(rows), vocab_size=5000)

    assert [each.token_id for each in launch(rows, draws).read()] == [each.token_id for each in sample(list(rows), draws)]


@pytest.mark.cuda
@pytest.mark.skipif(IS_INTERPRETED or not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("spread", [0.02, 1.0, 4.0])
def test_a_large_vocabulary_is_sampled_as_the_functions_sample_it(spread: float):
    rows = torch.randn(64, 128256, generator=torch.Generator().manual_seed(3)).mul(spread).to(torch.bfloat16).cuda()
    limits: list[dict[str, float]] = [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 9000, "top_p": 0.8}, {"min_p": 0.02}]
    limits += [{"top_n_sigma": 2.0}]
    draws = [
        Draw(SamplingParams(temperature=0.7, **limits[index % len(limits)]), uniform=(index + 0.5) / 64)
        for index in range(64)
    ]

    by_kernels, by_functions = launch(rows, draws).read(), sample(list(rows), draws)

    is_other = [one.token_id != other.token_id for one, other in zip(by_kernels, by_functions, strict=True)]
    assert sum(is_other) <= 3  # tokens of a hundred-thousandth each: rounding decides now and then


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.3},
        {"top_p": 0.98},
        {"top_k": 1500, "top_p": 0.9},
        {"top_k": 40, "top_p": 0.5},
        {"top_k": 2500, "min_p": 0.05},
        {"top_p": 0.9, "min_p": 0.2},
    ],
)
@pytest.mark.parametrize("spread", [0.02, 1.5])
def test_flat_and_steep_rows_are_limited_exactly(device: torch.device, params: dict[str, float], spread: float):
    row = torch.randn(3000, generator=torch.Generator().manual_seed(5)).mul(spread).to(torch.bfloat16)
    draws = [Draw(SamplingParams(temperature=0.7, **params), uniform=uniform) for uniform in (0.01, 0.6, 0.999)]
    rows = row.to(device).expand(len(draws), -1)

    assert assert_as_defined(rows, draws, launch(rows, draws).read()) >= 2


def test_a_row_is_limited_exactly_when_the_sample_says_nothing_of_it(device: torch.device):
    row = torch.rand(3000, generator=torch.Generator().manual_seed(6))
    for sample_size in (32, 1024):
        row[torch.arange(sample_size) * len(row) // sample_size] = -1.0  # so all others are in one bin
    limits: list[dict[str, float]] = [{"top_k": 1200}, {"top_p": 0.5}, {"top_k": 1500, "top_p": 0.6}]
    draws = [Draw(SamplingParams(temperature=1, **params), uniform) for params in limits for uniform in (0.3, 0.999)]
    rows = row.to(device).expand(len(draws), -1)

    assert assert_as_defined(rows, draws, launch(rows, draws).read()) >= 5


# Ties


def test_of_equal_logits_the_lowest_ids_are_kept(device: torch.device):
    row = [0.0] * 3000
    limits: list[tuple[dict[str, float], int]] = [
        ({"top_k": 10}, 10),
        ({"top_p": 0.3}, 900),
        ({"top_k": 1000, "top_p": 0.5}, 500),
        ({"min_p": 1.0}, 3000),
    ]
    draws = [Draw(SamplingParams(temperature=1, **params), uniform=0.9999) for params, _ in limits]

    assert choose_ids(device, row, draws) == [math.ceil(0.9999 * count) - 1 for _, count in limits]


def test_a_limit_ends_among_equal_logits_in_several_parts(device: torch.device):
    chance = random.Random(4)
    rows = torch.tensor([chance.choices([-math.inf, 0.0, -0.0, 0.5, 1.0], k=5003) for _ in range(4)]).to(device)
    draws = [
        Draw(SamplingParams(temperature=1, top_k=top_k, top_p=top_p, logprobs=20), uniform=chance.random())
        for top_k, top_p in [(1500, 1.0), (0, 0.6), (3000, 0.8), (990, 0.7)]
    ]

    assert assert_as_defined(rows, draws, launch(rows, draws).read()) >= 3


def test_greedy_takes_the_lowest_id_of_equal_logits_in_several_parts(device: torch.device):
    row = [0.0] * 5003
    for token_id in (4999, 2500, 2501, 4096):
        row[token_id] = 1.0
    draws = [Draw(SamplingParams()), Draw(SamplingParams(), allowed=bits([4096, 4999], 5003))]

    assert choose_ids(device, row, draws) == [2500, 4096]


# The ends of what is allowed


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e6, 1e300])
def test_every_temperature_draws_a_possible_token(device: torch.device, temperature: float):
    row = logs(0.0, 0.5, 0.3, 0.0, 0.2, 0.0)
    draws = [
        Draw(SamplingParams(temperature=temperature, **params), uniform=uniform)
        for params in ({}, {"top_k": 2}, {"top_p": 0.5})
        for uniform in (0.0, 0.5, BELOW_ONE)
    ]

    ids = choose_ids(device, row, draws)

    assert set(ids) <= ({1} if temperature < 1 else {1, 2, 4})
    assert ids[0] == 1


def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last_of_what_is_kept(device: torch.device):
    row = logs(0.0, 0.1, 0.4, 0.0, 0.3, 0.2, 0.0)
    params = SamplingParams(temperature=1, top_k=3)

    assert choose_ids(device, row, [Draw(params, uniform=0.0), Draw(params, uniform=BELOW_ONE)]) == [2, 5]


def test_ids_beyond_the_vocabulary_are_left_out_and_a_short_mask_forbids(device: torch.device):
    row = [float(token_id) for token_id in range(20)]
    params = SamplingParams(repeat_penalty=4.0, logit_bias=((3, 100.0), (20, 100.0), (10**9, 100.0)))
    draws = [
        Draw(params, seen=TokenCounts([19, 20, 10**12, -1])),
        Draw(SamplingParams(), allowed=b"\xff"),
        Draw(SamplingParams(), allowed=b"\xff" * 99),
    ]

    assert choose_ids(device, row, draws) == [3, 7, 19]


# Failures


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 3}])
@pytest.mark.parametrize(
    ("bad", "allowed", "text"),
    [
        ([0.0, math.nan, 1.0], None, NOT_FINITE),
        ([math.inf, 0.0, 1.0], None, NOT_FINITE),
        ([-math.inf] * 3, None, NOT_FINITE),
        ([0.0, math.nan, 1.0], b"\x05", NOT_FINITE),
        ([0.0, 1.0, 2.0], b"\0", NONE_ALLOWED),
        ([0.0, -math.inf, 2.0], b"\x02", NONE_ALLOWED),
    ],
)
def test_a_failed_row_is_told_and_leaves_valid_ids(
    device: torch.device, params: dict[str, float], bad: list[float], allowed: bytes | None, text: str
):
    wanted = SamplingParams(**params)
    rows = torch.tensor([[0.0, 1.0, 90.0], bad, [0.0, 90.0, 1.0]], device=device)

    choices = launch(rows, [Draw(wanted, 0.5), Draw(wanted, 0.5, allowed=allowed), Draw(wanted, 0.5)])

    assert choices.ids.tolist() == [2, 0, 1]
    with pytest.raises(EngineError, match=text):
        choices.read()


# Batches


def test_a_row_has_the_same_token_alone_and_beside_others(device: torch.device):
    rows = torch.randn(6, 3003, generator=torch.Generator().manual_seed(7)).to(device)
    draws = [make_draw(random.Random(seed), 3003) for seed in range(len(rows))]

    together = launch(rows, draws).read()

    assert together == [launch(rows[index : index + 1], [draws[index]]).read()[0] for index in range(len(rows))]


def test_batches_that_were_launched_before_one_is_read_keep_their_own_choices(device: torch.device):
    from bough.engines.torch.pooled.sampling.kernel_sampler import KernelSampler

    sampler = KernelSampler(4, 2, device)
    rows = torch.tensor([logs(0.1, 0.2, 0.3, 0.4)] * 2, device=device)
    params = SamplingParams(temperature=1.0)
    batches = [
        [Draw(params, uniform=0.05), Draw(SamplingParams())],
        [Draw(params, uniform=0.25), Draw(SamplingParams())],  # another number
        [Draw(SamplingParams()), Draw(params, uniform=0.5)],  # other parameters
        [Draw(params, uniform=0.5)],  # a smaller batch
        [Draw(SamplingParams()), Draw(SamplingParams(logprobs=1), allowed=b"\x03")],
        [Draw(SamplingParams())],
    ]

    launched = [sampler.launch(rows[: len(draws)], draws) for draws in batches]

    assert [[each.token_id for each in choices.read()] for choices in launched] == [
        [0, 3],
        [1, 3],
        [3, 2],
        [2],
        [3, 1],
        [3],
    ]
    assert [choices.ids.tolist() for choices in launched] == [[0, 3], [1, 3], [3, 2], [2], [3, 1], [3]]


def test_a_draw_that_asks_for_everything_launches_every_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch):
    from bough.engines.torch.pooled.sampling import kernel_sampler

    launched: set[str] = set()
    kind = type(kernel_sampler.kernels.copy_scores)
    found = {name: each for name, each in vars(kernel_sampler.kernels).items() if isinstance(each, kind)}
    kernels = {name: each for name, each in found.items() if not name.startswith("_")}  # those are parts of others

    class Recorder:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launched.add(self._name)
            return kernels[self._name][grid]

    for name in kernels:
        monkeypatch.setattr(kernel_sampler.kernels, name, Recorder(name))
    params = SamplingParams(temperature=1, top_k=1, top_p=0.5, repeat_penalty=2, logit_bias=((0, 1.0),), logprobs=1)
    draw = Draw(params, seen=TokenCounts([0]), allowed=b"\1")
    kernel_sampler.KernelSampler(9, 2, device).launch(torch.zeros(1, 9, device=device), [draw])

    assert launched == set(kernels) and len(launched) == 11
