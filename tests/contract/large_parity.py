"""Larger random models in half precision: how far an engine's logits lie from float32, next to those of stock transformers.

`python -m tests.contract.large_parity --device cuda --graphs wait llama gpt_oss` prints the table. The distance is the norm
of the difference over the norm of float32's logits, over all positions of a way of running. Stock transformers in half
precision is as far from float32 as rounding alone takes it: an engine is right if it is at most `MOST` times as far.
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from bough.config import Settings
from bough.engines.contract import Engine
from bough.engines.torch import TorchEngine
from tests.contract.driving import give_back, keep, new_lane, run

MOST = 1.2
READY_S = 400.0
_MOST_KEPT = 8  # sequences, each with the logits of all its positions


@dataclass(frozen=True)
class Sizes:
    """How large the models are, how long their sequences, and where these branch: inside a page."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int
    length: int
    branch_at: int
    lanes: int
    steps: int


LARGE = Sizes(2048, 8, 16, 4, 128, 32_000, window=200, length=700, branch_at=437, lanes=5, steps=24)
SMALL = Sizes(64, 4, 4, 2, 16, 300, window=20, length=290, branch_at=270, lanes=3, steps=4)


def make_shapes(sizes: Sizes) -> dict[str, tuple[str, dict[str, Any]]]:
    """The architectures: the name that transformers has for each, and a configuration."""
    base = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": 2 * sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": 4096,
    }
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": sizes.hidden // 2}
    recurrent = {
        "shared_expert_intermediate_size": sizes.hidden // 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": min(64, sizes.head_dim),
        "linear_value_head_dim": min(64, sizes.head_dim),
    }
    windows = {"sliding_window": sizes.window}
    return {
        "llama": ("llama", base),
        "qwen3": ("qwen3", base),
        "gemma3": ("gemma3_text", base | windows | {"query_pre_attn_scalar": sizes.head_dim, "sliding_window_pattern": 2}),
        "gpt_oss": ("gpt_oss", base | windows | {"num_local_experts": 16, "num_experts_per_tok": 4}),
        "qwen3_moe": ("qwen3_moe", base | experts | {"norm_topk_prob": True}),
        "qwen3_next": ("qwen3_next", base | experts | recurrent),
    }


NAMES = tuple(make_shapes(LARGE))


def make_model(name: str, sizes: Sizes, device: str, dtype: torch.dtype) -> Any:
    """A random model; the same weights every time, with sinks that matter."""
    kind, shape = make_shapes(sizes)[name]
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(20)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape), dtype=dtype).eval()
        for parameter, value in model.named_parameters():
            if parameter.endswith("sinks"):
                value.data.normal_()
    return model


