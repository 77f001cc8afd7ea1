"""How far each architecture's logits lie from an uncached forward, by the way the prompt was run, on each engine.

`python -m tests.contract.parity [torch | cuda | mlx | bf16 | q8_0 | q4_0]` prints the table. What they are compared with is
the engine's own library without a cache; MLX's answer without a cache is compared with transformers', too, on the same
weights. The last three are the torch engine with packed weights, compared with the same weights unpacked.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bough.config import Settings
from bough.engines.contract import Capabilities, Engine
from bough.engines.torch import TorchEngine
from tests.contract.driving import give_back, keep, make_ids, new_lane, rewind, run
from tests.packed_models import (
    load_packed,
    make_reference,
    make_state_reference,
    make_wide_model,
    pack_in_blocks,
    save_model,
    unpack_model,
)
from tests.tiny_models import CONFIGS, ON_MLX, make_model

LENGTH = 120  # five windows of the tiny models, and two chunks of the recurrent ones
AT = 70
WITHOUT_REUSE = {"mamba", "jamba", "minimax", "recurrent_gemma", "nemotron_h"}


@dataclass(frozen=True)
class Row:
    """One architecture: what the self-check says, and the largest difference of each way.

    `spread` is that of the reference's logits, `own_difference` the largest between any way and one run of the same engine.
    `state_difference` is that of the last hidden state, as a share of its norm.
    """

    name: str
    kinds: str
    state: str
    step: str
    capabilities: Capabilities
    differences: dict[str, float]
    spread: float
    own_difference: float
    state_difference: float


@dataclass(frozen=True)
class Pair:
    """An engine, and what the same model says after some tokens without any cache: logits, and the last hidden state."""

    engine: Any
    reference: Callable[[list[int]], Any]
    state: Callable[[list[int]], Any]


def torch_pair(name: str, folder: Path, device: str = "cpu") -> Pair:
    """The reference runs the attention that the model's own code defines."""
    model = _make_eager(name, device)

    @torch.inference_mode()
    def reference(ids: list[int]) -> Any:
        return model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -1]

    engine = TorchEngine(make_model(name).to(device), Settings(cache_folder=folder))
    return Pair(engine, reference, torch_state(name, device))


def _make_eager(name: str, device: str) -> Any:
    model = make_model(name).to(device)
    model.set_attn_implementation("eager")
    return model


def torch_state(name: str, device: str = "cpu") -> Callable[[list[int]], Any]:
    """The last hidden state of transformers' own model, without its head."""
    model = _make_eager(name, device).base_model

    @torch.inference_mode()
    def state(ids: list[int]) -> Any:
        return model(input_ids=torch.tensor([ids], device=device), use_cache=False).last_hidden_state[0, -1]

    return state


def packed_pair(name: str, folder: Path, weights: str) -> Pair:
    """The model is saved in bfloat16 where that is kept as it is, else in float32."""
    dtype = torch.bfloat16 if weights == "packed" else torch.float32
    saved = save_model(make_wide_model(name), folder / name / "model", dtype)
    compute, compute_state = make_reference(saved, weights), make_state_reference(saved, weights)
    return Pair(load_packed(saved, weights), lambda ids: compute(ids)[-1], lambda ids: compute_state(ids)[-1])


def kept_pair(name: str, folder: Path, kv: str, weights: str = "float32") -> Pair:
    """A model whose rows are kept in a type, and the same engine without reuse: each prompt in one run of its own."""
    saved = save_model(make_wide_model(name), folder / name / "model", torch.float32)
    engine = load_packed(saved, weights, kv=kv)
    assert engine.describe().get("kv", kv).startswith(kv)

    def state(ids: list[int]) -> Any:
        return torch.tensor(engine.evaluate_state(new_lane(engine, LENGTH), ids))

    return Pair(engine, lambda ids: at_once(engine, ids), state)


def mlx_pair(name: str, folder: Path) -> Pair:
    import mlx.core as mx  # only where MLX is

    from bough.engines.mlx import MlxEngine
    from tests.tiny_mlx_models import make_loaded

    loaded = make_loaded(name)
    return Pair(
        MlxEngine(loaded, Settings(device="cpu", cache_folder=folder)),
        lambda ids: loaded.model(mx.array([ids]))[0, -1],
        torch_state(name),
    )


