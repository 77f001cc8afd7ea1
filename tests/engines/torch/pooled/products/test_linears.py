"""Linear layers joined into one product: the same results, in every architecture and for odd parents, and undone."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bough.engines.torch.pooled.products.linears import (
    ChosenLinear,
    JoinedLinear,
    LaterLinear,
    ProductChoice,
    join_products,
    list_products,
    product,
    read_choices,
    write_choices,
)
from tests.tiny_models import CONFIGS, make_model

WIDTH = 16
SIZES = {"q_proj": 12, "k_proj": 4, "v_proj": 8}


class Parent(nn.Module):
    """Linear layers under the names of an attention module."""

    def __init__(self, bias: bool = False, **kinds: Any) -> None:
        super().__init__()
        for name, size in SIZES.items():
            setattr(self, name, kinds.get(name, nn.Linear)(WIDTH, size, bias=bias))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


class KeysFirst(Parent):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.k_proj(x), self.q_proj(x), self.v_proj(x)], -1)


class OtherInputs(Parent):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x + 1), self.v_proj(x * 2)], -1)


class KeysTwice(Parent):
    """The second call sees the same tensor, written anew."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x), self.q_proj(x), self.k_proj(x)]
        return torch.cat([*parts, self.k_proj(x.mul_(2))], -1)


class NoValues(Parent):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x)], -1)


class Observed(nn.Linear):
    """A linear layer of another class, as quantised ones are."""


def run(model: Any) -> Tensor:
    ids = torch.arange(1, 11)[None]
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def joined_in(model: nn.Module) -> list[JoinedLinear]:
    return [each for each in model.modules() if isinstance(each, JoinedLinear)]


@pytest.mark.parametrize("name", CONFIGS)
def test_joined_products_give_a_models_logits(name: str) -> None:
    model = make_model(name)
    expected, num_weights = run(model), sum(each.numel() for each in model.parameters())

    num_joined = join_products(model)

    assert (num_joined > 0) == (name not in ("mamba", "mamba2"))  # these have one linear layer for each input
    assert sum(each.numel() for each in model.parameters()) == num_weights
    torch.testing.assert_close(run(model), expected, rtol=1e-4, atol=1e-5)
    assert all(each.latest.value is None for each in joined_in(model))  # nothing is kept between calls


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [Parent, KeysFirst, KeysTwice, OtherInputs, NoValues])
def test_joined_layers_are_right_whatever_their_parent_does(kind: type[Parent], bias: bool) -> None:
    parent = kind(bias).requires_grad_(False)
    x = torch.randn(3, 2, WIDTH)
    expected = parent(x)

    assert join_products(parent) == 3

    for _ in range(2):
        torch.testing.assert_close(parent(x), expected)


def test_a_joined_layer_still_shows_its_own_weight() -> None:
    parent = Parent(bias=True)
    weights = {name: getattr(parent, name).weight.clone() for name in SIZES}
    join_products(parent)

    for name, size in SIZES.items():
        layer = getattr(parent, name)
        assert torch.equal(layer.weight, weights[name])
        assert layer.bias.shape == (size,)
        assert (layer.in_features, layer.out_features) == (WIDTH, size)


def hooked(parent: Parent) -> None:
    parent.k_proj.register_forward_hook(lambda *_: None)


def tied(parent: Parent) -> None:
    parent.other = nn.Linear(WIDTH, SIZES["k_proj"])
    parent.other.weight = parent.k_proj.weight


def of_another_type(parent: Parent) -> None:
    parent.k_proj.to(torch.bfloat16)


def with_a_bias(parent: Parent) -> None:
    parent.k_proj.bias = nn.Parameter(torch.zeros(SIZES["k_proj"]))


def with_another_forward(parent: Parent) -> None:
    parent.k_proj.forward = lambda x: x


@pytest.mark.parametrize("change", [hooked, tied, of_another_type, with_a_bias, with_another_forward])
def test_layers_that_differ_are_left_apart(change: Any) -> None:
    parent = Parent()
    change(parent)

    assert join_products(parent) == 0
    assert type(parent.q_proj) is ChosenLinear


def test_a_layer_of_another_class_is_left_alone() -> None:
    parent = Parent(k_proj=Observed)

    assert join_products(parent) == 0
    assert type(parent.k_proj) is Observed


def test_threads_do_not_see_each_others_products() -> None:
    parent = Parent().requires_grad_(False)
    join_products(parent)
    x = torch.randn(2, WIDTH)
    parent.q_proj(x)
    seen = []

    thread = threading.Thread(target=lambda: seen.append(parent.q_proj.latest.value))
    thread.start()
    thread.join()

    assert seen == [None]
    assert parent.q_proj.latest.value is not None


def test_a_copy_of_a_joined_model_computes_by_its_own_weights() -> None:
    parent = Parent().requires_grad_(False)
    join_products(parent)
    x = torch.randn(2, WIDTH)
    twin = copy.deepcopy(parent)
    parent.q_proj.joined_weight.zero_()

    assert isinstance(twin.k_proj, LaterLinear)
    assert not parent(x).any()
    assert twin(x).all()


def test_choices_are_read_as_they_were_written() -> None:
    choices = [
        ProductChoice(64, "cublaslt"),
        ProductChoice(1, "one_row", (1, 4096, 4, 1)),
        ProductChoice(16, "few_rows", (32, 256, 4, 5)),
    ]

    assert read_choices(write_choices(choices)) == (choices[1], choices[2], choices[0])


def test_layers_with_choices_call_one_operator_in_compiled_code() -> None:
    parent = Parent(bias=True).requires_grad_(False)
    x = torch.randn(5, 1, WIDTH)
    expected = parent(x)
    join_products(parent)
    for module, _, _ in list_products(parent):
        module.choices = write_choices([ProductChoice(16, "cublas")])
    graphs = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(parent, backend=keep, fullgraph=True, dynamic=True)

    for rows in (5, 7, 40):
        many = x.repeat(8, 1, 1)[:rows]
        torch.testing.assert_close(compiled(many)[:5], expected)
    assert [[node.target for node in graph.graph.nodes].count(torch.ops.bough.product.default) for graph in graphs] == [1]


def test_the_operator_says_its_shape_to_compiled_code() -> None:
    x, weight, bias = torch.randn(3, 1, WIDTH), torch.randn(6, WIDTH), torch.randn(6)

    torch.library.opcheck(product, (x, weight, bias, "16 cublas"), test_utils=["test_schema", "test_faketensor"])
