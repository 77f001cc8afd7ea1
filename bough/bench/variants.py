"""Variants of one model: loaded with different values of the setting `weights`, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from bough.cache.tree.state import Group, GroupSource, Item, Lane
from bough.engines.contract import Engine, Logits
from bough.engines.self_check.checks import keep
from bough.runner import Runner
from bough.runtime import Runtime


@dataclass(frozen=True)
class Variant:
    """A value of the setting `weights`, and the model that was loaded with it."""

    weights: str
    runtime: Runtime

    @property
    def engine(self) -> Engine:
        return self.runtime.engine


@contextmanager
def load_variants(weights: Sequence[str], load: Callable[[str], Runner]) -> Iterator[list[Variant]]:
    """Load a model once for each value; all stay in memory until the end."""
    with ExitStack() as stack:
        yield [Variant(each, stack.enter_context(load(each)).runtime) for each in weights]


def describe_variants(variants: Sequence[Variant]) -> dict[str, Any]:
    """The model, and the description of each engine, by the value of `weights`."""
    files = variants[0].runtime.files
    engines = {variant.weights: variant.engine.describe() for variant in variants}
    return {"model": files.name if files else "random weights", "engines": engines}


def variant_lines(variants: Sequence[Variant]) -> list[str]:
    """A line for each engine, and one for each pair that runs the same way."""
    engines: dict[str, dict[str, str]] = describe_variants(variants)["engines"]
    pairs = [pair for pair in combinations(engines, 2) if engines[pair[0]] == engines[pair[1]]]
    return [
        *(f"{name}: {_describe_engine(each)}" for name, each in engines.items()),
        *(f"the engine runs {one} and {other} the same way: there is nothing to compare" for one, other in pairs),
    ]


def _describe_engine(engine: dict[str, str]) -> str:
    named = [f"{name} {engine[name]}" for name in ("threads", "kernels", "attention", "batching") if name in engine]
    return " · ".join([engine.get("weights") or engine.get("dtype") or "unknown", *named])


class PreparedLane:
    """A lane at the end of a prompt, to which it can be put back any number of times.

    Where the engine can restore a state, that computes nothing; elsewhere the prompt is evaluated again.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int], room_tokens: int) -> None:
        self._engine, self._prompt = engine, prompt
        self._capacity = len(prompt) + room_tokens
        self.lane = engine.make_lane()
        self._kept: dict[Group, GroupSource] | None = None
        self._start()
        if engine.capabilities.can_reuse:
            groups = engine.groups
            self._kept = keep(self.lane, groups) if prompt else {group: GroupSource() for group in groups}

    def put_back(self) -> None:
        """Go back to the end of the prompt, with room for what follows."""
        if self._kept is None:
            self.lane.clear()
            self._start()
        else:
            self.lane.reserve(self._capacity)
            self.lane.adopt(len(self._prompt), self._kept)

    def close(self) -> None:
        for source in (self._kept or {}).values():
            items: list[Item] = [*source.pages, *([source.state] if source.state else [])]
            for item in items:
                self._engine.release(item)
        self.lane.clear()

    def _start(self) -> None:
        self.lane.reserve(self._capacity)
        evaluate_in_runs(self._engine, self.lane, self._prompt)


def evaluate_in_runs(engine: Engine, lane: Lane, ids: Sequence[int]) -> Logits | None:
    """Evaluate ids in the longest runs that the engine takes; returns the logits after the last, None without ids."""
    logits, step = None, engine.max_chunk_tokens
    for start in range(0, len(ids), step):
        logits = engine.evaluate(lane, ids[start : start + step])
    return logits