PAIRS: dict[str, Callable[[str, Path], Pair]] = {
    "torch": torch_pair,
    "cuda": lambda name, folder: torch_pair(name, folder, "cuda"),
    "mlx": mlx_pair,
    "bf16": lambda name, folder: packed_pair(name, folder, "packed"),
    "q8_0": lambda name, folder: packed_pair(name, folder, "q8_0"),
    "q4_0": lambda name, folder: packed_pair(name, folder, "q4_0"),
}
PACKED = ("bf16", "q8_0", "q4_0")


def chunked(engine: Engine, ids: list[int], branch: list[int]) -> list[tuple[Any, list[int]]]:
    lane = new_lane(engine, LENGTH)
    return [(run(engine, lane, ids, sizes), ids[: lane.offset]) for sizes in ([50, 2], [40, 1, 1], [26])]


def restored(engine: Engine, ids: list[int], branch: list[int]) -> list[tuple[Any, list[int]]]:
    lane = new_lane(engine, LENGTH)
    run(engine, lane, ids, [AT])
    kept = keep(engine, lane)
    lane.clear()
    lane.reserve(LENGTH)
    lane.adopt(AT, kept)
    give_back(engine, kept)
    return [(run(engine, lane, ids, sizes), ids[: lane.offset]) for sizes in ([20], [1, 1], [28])]


def rewound(engine: Engine, ids: list[int], branch: list[int]) -> list[tuple[Any, list[int]]]:
    lane = new_lane(engine, LENGTH)
    run(engine, lane, ids, [AT])
    kept = keep(engine, lane)
    run(engine, lane, branch, [1, 20, 1])
    rewind(engine, lane, AT, kept)
    give_back(engine, kept)
    return [(run(engine, lane, ids, sizes), ids[: lane.offset]) for sizes in ([3], [1], [46])]


def branched(engine: Engine, ids: list[int], branch: list[int]) -> list[tuple[Any, list[int]]]:
    lane, other = new_lane(engine, LENGTH), new_lane(engine, LENGTH)
    run(engine, lane, ids, [AT])
    kept = keep(engine, lane)
    other.adopt(AT, kept)
    found = [(run(engine, other, branch, [50]), branch), (run(engine, lane, ids, [49, 1]), ids)]
    give_back(engine, kept)
    return found


def stepped(engine: Engine, ids: list[int], branch: list[int]) -> list[tuple[Any, list[int]]]:
    """One run and single tokens after it, which every model must get right, reuse or not."""
    lane, other = new_lane(engine, LENGTH), new_lane(engine, LENGTH)
    run(engine, lane, ids, [LENGTH - 3])
    run(engine, other, branch, [LENGTH - 5])
    for _ in range(3):
        logits = engine.step([lane, other], [ids[lane.offset], branch[other.offset]])
    return [(logits[0], ids), (logits[1], branch[: other.offset])]


def at_once(engine: Engine, ids: list[int]) -> Any:
    """The logits after `ids`, of one run in an empty lane."""
    return run(engine, new_lane(engine, LENGTH), ids, [len(ids)])


def states(engine: Engine, ids: list[int]) -> list[list[float]]:
    """The last hidden state after `ids`: at once, and in the other ways that the self-check allows."""
    found = [engine.evaluate_state(new_lane(engine, LENGTH), ids)]
    if engine.capabilities.can_chunk:
        lane = new_lane(engine, LENGTH)
        run(engine, lane, ids, [50, 1])
        found.append(engine.evaluate_state(lane, ids[51:]))
    if engine.capabilities.can_reuse:
        lane, other = new_lane(engine, LENGTH), new_lane(engine, LENGTH)
        run(engine, lane, ids, [AT])
        kept = keep(engine, lane)
        other.adopt(AT, kept)
        give_back(engine, kept)
        run(engine, other, ids, [LENGTH - AT - 1])
        found.append(engine.evaluate_state(other, ids[-1:]))
    return found


