"""Static buffers of a step: filled by any lanes one after the other, padded, and tried out on numbers of no lane."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from bough.engines.torch.pooled import static_batch as module
from bough.engines.torch.pooled.attention.buffers import HostNumbers
from bough.engines.torch.pooled.lane import PooledTorchLane
from bough.engines.torch.pooled.static_batch import PassSize, StaticBatch
from tests.engines.torch.pooled.parts import Parts, make_ids, make_parts

NAMES = ("llama", "gemma3_text", "gpt_oss", "qwen3_next")


@pytest.fixture(scope="module", params=NAMES)
def made(request: pytest.FixtureRequest) -> Parts:
    return make_parts(request.param)


@pytest.fixture
def parts(made: Parts) -> Iterator[Parts]:
    for group in made.row_groups:
        made.memory.probe_slots(group)
    with made.empty_afterwards() as parts:
        yield parts


def make_batch(parts: Parts, size: int, *, is_run: bool = False, has_shared: bool = True) -> StaticBatch:
    return StaticBatch(parts.forward, parts.layout, parts.memory, parts.wiring, PassSize(size, is_run, has_shared))


def step(batch: StaticBatch, lanes: list[PooledTorchLane], ids: list[int] | Tensor) -> Tensor:
    """One step as an engine computes it."""
    for lane in lanes:
        lane.begin_run(1)
    batch.set_lanes(lanes, ids)
    logits = batch.compute()
    for lane in lanes:
        lane.end_step()
    return logits


def test_buffers_serve_any_lanes_one_after_the_other(parts: Parts) -> None:
    batch = make_batch(parts, 8)
    texts = [make_ids(length, seed=length) for length in (3, 254, 30, 12, 9)]
    lanes = [parts.lane(300, ids) for ids in texts]

    for chosen in ([0, 1, 2, 3, 4], [1], [4, 1, 0], [4, 1, 0], [2, 3]):
        tokens = [20 + number for number in chosen]
        logits = step(batch, [lanes[number] for number in chosen], tokens)
        assert logits.shape == (8, 97)
        for place, number in enumerate(chosen):
            texts[number].append(tokens[place])
            assert parts.is_answer(logits[place], texts[number])


def test_padding_stands_at_the_first_position_whatever_was_there_before(parts: Parts) -> None:
    """Some models compute a whole batch for its largest position."""
    batch = make_batch(parts, 4)
    lanes = [parts.lane(300, make_ids(length)) for length in (30, 20, 10, 5)]
    step(batch, lanes, [5, 6, 7, 8])

    step(batch, lanes[3:], [9])

    assert batch.positions[:, 0].tolist() == [6, 0, 0, 0]


def test_tokens_may_lie_on_the_device(parts: Parts) -> None:
    lanes = [parts.lane(300, make_ids(5)), parts.lane(300, make_ids(7))]

    logits = step(make_batch(parts, 4), lanes, torch.tensor([8, 9]))

    assert parts.is_answer(logits[0], [*make_ids(5), 8])
    assert parts.is_answer(logits[1], [*make_ids(7), 9])


@pytest.mark.parametrize("has_shared", [True, False])
def test_distinct_lanes_come_out_the_same_with_and_without_room_for_shared_rows(parts: Parts, has_shared: bool) -> None:
    texts = [make_ids(length, seed=length) for length in (3, 280, 30)]
    lanes = [parts.lane(300, ids) for ids in texts]

    logits = step(make_batch(parts, 4, has_shared=has_shared), lanes, [4, 5, 6])

    for row, ids, token_id in zip(logits, texts, (4, 5, 6), strict=False):
        assert parts.is_answer(row, [*ids, token_id])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen3_next"])
def test_a_run_as_entries_gives_the_logits_after_each_token(name: str) -> None:
    parts = make_parts(name)
    ids, more = make_ids(250), make_ids(11, seed=2)
    lane = parts.lane(300, ids)
    batch = make_batch(parts, 16, is_run=True)
    lane.begin_run(len(more))

    batch.set_run(lane, more)
    logits = batch.compute()
    lane.end_short_run(len(more))

    for number, row in enumerate(logits[: len(more)], start=1):
        assert parts.is_answer(row, [*ids, *more[:number]])
    assert parts.is_answer(parts.compute.step([lane], [5])[0], [*ids, *more, 5])


def test_a_plan_is_made_again_only_when_a_lane_needs_another_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_parts("llama")
    made_at: list[list[int]] = []
    make_plan = module.make_plan

    def noting(lanes: object, offsets: list[int], shape: object) -> object:
        made_at.append(list(offsets))
        return make_plan(lanes, offsets, shape)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "make_plan", noting)
    batch, lanes = make_batch(parts, 2), [parts.lane(300, make_ids(250)), parts.lane(300, make_ids(9))]

    for _ in range(10):
        step(batch, lanes, [5, 6])
    step(batch, lanes[::-1], [5, 6])

    assert made_at == [[250, 9], [256, 15], [19, 260]]


@pytest.mark.parametrize(("size", "is_run"), [(1, False), (16, False), (16, True)])
def test_a_pass_is_tried_out_without_touching_any_lane(parts: Parts, size: int, is_run: bool) -> None:
    if is_run and parts.layout.states:
        pytest.skip("a run of entries cannot follow states")
    ids = make_ids(20)
    lane, used = parts.lane(300, ids), parts.arena.used_bytes
    kept = parts.keep(lane)
    batch = make_batch(parts, size, is_run=is_run)

    batch.set_probe()
    first = batch.compute().clone()
    again = batch.compute()

    assert batch.num_probed == min(size, 3)
    assert bool(first[: batch.num_probed].isfinite().all())
    assert torch.equal(first[: batch.num_probed], again[: batch.num_probed])
    assert parts.is_answer(step(make_batch(parts, 1), [lane], [5])[0], [*ids, 5])
    parts.release(kept)
    assert parts.arena.used_bytes == used


def test_a_probe_without_room_for_shared_rows_is_one_of_distinct_lanes() -> None:
    parts = make_parts("llama")
    for group in parts.row_groups:
        parts.memory.probe_slots(group)
    batch = make_batch(parts, 16, has_shared=False)

    batch.set_probe()

    assert bool(batch.compute()[: batch.num_probed].isfinite().all())


def test_numbers_reach_their_tensor_in_turns_and_leave_the_rest() -> None:
    target = torch.full((4, 1), -1)
    numbers = HostNumbers(target)

    for count in (4, 2, 3, 1, 2):
        numbers.put([count] * count)

    assert target[:, 0].tolist() == [2, 2, 3, 4]
