"""The self-check finds out what is wrong, and remembers its verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bough.config import Settings
from bough.engines.self_check import check as shared_check
from bough.engines.self_check.check import read_verdict
from bough.engines.shared.compute import Verdict
from bough.engines.shared.engine import reuse_limit
from bough.engines.torch import TorchEngine, attention, engine
from bough.engines.torch.forward import TorchForward
from bough.engines.torch.lanes import buffers, layers
from bough.engines.torch.self_check import check as self_check_module
from bough.engines.torch.self_check.check import self_check, verdict_key
from bough.engines.torch.self_check.probe import probe
from bough.engines.torch.self_check.small_copy import COPY_WINDOW, make_small_copy
from bough.errors import ModelError
from tests.tiny_models import make_config, make_model


@pytest.fixture(autouse=True)
def ready() -> None:
    torch.set_num_threads(1)
    attention.register()


def verdict_of(model: Any) -> Verdict:
    forward = TorchForward(model)
    return self_check(forward, probe(forward))


def test_bough_attention_is_the_first_choice() -> None:
    verdict = verdict_of(make_model("llama"))

    assert (verdict.attention, verdict.way, verdict.can_reuse, verdict.can_batch) == ("bough", "lanes", True, True)


def test_an_attention_that_leaves_out_what_the_model_defines_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaves_out_the_cap(*args: Any, softcap: float | None = None, **kwargs: Any) -> Any:
        return attention.attention(*args, **kwargs)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, leaves_out_the_cap)

    assert verdict_of(make_model("gemma2", attn_logit_softcapping=2.0)).attention == "eager"


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("model", ["llama", "mistral", "gemma3_text", "qwen3_next", "bamba"])
def test_stock_attention_with_its_masks_allows_reuse_too(model: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("this model needs another attention")

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, fails)
    made = make_model(model)
    made.set_attn_implementation(name)

    verdict = verdict_of(made)

    assert verdict.attention == name
    assert verdict.can_reuse, verdict.reason


def test_an_attention_that_is_wrong_gives_way_to_the_stock_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_the_past(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        run = query.shape[2]
        return attention.attention(module, query, key[:, :, -run:], value[:, :, -run:], *args, **kwargs)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, forgets_the_past)

    verdict = verdict_of(make_model("llama"))

    assert (verdict.attention, verdict.can_reuse, verdict.can_batch) == ("sdpa", True, False)


def test_a_window_that_real_prompts_would_pass_later_is_checked_on_a_small_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def ignores_windows(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
        return attention.attention(*args, **kwargs)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, ignores_windows)
    monkeypatch.setattr(layers, "attach_window", lambda keys, window: keys)

    verdict = verdict_of(make_model("mistral", sliding_window=1024))

    assert verdict.attention == "sdpa"


def test_the_first_row_of_a_restored_window_counts_in_the_last_layer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    write = buffers.TorchRowBuffer.write

    def lose_one(self: Any, page: Any, content: torch.Tensor, start: int, end: int) -> None:
        content = content.clone()
        self.layout.split(content, page.end - page.start)[-1][-1, :, start - page.start] = 0
        write(self, page, content, start, end)

    monkeypatch.setattr(buffers.TorchRowBuffer, "write", lose_one)

    verdict = verdict_of(make_model("mistral"))

    assert (verdict.way, verdict.can_chunk, verdict.can_reuse) == ("lanes", True, False)


def test_a_model_that_ignores_its_cache_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers.TorchRowLayer, "update", lambda self, key, value, *args, **kwargs: (key, value))

    verdict = verdict_of(make_model("llama"))

    assert (verdict.way, verdict.can_reuse) == ("library", False)


def test_states_that_a_model_rebinds_instead_of_writing_in_place_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def rebind(self: Any, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    monkeypatch.setattr(layers.StateLayer, "update_recurrent_state", rebind)

    assert verdict_of(make_model("mamba2")).can_reuse


def test_a_layer_of_an_unknown_type_means_no_reuse_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import cache_utils

    class OtherLayer(cache_utils.DynamicLayer):
        pass

    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", OtherLayer)

    verdict = verdict_of(make_model("llama"))

    assert (verdict.way, verdict.can_chunk, verdict.can_reuse) == ("library", True, False)
    assert "OtherLayer" in verdict.reason


@pytest.mark.parametrize("name", ["gemma3_text", "gemma3n_text", "qwen3_next", "bamba", "nemotron_h", "gpt_oss"])
def test_a_small_copy_has_every_kind_of_layer(name: str) -> None:
    model = make_model(name)
    kinds = probe(TorchForward(model)).kinds

    small = make_small_copy(model, kinds)

    assert small is not None
    layout = probe(TorchForward(small))
    assert set(layout.kinds) == set(kinds)
    assert all(group.window in (0, COPY_WINDOW) for group in layout.groups)


def test_a_verdict_is_kept_and_used_at_the_next_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(device="cpu", cache_folder=tmp_path)
    first = TorchEngine(make_model("jamba"), settings)
    monkeypatch.setattr(engine, "self_check", None)

    second = TorchEngine(make_model("jamba"), settings)

    assert second.capabilities == first.capabilities
    assert not second.capabilities.can_reuse


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"attention": "bough"', b'{"other": 1}', b'{"attention": "x", "way": "y"}']
)
def test_a_broken_verdict_counts_as_none(tmp_path: Path, content: bytes) -> None:
    settings = Settings(device="cpu", cache_folder=tmp_path)
    TorchEngine(make_model("llama"), settings)
    (file,) = (tmp_path / "self_checks").iterdir()
    file.write_bytes(content)

    assert TorchEngine(make_model("llama"), settings).capabilities.can_reuse
    assert read_verdict(file) is not None


def test_a_folder_that_cannot_be_written_to_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "self_checks").write_text("a file in the way", encoding="utf-8")

    assert TorchEngine(make_model("llama"), Settings(device="cpu", cache_folder=tmp_path)).capabilities.can_reuse


def test_a_verdict_depends_on_the_configuration_and_the_attention_but_not_on_the_name() -> None:
    model, other = make_model("llama"), make_model("llama", num_hidden_layers=3)
    key = verdict_key(model)

    model.config._name_or_path = "somewhere/else"

    assert verdict_key(model) == key
    assert verdict_key(other) != key
    assert verdict_key(make_model("llama").to(torch.bfloat16)) != key


@pytest.mark.parametrize(
    ("rotary", "limit"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, None),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, None),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, 2048),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 512}, 512),
    ],
)
def test_rotary_scalings_by_length_bound_the_reuse(rotary: dict[str, Any], limit: int | None) -> None:
    assert reuse_limit(make_config("llama", rope_parameters=rotary).to_dict(), {"dynamic", "longrope"}, 2048) == limit


def test_half_precision_is_checked_by_the_copy_and_by_the_noise_of_the_real_weights() -> None:
    verdict = verdict_of(make_model("gemma3_text").to(torch.bfloat16))

    assert verdict.can_reuse, verdict.reason
    assert any("small copy" in check for check in verdict.differences)


@pytest.mark.parametrize("name", ["mamba", "jamba", "nemotron_h", "minimax", "recurrent_gemma"])
def test_a_wrong_architecture_is_found_out_in_half_precision_too(name: str) -> None:
    single, half = verdict_of(make_model(name)), verdict_of(make_model(name).to(torch.bfloat16))

    assert not half.can_reuse
    assert (half.way, half.can_chunk) == (single.way, single.can_chunk)


@pytest.mark.parametrize(("name", "can_reuse"), [("llama", True), ("mistral", False), ("qwen3_next", False)])
def test_half_precision_without_a_copy_allows_only_what_a_coarse_check_can_vouch_for(
    name: str, can_reuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check_module, "make_small_copy", lambda model, kinds: None)

    verdict = verdict_of(make_model(name).to(torch.bfloat16))

    assert (verdict.can_chunk, verdict.can_reuse, bool(verdict.reason)) == (can_reuse, can_reuse, not can_reuse)


def test_single_precision_without_a_copy_takes_a_longer_prompt_on_the_real_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check_module, "make_small_copy", lambda model, kinds: None)

    assert verdict_of(make_model("mistral")).can_reuse
    assert not verdict_of(make_model("mamba")).can_chunk


def test_memory_that_is_short_for_a_moment_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> float:
        raise torch.OutOfMemoryError("made to fail")

    monkeypatch.setitem(shared_check.REUSE_CHECKS, "restored", fail)
    with pytest.raises(ModelError, match="memory"):
        TorchEngine(make_model("llama"), Settings(device="cpu", cache_folder=tmp_path))
    monkeypatch.undo()
    assert TorchEngine(make_model("llama"), Settings(device="cpu", cache_folder=tmp_path)).capabilities.can_reuse
