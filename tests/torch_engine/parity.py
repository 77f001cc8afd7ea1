"""How far each architecture's logits lie from an uncached forward, by the way the prompt was run.

`python -m tests.torch_engine.parity [cpu | cuda]` prints the table.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bough.config import Settings
from bough.engine import Capabilities
from bough.torch_engine import TorchEngine
from tests.contract.driving import give_back, keep, make_ids, new_lane, rewind, run
from tests.tiny_models import CONFIGS, make_model

LENGTH = 120  # five windows of the tiny models, and two chunks of the recurrent ones
AT = 70


@dataclass(frozen=True)
class Row:
    """One architecture: what the self-check says, and the largest difference of each way."""

    name: str
    kinds: str
    attention: str
    state: str
    capabilities: Capabilities
    differences: dict[str, float]


class Reference:
    """What the model says without a cache, with the attention that its own code defines."""

    def __init__(self, name: str, device: str) -> None:
        self._model = make_model(name).to(device)
        self._model.set_attn_implementation("eager")
        self._device = device

    @torch.inference_mode()
    def __call__(self, ids: list[int]) -> Tensor:
        logits: Tensor = self._model(input_ids=torch.tensor([ids], device=self._device), use_cache=False).logits[0, -1]
        return logits


def chunked(engine: TorchEngine, ids: list[int], branch: list[int]) -> list[tuple[Any, list[int]]]:
    lane = new_lane(engine, LENGTH)
    return [(run(engine, lane, ids, sizes), ids[: lane.offset]) for sizes in ([50, 2], [40, 1, 1], [26])]


def restored(engine: TorchEngine, ids: list[int], branch: list[int]) -> list[tuple[Any, list[int]]]:
    lane = new_lane(engine, LENGTH)
    run(engine, lane, ids, [AT])
    kept = keep(engine, lane)
    lane.clear()
    lane.reserve(LENGTH)
    lane.adopt(AT, kept)
    give_back(engine, kept)
    return [(run(engine, lane, ids, sizes), ids[: lane.offset]) for sizes in ([20], [1, 1], [28])]


def rewound(engine: TorchEngine, ids: list[int], branch: list[int]) -> list[tuple[Any, list[int]]]:
    lane = new_lane(engine, LENGTH)
    run(engine, lane, ids, [AT])
    kept = keep(engine, lane)
    run(engine, lane, branch, [1, 20, 1])
    rewind(engine, lane, AT, kept)
    give_back(engine, kept)
    return [(run(engine, lane, ids, sizes), ids[: lane.offset]) for sizes in ([3], [1], [46])]


def branched(engine: TorchEngine, ids: list[int], branch: list[int]) -> list[tuple[Any, list[int]]]:
    lane, other = new_lane(engine, LENGTH), new_lane(engine, LENGTH)
    run(engine, lane, ids, [AT])
    kept = keep(engine, lane)
    other.adopt(AT, kept)
    found = [(run(engine, other, branch, [50]), branch), (run(engine, lane, ids, [49, 1]), ids)]
    give_back(engine, kept)
    return found


def stepped(engine: TorchEngine, ids: list[int], branch: list[int]) -> list[tuple[Any, list[int]]]:
    """One run and single tokens after it, which every model must get right, reuse or not."""
    lane, other = new_lane(engine, LENGTH), new_lane(engine, LENGTH)
    run(engine, lane, ids, [LENGTH - 3])
    run(engine, other, branch, [LENGTH - 5])
    for _ in range(3):
        logits = engine.step([lane, other], [ids[lane.offset], branch[other.offset]])
    return [(logits[0], ids), (logits[1], branch[: other.offset])]


WAYS: dict[str, Callable[..., list[tuple[Any, list[int]]]]] = {
    "stepped": stepped,
    "chunked": chunked,
    "restored": restored,
    "rewound": rewound,
    "branched": branched,
}


def parity_row(name: str, folder: Path, device: str = "cpu") -> Row:
    """The architecture `name`; ways that the self-check rules out are not run."""
    engine = TorchEngine(make_model(name).to(device), Settings(cache_folder=folder))
    reference = Reference(name, device)
    ids = make_ids(engine, LENGTH, seed=3)
    branch = ids[:AT] + make_ids(engine, LENGTH - AT, seed=4)
    ways = [way for way in WAYS if way == "stepped" or engine.capabilities.can_reuse]
    found = {
        way: max(float((logits - reference(tokens)).abs().max()) for logits, tokens in WAYS[way](engine, ids, branch))
        for way in ways
    }
    said = engine.describe()
    kinds = "+".join(group.kind.value for group in engine.groups)
    return Row(name, kinds or "none", said["attention"], said["state"], engine.capabilities, found)


def parity_table(device: str = "cpu") -> list[Row]:
    """One row for each of the tiny models."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return [parity_row(name, Path(folder), device) for name in CONFIGS]


def main(device: str = "cpu") -> None:
    print(f"{'model':17}{'groups':18}{'attention':11}{'chunk':6}{'reuse':6}" + "".join(f"{way:>10}" for way in WAYS))
    for row in parity_table(device):
        can = row.capabilities
        cells = "".join(f"{row.differences[way]:10.1e}" if way in row.differences else f"{'–':>10}" for way in WAYS)
        yes_no = "".join(f"{'yes' if each else 'no':6}" for each in (can.can_chunk, can.can_reuse))
        print(f"{row.name:17}{row.kinds:18}{row.attention:11}{yes_no}{cells}  {can.reason}")


if __name__ == "__main__":
    main(*sys.argv[1:])