class Stock:
    """Stock transformers without a cache, in float32 and in the model's own precision. The last sequences are kept."""

    def __init__(self, model: Any) -> None:
        self._whole = copy.deepcopy(model).float()
        self._half = self._whole if model.dtype == torch.float32 else copy.deepcopy(model)
        for each in (self._half, self._whole):
            each.set_attn_implementation("eager")
        self._known: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def logits(self, ids: Sequence[int], at: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The logits after so many tokens of a sequence, for each number: in float32, and in the model's precision."""
        key = tuple(ids)
        if key not in self._known:
            whole = self._run(self._whole, ids)
            self._known[key] = whole, whole if self._half is self._whole else self._run(self._half, ids)
            if len(self._known) > _MOST_KEPT:
                del self._known[next(iter(self._known))]
        rows = [number - 1 for number in at]
        whole, half = self._known[key]
        return whole[rows], half[rows]

    @torch.inference_mode()
    def _run(self, model: Any, ids: Sequence[int]) -> Tensor:
        inputs = torch.tensor([list(ids)], device=model.device)
        logits: Tensor = model(input_ids=inputs, use_cache=False).logits[0].float()
        return logits


@dataclass(frozen=True)
class Seen:
    """The logits that an engine gave on one sequence, each after so many of its tokens."""

    ids: list[int]
    at: list[int]
    logits: list[Tensor]


@dataclass(frozen=True)
class Row:
    """One way of running one model: its distance from float32, and that of stock transformers.

    `median_ratio` is that of the medians over positions. In a mixture of experts rounding may choose other experts at a few
    positions, which then decide the distance of both over all: a bug that shows everywhere shows in the medians too.
    """

    name: str
    way: str
    step: str
    ours: float
    stock: float
    median_ratio: float

    @property
    def ratio(self) -> float:
        return self.ours / self.stock


class Play:
    """One model's sequences: a trunk, and branches that leave it inside a page."""

    def __init__(self, engine: Engine, sizes: Sizes) -> None:
        self.engine, self.sizes = engine, sizes
        chance = random.Random(3)
        draw = lambda count: [chance.randrange(3, sizes.vocab) for _ in range(count)]  # noqa: E731
        self.trunk = draw(sizes.length)
        self.branches = [[*self.trunk[: sizes.branch_at], *draw(sizes.steps)] for _ in range(sizes.lanes)]

    def at_once(self) -> list[Seen]:
        """The whole trunk in one run."""
        lane = new_lane(self.engine, self.sizes.length)
        try:
            return [Seen(self.trunk, [self.sizes.length], [run(self.engine, lane, self.trunk, [self.sizes.length])])]
        finally:
            lane.clear()

    def chunked(self) -> list[Seen]:
        """The trunk in chunks that end inside pages, then token by token."""
        lane, seen = new_lane(self.engine, self.sizes.length), Seen(self.trunk, [], [])
        first = self.sizes.length // 2
        for size in (first, 37, self.sizes.length - first - 37 - self.sizes.steps, *[1] * self.sizes.steps):
            logits = run(self.engine, lane, self.trunk, [size]) if size > 1 else self._step([lane], [self.trunk])[0]
            seen.at.append(lane.offset)
            seen.logits.append(logits.clone())
        lane.clear()
        return [seen]

    def branched(self) -> list[Seen]:
        """Lanes that share a prefix, which ends inside a page, and go on together with tokens of their own."""
        lane = new_lane(self.engine, self.sizes.length)
        run(self.engine, lane, self.trunk, [self.sizes.branch_at])
        kept = keep(self.engine, lane)
        lane.clear()
        seen = self._step_all(self._adopt(kept), self.branches)
        give_back(self.engine, kept)
        return seen

    def apart(self) -> list[Seen]:
        """The same branches with nothing shared: every lane computes its own prefix."""
        lanes = [new_lane(self.engine, self.sizes.length) for _ in self.branches]
        for lane, ids in zip(lanes, self.branches, strict=True):
            run(self.engine, lane, ids, [self.sizes.branch_at])
        return self._step_all(lanes, self.branches)

    def _adopt(self, kept: Any) -> list[Any]:
        lanes = [new_lane(self.engine, self.sizes.length) for _ in self.branches]
        for lane in lanes:
            lane.adopt(self.sizes.branch_at, kept)
        return lanes

    def _step_all(self, lanes: list[Any], sequences: list[list[int]]) -> list[Seen]:
        seen = [Seen(ids, [], []) for ids in sequences]
        for _ in range(self.sizes.steps):
            for each, lane, logits in zip(seen, lanes, self._step(lanes, sequences), strict=True):
                each.at.append(lane.offset)
                each.logits.append(logits)
        for lane in lanes:
            lane.clear()
        return seen

    def _step(self, lanes: list[Any], sequences: list[list[int]]) -> list[Tensor]:
        ids = [sequence[lane.offset] for lane, sequence in zip(lanes, sequences, strict=True)]
        return [each.clone() for each in self.engine.step(lanes, ids)]


WAYS: dict[str, Callable[[Play], list[Seen]]] = {
    "at once": Play.at_once,
    "chunked": Play.chunked,
    "branched": Play.branched,
    "apart": Play.apart,
}


def parity_rows(
    name: str,
    folder: Path,
    *,
    sizes: Sizes = LARGE,
    device: str = "cuda",
    graphs: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Row]:
    """Every way of running one model. The engine is warm before the first."""
    torch.backends.cudnn.allow_tf32 = False  # float32 means float32 here
    model = make_model(name, sizes, device, dtype)
    stock = Stock(model)
    with closing(TorchEngine(model, Settings(cache_folder=folder), graphs=graphs)) as engine:
        require_ready(engine)
        play = Play(engine, sizes)
        for way, look in WAYS.items():
            yield judge(name, way, engine.describe()["step"], look(play), stock)
        assert engine.held_bytes == 0, "pages or states were not given back"


def require_ready(engine: Any) -> None:
    """Wait for an engine that warms up in the background; another is ready."""
    wait = getattr(engine, "wait_until_ready", None)
    assert wait is None or wait(READY_S), "the engine's fast path is not ready"


def judge(name: str, way: str, step: str, seen: Sequence[Seen], stock: Stock) -> Row:
    """The distances from float32 over all positions together."""
    found = [stock.logits(each.ids, each.at) for each in seen]
    ours = torch.cat([torch.stack(list(each.logits)).float() for each in seen])
    whole, half = torch.cat([each[0] for each in found]), torch.cat([each[1] for each in found])
    medians = [((each - whole).norm(dim=-1) / whole.norm(dim=-1)).median() for each in (ours, half)]
    return Row(name, way, step, distance(ours, whole), distance(half, whole), float(medians[0] / medians[1]))


def distance(logits: Tensor, exact: Tensor) -> float:
    return float((logits - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graphs", default="auto", help='"auto", "wait" or "off"')
    parser.add_argument("--small", action="store_true", help="models of a few thousand weights, for a CPU")
    given = parser.parse_args()
    sizes = SMALL if given.small else LARGE
    print(f"{'model':12}{'way':10}{'ours':>10}{'stock':>10}{'ratio':>8}{'median':>8}{'s':>7}  step")
    for name in given.names or NAMES:
        started_s = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder:
                for row in parity_rows(name, Path(folder), sizes=sizes, device=given.device, graphs=given.graphs):
                    mark = "" if row.ratio <= MOST else "  TOO FAR"
                    took_s = time.perf_counter() - started_s
                    figures = f"{row.ours:10.5f}{row.stock:10.5f}{row.ratio:8.2f}{row.median_ratio:8.2f}{took_s:7.1f}"
                    print(f"{row.name:12}{row.way:10}{figures}  {row.step}{mark}", flush=True)
        except Exception as error:  # the other models are looked at all the same
            print(f"{name:12}failed: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
