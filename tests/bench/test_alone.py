"""Requests alone on the engine: any strategy of reuse answers the same, and the runtime's worker never starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from bough.bench.alone import SingleRequests, warm_up
from bough.bench.strategies import STRATEGIES, make_strategy
from bough.config import Settings
from bough.models import Tokenizer
from bough.runtime import Runtime
from bough.types import Chunk, Completion
from tests.fakes import FakeEngine

PROMPT = list(range(3, 43))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A runtime whose worker cannot be started."""

    def fail(runtime: Runtime) -> None:
        raise AssertionError("the worker would use engine and tree at the same time")

    monkeypatch.setattr(Runtime, "worker", property(fail))
    engine = FakeEngine()
    with closing(Runtime(engine, Tokenizer(None), Settings(lanes=2))) as runtime:
        yield runtime
    assert not engine.live


def test_every_strategy_gives_the_same_answer_and_reuses_what_it_promises(runtime: Runtime) -> None:
    cached, answers = {}, set()
    for name in STRATEGIES:
        strategy = make_strategy(name, runtime)
        alone = SingleRequests(runtime, strategy)
        first, again = [alone.generate(PROMPT, max_tokens=5, ignore_eos=True) for _ in range(2)]
        answers |= {first.token_ids, again.token_ids}
        cached[name] = (first.usage.cached_tokens, again.usage.cached_tokens)
        strategy.clear()

    assert len(answers) == 1
    assert cached == {"tree": (0, 39), "copies": (0, 39), "single": (0, 39), "none": (0, 0)}


def test_a_stream_has_no_empty_pieces_and_ends_with_the_completion(runtime: Runtime) -> None:
    *pieces, completion = SingleRequests(runtime).stream(PROMPT, max_tokens=5, ignore_eos=True)

    assert isinstance(completion, Completion) and len(completion.token_ids) == 5
    assert all(isinstance(piece, Chunk) and piece.token_ids for piece in pieces)
    assert runtime.prefix_cache.lanes.num_busy == 0


def test_warming_up_starts_no_worker(runtime: Runtime) -> None:
    warm_up(runtime)

    assert runtime.prefix_cache.lanes.num_busy == 0
