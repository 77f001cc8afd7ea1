"""Which modules attend in which layer, and what happens where a model's attention cannot be led to a pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.model_loader import prepare
from bough.engines.torch.pooled.pool import Pool
from bough.engines.torch.pooled.wiring import POOL_ATTENTION, ROWS, NotWired, Wiring, attention, register_pool_attention
from bough.engines.torch.self_check.probe import probe
from tests.engines.torch.pooled.parts import make_ids, make_parts
from tests.tiny_models import CONFIGS, make_model

NOT_WIRED = {
    "gemma3n_text": "of layer 4 has no rows of its own",
    "gemma4_text": "of layer 4 has no rows of its own",
    "minimax": "of layer 1 has no rows of its own",
}
WITHOUT_ROWS = {"mamba", "mamba2"}
ON_POOL = sorted(set(CONFIGS) - set(NOT_WIRED) - WITHOUT_ROWS)


def make_forward(name: str) -> TorchForward:
    torch.set_num_threads(1)
    register_pool_attention()
    return TorchForward(prepare(make_model(name)))


@pytest.mark.parametrize("name", ON_POOL)
def test_each_layer_with_rows_has_one_module_that_looks_at_them(name: str) -> None:
    parts = make_parts(name)
    layers = [module.layer_idx for module in parts.wiring.modules]

    assert sorted(layers) == sorted(layer for rows in parts.layout.rows.values() for layer in rows.layers)
    assert parts.wiring.shared == dict.fromkeys(parts.layout.rows, 2)
    for module in parts.wiring.modules:
        group, place = next(
            (group, rows.layers.index(module.layer_idx))
            for group, rows in parts.layout.rows.items()
            if module.layer_idx in rows.layers
        )
        assert getattr(module, ROWS).data_ptr() == parts.memory.layer_rows(group, place).data_ptr()


@pytest.mark.parametrize(("name", "reason"), NOT_WIRED.items())
def test_a_model_whose_layers_share_rows_is_not_wired_and_left_as_it_was(name: str, reason: str) -> None:
    forward = make_forward(name)
    layout = probe(forward)
    forward.model.set_attn_implementation(POOL_ATTENTION)

    with pytest.raises(NotWired, match=reason):
        Wiring(forward, layout)

    assert not any(hasattr(module, ROWS) for module in forward.model.modules())


def test_layers_that_were_not_seen_to_attend_are_told() -> None:
    forward = make_forward("llama")
    layout = probe(forward)  # the model still has its own attention

    with pytest.raises(NotWired, match=r"layers \[0, 1, 2, 3\] keep rows and were not seen to attend"):
        Wiring(forward, layout)


def test_a_model_that_is_disconnected_has_nothing_of_the_pool_any_more() -> None:
    parts = make_parts("llama")
    assert all(hasattr(module, ROWS) for module in parts.wiring.modules)

    parts.wiring.disconnect()

    assert not any(hasattr(module, ROWS) for module in parts.forward.model.modules())
    assert not any("bough" in name for name, _ in parts.forward.model.named_buffers())


def test_the_pool_that_was_connected_last_is_the_one_that_is_used() -> None:
    first = make_parts("llama")
    second = Pool(first.forward, first.layout, first.wiring, LaneSizes(64, 64), 1 << 20, goes_ahead=False)
    lane = second.compute.make_lane()
    lane.reserve(20)

    assert first.is_answer(second.compute.evaluate(lane, make_ids(9)), make_ids(9))
    assert bool(first.memory.rows[first.row_groups[0]].isnan().all())
    first.wiring.connect(first.memory)
    assert first.is_answer(first.compute.evaluate(first.lane(20), make_ids(9)), make_ids(9))


@pytest.mark.parametrize(
    "given", [{"attention_mask": torch.ones(1, 1, 1, 1)}, {"is_causal": False}, {"position_bias": torch.ones(1)}]
)
def test_attention_that_is_more_than_causal_is_refused(given: dict[str, Any]) -> None:
    parts = make_parts("llama")
    states = torch.zeros(1, 4, 1, 16)

    with pytest.raises(NotImplementedError, match="causally, without a mask and without a position bias"):
        attention(parts.wiring.modules[0], states, states, states, **{"attention_mask": None, **given})


def test_attention_outside_of_a_pass_is_our_own_mistake() -> None:
    parts = make_parts("llama")

    with pytest.raises(AssertionError, match="attention outside of a pass"):
        parts.forward.call(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long), None, use_cache=False)
