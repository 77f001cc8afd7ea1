"""Compiled decoder layers: one graph for all layers of a kind, in the threads that use them, and nowhere else.

The backend computes what dynamo traced without compiling it: which graphs there are does not depend on the compiler.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from bough.engines.torch.pooled.compiling import (
    CompiledLayers,
    compile_layers,
    find_decoder,
    keep_compile_cache,
    prepare_experts,
    why_not,
)
from bough.engines.torch.pooled.products.linears import join_products
from tests.tiny_models import make_config, make_model

STEP_OF_MANY, STEP_OF_MORE, STEP_OF_ONE, RUN, LONGER_RUN = (3, 1), (5, 1), (1, 1), (1, 7), (1, 12)


class Backend:
    """Keeps each graph of a decoder layer that dynamo asks to be compiled, and computes it as it is."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.num_graphs += 1
        return graph


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Graphs of one test serve no other."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.inference_mode()
def run(model: Any, shape: tuple[int, int], **kwargs: Any) -> Tensor:
    ids = torch.arange(1, 1 + shape[0] * shape[1]).view(shape)
    positions = torch.arange(shape[1]).expand(shape).contiguous()
    logits: Tensor = model(input_ids=ids, position_ids=positions, **{"use_cache": False, **kwargs}).logits
    return logits


def layers_alone(model: Any, backend: Backend) -> CompiledLayers:
    decoder = find_decoder(model)
    assert decoder is not None
    return CompiledLayers(decoder.layers, backend)


def test_one_graph_serves_all_layers_and_any_number_of_lanes() -> None:
    model, backend = make_model("llama", num_hidden_layers=2), Backend()
    join_products(model)
    layers = layers_alone(model, backend)
    counts = []

    for shape in (STEP_OF_MANY, STEP_OF_MORE, STEP_OF_ONE, RUN, LONGER_RUN):
        expected = run(model, shape)
        with layers.use():
            torch.testing.assert_close(run(model, shape), expected, rtol=1e-4, atol=1e-5)
        counts.append(backend.num_graphs)

    assert counts == [1, 1, 2, 3, 3]


def test_layers_with_experts_and_windows_share_a_graph() -> None:
    model, backend = make_model("gpt_oss"), Backend()
    prepare_experts(model)
    layers = layers_alone(model, backend)
    expected = run(model, STEP_OF_MANY)

    with layers.use():
        torch.testing.assert_close(run(model, STEP_OF_MANY), expected, rtol=1e-4, atol=1e-5)

    assert backend.num_graphs == 1


def test_final_norm_and_rotary_embedding_are_compiled_too() -> None:
    model, backend = make_model("llama", num_hidden_layers=2), Backend()
    layers = compile_layers(model, backend)

    with layers.use():
        run(model, STEP_OF_MANY)

    assert backend.num_graphs == 3


def test_a_rotary_embedding_that_reads_positions_on_the_host_is_not_compiled() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    model = make_model("llama", rope_parameters=rope)

    compile_layers(model, Backend())

    assert "forward" not in vars(model.model.rotary_emb)
    assert "forward" in vars(model.model.norm)


def test_another_thread_does_not_use_compiled_layers() -> None:
    model, backend = make_model("llama", num_hidden_layers=2), Backend()
    layers = compile_layers(model, backend)

    with layers.use():
        thread = threading.Thread(target=run, args=(model, STEP_OF_MANY))
        thread.start()
        thread.join()

    assert backend.num_graphs == 0


def test_layers_are_compiled_for_other_threads_too() -> None:
    model, backend = make_model("llama", num_hidden_layers=2), Backend()
    layers = compile_layers(model, backend)

    def run_compiled() -> None:
        with layers.use():
            run(model, STEP_OF_MANY)

    thread = threading.Thread(target=run_compiled)
    thread.start()
    thread.join()
    compiled = backend.num_graphs
    run_compiled()

    assert backend.num_graphs == compiled > 0


def test_removed_layers_are_as_they_were() -> None:
    model, backend = make_model("llama", num_hidden_layers=2), Backend()
    layers = compile_layers(model, backend)

    layers.remove()

    with layers.use():
        run(model, STEP_OF_MANY)
    assert backend.num_graphs == 0
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_copy_of_a_model_computes_by_its_own_weights() -> None:
    model = make_model("llama")
    compile_layers(model, Backend())
    twin, expected = copy.deepcopy(model), run(model, RUN)

    for parameter in model.model.layers.parameters():
        parameter.data.zero_()

    assert torch.equal(run(twin, RUN), expected)


def test_compiled_layers_refuse_a_cache() -> None:
    model = make_model("llama")
    layers = compile_layers(model, Backend())

    with layers.use(), pytest.raises(AssertionError, match="take no cache"):
        run(model, RUN, past_key_values=DynamicCache(config=model.config), use_cache=True)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama", ""),
        ("gpt_oss", ""),
        ("gemma3n_text", ""),
        ("qwen3_next", "2 of 4 layers keep a recurrent state"),
        ("lfm2", "2 of 4 layers keep a recurrent state"),
        ("minimax", "2 of 4 layers keep a recurrent state"),
        ("falcon_h1", "4 of 4 layers keep a recurrent state"),
        ("recurrent_gemma", "RecurrentGemmaForCausalLM has no list of decoder layers that is known"),
    ],
)
def test_why_a_model_is_not_compiled(name: str, reason: str) -> None:
    assert why_not(make_model(name)) == reason


def test_experts_in_a_loop_are_not_compiled_before_they_are_prepared() -> None:
    model = make_model("gpt_oss")
    model.set_experts_implementation("eager")
    assert why_not(model) == "GptOssExperts computes its experts in the way 'eager', not 'grouped_mm'"

    undo = prepare_experts(model)
    assert why_not(model) == ""

    undo()
    assert model.config._experts_implementation == "eager"


def test_preparing_experts_changes_nothing_in_a_model_without() -> None:
    model = make_model("llama")
    before = model.config._experts_implementation

    prepare_experts(model)()

    assert model.config._experts_implementation == before


def test_the_compile_cache_is_kept_where_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "elsewhere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")

    assert keep_compile_cache(tmp_path / "compiled") == ""

    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "compiled" / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == "elsewhere"
    assert (tmp_path / "compiled").stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    (tmp_path / "file").write_text("", encoding="utf-8")

    assert "cannot be written" in keep_compile_cache(tmp_path / "file" / "compiled")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"


def test_layers_are_found_by_their_number_not_by_their_name() -> None:
    model = make_model("llama")
    model.model.blocks = model.model.layers
    del model.model.layers

    decoder = find_decoder(model)

    assert decoder is not None
    assert decoder.layers is model.model.blocks
    assert len(decoder.layers) == make_config("llama").num_hidden_layers
