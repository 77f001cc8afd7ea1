"""Which graph serves a step, and what is told of the warm-up. Nothing is captured here: that needs CUDA."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

from bough.engines.shared.compute import RunResult
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.pooled.graphs import CapturedGraph, Graphs, Passes
from bough.engines.torch.pooled.static_batch import PassSize, StaticBatch
from tests.engines.torch.pooled.parts import Parts, make_ids, make_parts, watching


class Eager:
    """Stands for a captured graph: replaying it computes the pass over the same buffers, into its logits and states."""

    def __init__(self, forward: TorchForward, batch: StaticBatch, logits: torch.Tensor, states: torch.Tensor) -> None:
        self._forward, self._batch, self._logits, self._states = forward, batch, logits, states

    def replay(self) -> None:
        with self._forward.watching_head() as seen:
            self._logits.copy_(self._batch.compute())
        self._states.copy_(seen.states)


def make_batch(parts: Parts, size: PassSize) -> StaticBatch:
    return StaticBatch(parts.forward, parts.layout, parts.memory, parts.wiring, size)


def make_graphs(parts: Parts, *sizes: PassSize, is_compiled: bool = False, num_lanes: int = 32) -> Graphs:
    """Graphs of these sizes, as if they had been captured."""
    graphs = Graphs(parts.forward, lambda size: make_batch(parts, size), num_lanes, is_recurrent=bool(parts.layout.states))
    for size in sizes:
        entries, logits = make_batch(parts, size), torch.zeros(size.entries, 97)
        states = torch.zeros(size.entries, parts.forward.state_size)
        eager = Eager(parts.forward, entries, logits, states)
        graphs.ready[size] = CapturedGraph(entries, eager, logits, is_compiled, states if size.is_run else None)
    return graphs


@pytest.fixture(scope="module")
def llama() -> Parts:
    return make_parts("llama")


def found(graphs: Graphs, num: int, **wanted: Any) -> PassSize | None:
    graph = graphs.find(num, **{"is_run": False, "has_shared": True, **wanted})
    return next((size for size, each in graphs.ready.items() if each is graph), None)


def test_the_smallest_graph_with_room_for_all_entries_is_found(llama: Parts) -> None:
    graphs = make_graphs(llama, PassSize(64), PassSize(1), PassSize(16), PassSize(16, is_run=True))

    assert [found(graphs, num) for num in (1, 2, 16, 17, 64, 65)] == [
        PassSize(1),
        PassSize(16),
        PassSize(16),
        PassSize(64),
        PassSize(64),
        None,
    ]
    assert found(graphs, 9, is_run=True) == PassSize(16, is_run=True)
    assert found(graphs, 17, is_run=True) is None


def test_distinct_lanes_take_the_graph_for_them_unless_a_smaller_one_is_there(llama: Parts) -> None:
    graphs = make_graphs(llama, PassSize(1), PassSize(16), PassSize(16, has_shared=False))

    assert found(graphs, 5, has_shared=False) == PassSize(16, has_shared=False)
    assert found(graphs, 5, has_shared=True) == PassSize(16)
    assert found(graphs, 1, has_shared=False) == PassSize(1)


def test_there_is_no_graph_before_one_is_ready(llama: Parts) -> None:
    assert found(make_graphs(llama), 1) is None


def test_a_size_is_told_in_words() -> None:
    assert [str(size) for size in (PassSize(16), PassSize(16, has_shared=False), PassSize(64, is_run=True))] == [
        "16 lanes",
        "16 distinct lanes",
        "64 tokens of a run",
    ]


@pytest.mark.parametrize(
    ("name", "num_lanes", "sizes"),
    [
        ("llama", 1, ["1 lanes", *[f"{tokens} tokens of a run" for tokens in (32, 16, 64, 256)]]),
        ("qwen3_next", 16, ["1 lanes", "16 lanes", "16 distinct lanes"]),
        ("qwen3_next", 64, ["1 lanes", "16 lanes", "16 distinct lanes", "64 lanes", "32 lanes"]),
    ],
)
def test_graphs_are_made_for_as_many_lanes_as_there_are_and_for_runs_without_states(
    name: str, num_lanes: int, sizes: list[str]
) -> None:
    graphs = make_graphs(make_parts(name), num_lanes=num_lanes)

    assert [str(size) for size in graphs._sizes()] == sizes


def test_the_state_of_the_warm_up_is_told_in_words(llama: Parts) -> None:
    graphs = make_graphs(llama)
    assert graphs.describe() == "eager, warming up"

    graphs = make_graphs(llama, PassSize(1), PassSize(16))
    assert graphs.describe() == "graph (2 graphs), warming up"
    graphs._took_s = 18.7
    graphs._done.set()
    assert graphs.describe() == "graph (2 graphs), ready after 19 s"
    graphs.problems.append("layers are not compiled: they read a mask")
    assert graphs.describe() == "graph (2 graphs), ready after 19 s; layers are not compiled: they read a mask"

    assert make_graphs(llama, PassSize(1), is_compiled=True).describe() == "compiled + graph (1 graphs), warming up"


@pytest.mark.skipif(torch.cuda.is_available(), reason="graphs can be made here")
def test_a_warm_up_that_cannot_even_begin_is_over_and_tells_why(llama: Parts, caplog: pytest.LogCaptureFixture) -> None:
    graphs = make_graphs(llama)

    with caplog.at_level(logging.WARNING):
        graphs.start(lambda: None)
        assert graphs.wait(10)

    graphs.close()
    assert graphs.describe().startswith("eager, ready after 0 s; nothing is made ready: ")
    assert "nothing is made ready: " in caplog.text
    assert not any(thread.name == "bough-graphs" for thread in threading.enumerate())


def test_steps_and_runs_go_by_the_graphs_that_are_ready_and_give_the_same(llama: Parts) -> None:
    texts = [make_ids(9), make_ids(30, seed=1)]
    lanes = [llama.lane(300, ids) for ids in texts]
    passes: Passes = llama.pool.passes
    passes.graphs = make_graphs(llama, PassSize(1), PassSize(16, has_shared=False), PassSize(16, is_run=True))
    try:
        with watching(llama) as seen:
            logits = llama.compute.step(lanes, [5, 6])
            run = llama.compute.evaluate(lanes[0], [7, 8, 9])
            chosen = llama.sample(run)
            last = llama.compute.step(lanes[:1], chosen)
            sampled = logits[1].clone()
        assert seen.shapes == [(16, 1), (16, 1), (1, 1)]
    finally:
        passes.graphs = None

    assert llama.is_answer(sampled, [*texts[1], 6])
    assert llama.is_answer(run, [*texts[0], 5, 7, 8, 9])
    assert llama.is_answer(last[0], [*texts[0], 5, 7, 8, 9, *chosen])


def test_the_last_hidden_state_of_a_short_run_comes_from_a_graph_that_is_ready(llama: Parts) -> None:
    ids = make_ids(9, seed=3)
    expected = llama.compute.run(llama.lane(300), ids, RunResult.LAST_STATE)
    passes: Passes = llama.pool.passes
    passes.graphs = make_graphs(llama, PassSize(16, is_run=True))
    try:
        lane = llama.lane(300)
        with watching(llama) as seen:
            state = llama.compute.run(lane, ids, RunResult.LAST_STATE)
        assert seen.shapes == [(16, 1)]
        assert lane.offset == len(ids)
    finally:
        passes.graphs = None

    assert torch.allclose(state, expected, atol=1e-5)


def test_lanes_on_one_prefix_do_not_take_a_graph_for_distinct_lanes(llama: Parts) -> None:
    ids = make_ids(20)
    first, second = llama.lane(300, ids), llama.lane(300)
    kept = llama.keep(first)
    second.adopt(20, kept)
    llama.release(kept)
    passes: Passes = llama.pool.passes
    passes.graphs = make_graphs(llama, PassSize(16, has_shared=False))
    try:
        with watching(llama) as seen:
            logits = llama.compute.step([first, second], [5, 6])
    finally:
        passes.graphs = None

    assert seen.shapes == [(2, 1)]
    assert llama.is_answer(logits[0], [*ids, 5])
    assert llama.is_answer(logits[1], [*ids, 6])
