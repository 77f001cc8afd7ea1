"""The whole step: a lane's logits depend on that lane alone, and a run on its tokens, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bough.cache.tree.state import Lane
from bough.engines.shared.compute import RunResult
from bough.engines.torch import TorchEngine
from bough.errors import EngineError
from tests.contract.driving import give_back, keep, make_ids, new_lane, rewind, run
from tests.packed_models import differs_by, load_packed, make_reference, make_state_reference, make_wide_model, save_model

pytestmark = pytest.mark.usefixtures("kernels")

TOLERANCE = 1e-4
LENGTH = 700  # longer than one call takes, than many windows, and than a segment of attention
NO_TOKEN = 10_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    model = make_wide_model("gemma3_text", num_hidden_layers=len(layers), layer_types=layers)
    return save_model(model, tmp_path_factory.mktemp("step") / "model")


@pytest.fixture(scope="module")
def engine(folder: Path) -> TorchEngine:
    engine = load_packed(folder, threads=2)
    assert engine.describe()["step"].startswith("whole, in one call"), engine.describe()["step"]
    return engine


@pytest.fixture(scope="module")
def wanted(engine: TorchEngine, folder: Path) -> Tensor:
    """All logits of the usual ids, by transformers without a cache."""
    return make_reference(folder)(make_ids(engine, LENGTH))


def lanes_at(engine: TorchEngine, offsets: list[int]) -> list[Lane]:
    """Lanes of these lengths, each with tokens of its own."""
    lanes = [new_lane(engine, offset + 10) for offset in offsets]
    for i, lane in enumerate(lanes):
        if offsets[i]:
            run(engine, lane, make_ids(engine, offsets[i], seed=i), [offsets[i]])
    return lanes


def step_often(engine: TorchEngine, lanes: list[Lane], num: int = 3) -> list[list[Tensor]]:
    return [list(engine.step(lanes, [7 + i for i in range(len(lanes))])) for _ in range(num)]


OFFSETS = [5, 0, 130, 300, 24, 23, 127, 128, 1]


@pytest.mark.parametrize("num_lanes", range(2, 10))
def test_a_lane_has_the_same_bits_alone_and_among_others(num_lanes: int, engine: TorchEngine) -> None:
    together = step_often(engine, lanes_at(engine, OFFSETS[:num_lanes]))
    alone = lanes_at(engine, OFFSETS[:num_lanes])

    for i, lane in enumerate(alone):
        for step in together:
            (logits,) = engine.step([lane], [7 + i])
            assert torch.equal(logits, step[i])


def test_the_number_of_threads_changes_no_bit(folder: Path) -> None:
    def everything(num_threads: int) -> list[Tensor]:
        engine = load_packed(folder, threads=num_threads)
        lanes = lanes_at(engine, OFFSETS)
        scored = new_lane(engine, 100)
        rows = engine._compute.run(scored, make_ids(engine, 100), RunResult.ALL_LOGITS)
        return [rows, *(logits for step in step_often(engine, lanes) for logits in step)]

    one, two, five = map(everything, (1, 2, 5))

    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one, two, five, strict=True))


@pytest.mark.parametrize(
    "sizes",
    [[700], [512, 188], [513, 187], [1] * 700, [16, 17, 64, 65, 1, 1, 300, 236], [7] * 100],
    ids=lambda sizes: len(sizes),
)
def test_a_run_in_pieces_of_any_size_gives_the_logits_of_one_forward_pass(
    sizes: list[int], engine: TorchEngine, wanted: Tensor
) -> None:
    ids = make_ids(engine, LENGTH)
    lane = new_lane(engine, LENGTH)
    for size in sizes:
        logits = run(engine, lane, ids, [size])

        assert differs_by(logits, wanted[lane.offset - 1]) <= TOLERANCE
    assert lane.offset == LENGTH


def test_every_row_of_a_scored_run_is_that_of_one_forward_pass(engine: TorchEngine, wanted: Tensor) -> None:
    ids = make_ids(engine, LENGTH)
    lane = new_lane(engine, LENGTH)
    run(engine, lane, ids, [30])

    scored = engine.evaluate_scored(lane, ids[30:], ids[31:], 0)

    chances = wanted.log_softmax(-1)
    found = torch.tensor([each.logprob for each in scored.scores])
    assert float((found - chances[torch.arange(30, LENGTH - 1), ids[31:]]).abs().max()) <= TOLERANCE
    assert differs_by(scored.logits, wanted[-1]) <= TOLERANCE


def test_the_last_hidden_state_after_several_calls_is_that_of_one_forward_pass(engine: TorchEngine, folder: Path) -> None:
    ids = make_ids(engine, LENGTH)
    lane = new_lane(engine, LENGTH)
    run(engine, lane, ids, [30])

    state = torch.tensor(engine.evaluate_state(lane, ids[30:]))

    wanted = make_state_reference(folder)(ids)[-1]
    assert float((state - wanted).norm()) <= 1e-5 * float(wanted.norm())


@pytest.mark.parametrize("at", [20, 200, 600])
def test_a_restored_lane_has_the_bits_of_one_that_was_never_stored(at: int, engine: TorchEngine) -> None:
    ids = make_ids(engine, LENGTH)
    stayed, restored = new_lane(engine, LENGTH), new_lane(engine, LENGTH)
    run(engine, stayed, ids, [at])
    kept = keep(engine, stayed)
    restored.adopt(at, kept)
    give_back(engine, kept)

    for size in (1, 1, 40, 1):
        assert torch.equal(run(engine, restored, ids, [size]), run(engine, stayed, ids, [size]))


def test_a_rewound_lane_goes_on_as_if_nothing_had_followed(engine: TorchEngine, wanted: Tensor) -> None:
    ids = make_ids(engine, LENGTH)
    lane = new_lane(engine, LENGTH)
    run(engine, lane, ids, [100])
    kept = keep(engine, lane)
    run(engine, lane, make_ids(engine, 300, seed=1), [150, 1])
    rewind(engine, lane, 100, kept)
    give_back(engine, kept)

    assert differs_by(run(engine, lane, ids, [1, 50, 1]), wanted[151]) <= TOLERANCE


CALLS: dict[str, Callable[[TorchEngine, Lane, list[int]], object]] = {
    "evaluate": lambda engine, lane, ids: engine.evaluate(lane, ids),
    "evaluate_scored": lambda engine, lane, ids: engine.evaluate_scored(lane, ids, ids[1:], 0),
    "evaluate_state": lambda engine, lane, ids: engine.evaluate_state(lane, ids),
    "step": lambda engine, lane, ids: engine.step([lane], ids[-1:]),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_token_that_does_not_exist_leaves_the_lane_where_it_was(call: str, engine: TorchEngine, wanted: Tensor) -> None:
    """Even if it is the last of a run that takes several calls of the kernels."""
    ids = make_ids(engine, LENGTH)
    lane = new_lane(engine, LENGTH)
    run(engine, lane, ids, [50])

    with pytest.raises(EngineError, match=r"IndexError: token ids from .* to 10000, and the embedding has 97 rows"):
        CALLS[call](engine, lane, [*ids[50:600], NO_TOKEN])

    assert lane.offset == 50
    assert differs_by(run(engine, lane, ids, [30]), wanted[79]) <= TOLERANCE


def test_lanes_at_positions_far_apart_share_a_step(engine: TorchEngine) -> None:
    """The table of rotations grows while it is used."""
    near, far = lanes_at(engine, [3, 1_500])
    (alone,) = engine.step([lanes_at(engine, [3])[0]], [7])

    first, _ = engine.step([near, far], [7, 8])

    assert torch.equal(first, alone)
