"""The memory of a pool: slots of several sizes in one piece, seen by layers, by pages and by states."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bough.cache.tree.state import PAGE_TOKENS, Group
from bough.engines.shared.pool.arena import ArenaFull, ArenaSlot
from bough.engines.shared.pool.slot_rows import SlotRows
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.layout import TorchLayout
from bough.engines.torch.pooled.memory import PROBE_SLOTS, PoolMemory, can_pool, why_not_pooled
from bough.engines.torch.self_check.probe import probe
from tests.tiny_models import make_model

CPU = torch.device("cpu")
BUDGET_BYTES = 4 << 20


def layout_of(name: str, dtype: torch.dtype = torch.float32) -> TorchLayout:
    torch.set_num_threads(1)
    return probe(TorchForward(make_model(name).to(dtype)))


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_next", "falcon_h1"])
def layout(request: pytest.FixtureRequest) -> TorchLayout:
    return layout_of(request.param)


def take_all(memory: PoolMemory, groups: list[Group]) -> list[ArenaSlot]:
    """All slots, of the groups in turns."""
    slots: list[ArenaSlot] = []
    while True:
        try:
            slots.append(memory.arena.take(groups[len(slots) % len(groups)]))
        except ArenaFull:
            return slots
        memory.arena.add_page(slots[-1])


def test_slots_of_all_groups_lie_apart_in_one_piece_of_memory(layout: TorchLayout) -> None:
    memory = PoolMemory(layout, CPU, BUDGET_BYTES)
    slots = take_all(memory, list(layout.groups))

    for number, slot in enumerate(slots):
        memory.slot_bytes(slot).fill_(number % 251)

    assert len({(slot.kind, slot.index) for slot in slots}) == len(slots) > 8
    for number, slot in enumerate(slots):
        assert bool((memory.slot_bytes(slot) == number % 251).all())
    memory.arena.check()


def test_a_pool_holds_what_its_budget_promises_whatever_mixture_of_groups_asks_for_it(layout: TorchLayout) -> None:
    for groups in (list(layout.groups), *[[group] for group in layout.groups]):
        memory = PoolMemory(layout, CPU, BUDGET_BYTES)
        probed = PROBE_SLOTS * sum(memory.arena.slot_bytes(group) for group in layout.groups)
        for_good = memory.arena.used_bytes

        slots = take_all(memory, groups)

        assert sum(slot.nbytes for slot in slots) >= BUDGET_BYTES
        assert memory.nbytes >= BUDGET_BYTES + probed
        assert memory.arena.used_bytes == for_good + sum(slot.nbytes for slot in slots) <= memory.nbytes


def test_a_large_pool_stays_within_its_budget(layout: TorchLayout) -> None:
    budget = 64 * PoolMemory(layout, CPU, BUDGET_BYTES).arena.chunk_bytes

    assert budget - 1 < PoolMemory(layout, CPU, budget - 1).nbytes
    assert PoolMemory(layout, CPU, budget).nbytes == budget
    assert PoolMemory(layout, CPU, budget + 1).nbytes == budget


def test_rows_are_the_same_seen_as_a_layer_as_a_page_and_as_bytes(layout: TorchLayout) -> None:
    memory = PoolMemory(layout, CPU, BUDGET_BYTES)
    for group, rows in layout.rows.items():
        memory.arena.take(group)  # so that the next is not the first
        slot = memory.arena.take(group)
        for place in range(len(rows.layers)):
            layer = memory.layer_rows(group, place)[slot.index]
            for plane in (0, 1):
                layer[plane, :, 7] = 100 * place + plane + 1

        page = memory.view(SlotRows(slot, 3 * PAGE_TOKENS + 5, 3 * PAGE_TOKENS + 9))
        whole = memory.slot_bytes(slot).view(rows.dtype).view(2, len(rows.layers), rows.heads, PAGE_TOKENS, rows.key_dim)

        assert page.shape == (2 * len(rows.layers), rows.heads, 4, rows.key_dim)
        for place in range(len(rows.layers)):
            for plane in (0, 1):
                assert bool((page[plane * len(rows.layers) + place, :, 2] == 100 * place + plane + 1).all())
                assert bool((whole[plane, place, :, 7] == 100 * place + plane + 1).all())


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2"])
def test_the_parts_of_a_state_lie_in_its_slot_one_after_the_other(name: str) -> None:
    layout = layout_of(name)
    memory = PoolMemory(layout, CPU, BUDGET_BYTES)
    for group, state in layout.states.items():
        memory.arena.take(group)
        slot = memory.arena.take(group)
        own = memory.slot_bytes(slot, state.nbytes)
        for number, part in enumerate(state.parts):
            part.view(own).fill_(number + 1)

        for number, part in enumerate(state.parts):
            everywhere = memory.state_part(group, part)
            assert everywhere.shape == (memory.arena.num_slots(group), *part.shape[1:])
            assert bool((everywhere[slot.index] == number + 1).all())
        assert memory.arena.slot_bytes(group) >= state.nbytes


def test_slots_that_belong_to_no_lane_are_taken_once() -> None:
    layout = layout_of("qwen3_next")
    memory = PoolMemory(layout, CPU, BUDGET_BYTES)
    (state,), (rows,) = layout.states, layout.rows
    blank, spare, probes = memory.blank[state], memory.spare[state], memory.probe_slots(rows)
    used = memory.arena.used_bytes

    assert memory.blank[state] is blank and memory.spare[state] is spare is not blank
    assert not bool(memory.slot_bytes(blank).any())
    assert memory.probe_slots(rows) == probes
    assert len(set(probes)) == PROBE_SLOTS
    assert memory.arena.used_bytes == used == 2 * blank.nbytes + PROBE_SLOTS * memory.arena.slot_bytes(rows)
    for index in probes:
        assert 0.5 < float(memory.rows[rows][index].std()) < 2


def test_a_model_whose_rows_do_not_fit_the_kernels_is_told_why() -> None:
    full = layout_of("llama", torch.bfloat16)
    (group,), (rows,) = full.rows, full.rows.values()

    def reason(**changes: object) -> str:
        return why_not_pooled(replace(full, rows={group: replace(rows, **changes)}))  # type: ignore[arg-type]

    assert why_not_pooled(full) == ""
    assert reason(value_dim=32) == "keys have 16 numbers and values 32"
    assert reason(key_dim=20, value_dim=20) == "a head of 20 numbers is not a multiple of 8 from 16 to 256"
    assert reason(key_dim=264, value_dim=264) == "a head of 264 numbers is not a multiple of 8 from 16 to 256"
    assert reason(dtype=torch.float32, computed=torch.float32) == "rows are float32, not bfloat16 or float16"
    assert reason(dtype=torch.uint8) == "its rows are kept in int8"
    assert why_not_pooled(layout_of("llama"), is_test=True) == ""
    assert why_not_pooled(layout_of("mamba2"), is_test=True) == "the model has no rows of attention"
    assert why_not_pooled(replace(full, rows={}, unknown="a strange cache")) == "a strange cache"


def test_there_are_kernels_on_cuda_in_half_precision_only() -> None:
    cuda = torch.device("cuda")

    assert not can_pool(CPU, torch.bfloat16)
    assert not can_pool(cuda, torch.float32)
