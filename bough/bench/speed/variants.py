"""Variants to run one model: the same model loaded with different values of the setting `weights`, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations

from bough.cache.tree.state import Group, Item, Lane, Source
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


def describe_variants(variants: Sequence[Variant]) -> dict[str, dict[str, str]]:
    """What each engine says of itself, by the value of `weights`."""
    return {variant.weights: variant.engine.describe() for variant in variants}


def find_equal_variants(variants: Sequence[Variant]) -> list[str]:
    """A sentence for each two variants that their engines describe alike: there is nothing to compare."""
    told = describe_variants(variants)
    pairs = [pair for pair in combinations(told, 2) if told[pair[0]] == told[pair[1]]]
    return [f"the engine runs {one} and {other} the same way: there is nothing to compare" for one, other in pairs]


class PreparedLane:
    """A lane that stands on a prompt, and can be put back to its end any number of times.

    Where the engine can restore a state, putting it back takes no computing; elsewhere the prompt is evaluated again.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int], room_tokens: int) -> None:
        self._engine, self._prompt = engine, prompt
        self._capacity = len(prompt) + room_tokens
        self.lane = engine.make_lane()
        self._kept: dict[Group, Source] | None = None
        self._start()
        if engine.capabilities.can_reuse:
            groups = engine.groups
            self._kept = keep(self.lane, groups) if prompt else {group: Source() for group in groups}

    def put_back(self) -> None:
        """Stand at the end of the prompt again, with room for what follows."""
        if self._kept is None:
            self.lane.clear()
            self._start()
        else:
            self.lane.reserve(self._capacity)
            self.lane.adopt(len(self._prompt), self._kept)

    def close(self) -> None:
        """Release everything."""
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