def state_difference(pair: Pair, ids: list[int]) -> float:
    """The largest difference of the last hidden state in any of these ways, as a share of its norm."""
    wanted = np.array(pair.state(ids).tolist())
    found = [np.array(state) for state in states(pair.engine, ids)]
    return max(float(np.linalg.norm(each - wanted) / np.linalg.norm(wanted)) for each in found)


WAYS: dict[str, Callable[..., list[tuple[Any, list[int]]]]] = {
    "stepped": stepped,
    "chunked": chunked,
    "restored": restored,
    "rewound": rewound,
    "branched": branched,
}


def block_pair(name: str, folder: Path, type_name: str, columns: int) -> Pair:
    """A model of this width whose matrices are random blocks of a type, and the same one with float weights."""
    heads = {"num_attention_heads": columns // 64, "num_key_value_heads": columns // 256 + columns // 576, "head_dim": 64}
    shape = {"hidden_size": columns, "intermediate_size": columns, **heads}
    model, plain = make_wide_model(name, **shape), make_wide_model(name, **shape)
    choice = pack_in_blocks(model, type_name)
    pack_in_blocks(plain, type_name)
    unpack_model(plain)
    plain.set_attn_implementation("eager")

    @torch.inference_mode()
    def reference(ids: list[int]) -> Any:
        return plain(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]

    @torch.inference_mode()
    def state(ids: list[int]) -> Any:
        return plain.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]

    engine = TorchEngine(model, Settings(device="cpu", cache_folder=folder, kv="float32"), weights=choice)
    return Pair(engine, reference, state)


def parity_row(name: str, folder: Path, engine_name: str = "torch") -> Row:
    """The architecture `name`; ways that the self-check rules out are not run."""
    return row_of(name, folder, PAIRS[engine_name](name, folder), engine_name)


def row_of(name: str, folder: Path, pair: Pair, engine_name: str = "") -> Row:
    """What is found of a pair."""
    engine = pair.engine
    ids = make_ids(engine, LENGTH, seed=3)
    branch = ids[:AT] + make_ids(engine, LENGTH - AT, seed=4)
    ways = [way for way in WAYS if way == "stepped" or engine.capabilities.can_reuse]
    seen = {way: WAYS[way](engine, ids, branch) for way in ways}
    found = {
        way: max(float(abs(logits - pair.reference(tokens)).max()) for logits, tokens in each) for way, each in seen.items()
    }
    own = max(float(abs(logits - at_once(engine, tokens)).max()) for each in seen.values() for logits, tokens in each)
    spread = float(pair.reference(ids).max() - pair.reference(ids).min())
    if engine_name == "mlx":
        found["transformers"] = difference_to_torch(name, pair, ids, folder)
    kinds = "+".join(group.kind.value for group in engine.groups)
    described = engine.describe()
    step, difference = described.get("step", ""), state_difference(pair, ids)
    return Row(name, kinds or "none", described["state"], step, engine.capabilities, found, spread, own, difference)


def difference_to_torch(name: str, pair: Pair, ids: list[int], folder: Path) -> float:
    """How far the two libraries are apart on the same weights, without a cache."""
    other = torch_pair(name, folder).reference(ids)
    return float(abs(np.array(pair.reference(ids)) - other.numpy()).max())


def main(engine_name: str = "torch") -> None:
    torch.set_num_threads(1)
    columns = [*WAYS, *(["transformers"] if engine_name == "mlx" else [])]
    print(f"{'model':17}{'groups':18}{'chunk':6}{'reuse':6}" + "".join(f"{way:>13}" for way in [*columns, "state"]))
    with tempfile.TemporaryDirectory() as folder:
        for name in ON_MLX if engine_name == "mlx" else CONFIGS:
            row = parity_row(name, Path(folder), engine_name)
            can = row.capabilities
            cells = "".join(f"{row.differences[way]:13.1e}" if way in row.differences else f"{'–':>13}" for way in columns)
            cells += f"{row.state_difference:13.1e}"
            yes_no = "".join(f"{'yes' if each else 'no':6}" for each in (can.can_chunk, can.can_reuse))
            step = row.step if engine_name in PACKED else ""
            print(f"{row.name:17}{row.kinds:18}{yes_no}{cells}  {'; '.join(filter(None, (step, can.reason)))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
