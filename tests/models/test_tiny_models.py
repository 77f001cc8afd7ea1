"""The random models that other tests use."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_models import CONFIGS, make_folder, make_model


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_makes_a_model(name):
    assert make_model(name).config.model_type == name


def test_the_same_name_gives_the_same_weights_and_leaves_the_random_state_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)

    first, second = make_model("llama"), make_model("llama")

    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)


def test_a_folder_loads_to_the_same_model(tmp_path):
    loaded = AutoModelForCausalLM.from_pretrained(make_folder("llama", tmp_path / "llama"))

    ids = torch.arange(5, 25)[None]
    assert torch.equal(loaded(ids).logits, make_model("llama")(ids).logits)
