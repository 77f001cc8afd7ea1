"""The MLX engine's self-check finds out what is wrong, and remembers its verdict."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from pytest import MonkeyPatch

from bough.cache.tree.state import Group, Kind
from bough.config import Settings
from bough.engines.mlx import MlxEngine, engine
from bough.engines.mlx.buffers import MlxRowBuffer, MlxStateBuffer
from bough.engines.mlx.compute import MlxLaneCompute
from bough.engines.mlx.forward import MlxForward
from bough.engines.mlx.layers import MlxBatchRowLayer, MlxRowLayer
from bough.engines.mlx.layout import MlxPages
from bough.engines.mlx.library import cache, nn
from bough.engines.mlx.loading.model import MlxModel, load_model, weights_of
from bough.engines.mlx.self_check import check as self_check_module
from bough.engines.mlx.self_check.check import self_check, verdict_key
from bough.engines.mlx.self_check.probe import probe
from bough.engines.mlx.self_check.small_copy import COPY_WINDOW, make_random, make_small_copy
from bough.engines.self_check import check as shared_check
from bough.engines.self_check import checks
from bough.engines.self_check.check import COPY_TOKENS
from bough.engines.self_check.reference import Reference, usual_ids
from bough.engines.shared.compute import Verdict
from bough.engines.shared.row_memory import LaneSizes
from bough.errors import ModelError, UnsupportedModel
from tests.tiny_mlx_models import make_loaded
from tests.tiny_models import ON_MLX, make_folder

WITH_WINDOW = ("mistral", "gemma3_text", "gpt_oss")
WITH_ROWS = (*WITH_WINDOW, "qwen3_next", "lfm2", "falcon_h1", "granitemoehybrid", "nemotron_h")
WITH_STATE = ("qwen3_next", "lfm2", "falcon_h1", "mamba2", "granitemoehybrid", "nemotron_h", "mamba")
NOTICED = 5e-4  # spreads of the logits: five times what the check lets pass on the copy


def verdict_of(loaded: MlxModel) -> Verdict:
    forward = MlxForward(loaded)
    return self_check(forward, probe(forward))


def load(name: str, folder: Path, dtype: str, **overrides: Any) -> MlxModel:
    """A model of its own, in another type than float32."""
    return load_model(make_folder(name, folder, **overrides), Settings(device="cpu", dtype=dtype))


def quantized(name: str, folder: Path) -> MlxModel:
    loaded = load(name, folder, "bfloat16")
    nn.quantize(loaded.model, group_size=32, bits=8)
    mx.eval(loaded.model.state)
    return MlxModel(loaded.model, loaded.config | {"quantization": {"group_size": 32, "bits": 8}})


class SmallCopy:
    """The small copy of a tiny model, and how far lanes are from it, in spreads of the logits."""

    def __init__(self, name: str) -> None:
        forward = MlxForward(make_loaded(name))
        small = make_small_copy(forward, probe(forward))
        assert small is not None
        self.forward, self.layout = small, probe(small)
        usual = usual_ids(small.config, self.layout.vocab_size)
        self._reference = Reference(lambda prompts: [small.all_logits(each.ids) for each in prompts], COPY_TOKENS, usual)

    def difference(self, check: Callable[[MlxLaneCompute, Reference], float]) -> float:
        sizes = LaneSizes(COPY_TOKENS, COPY_TOKENS)
        compute = MlxLaneCompute(self.forward, self.layout, MlxPages(self.layout), sizes, can_batch=False)
        return check(compute, self._reference) / self._reference.scale


@pytest.mark.parametrize("name", ON_MLX)
def test_everything_is_allowed_to_an_architecture_that_is_right(name: str) -> None:
    verdict = verdict_of(make_loaded(name))

    assert (verdict.way, verdict.can_chunk, verdict.can_reuse, verdict.can_batch) == ("lanes", True, True, True)
    assert verdict.reason == ""


@pytest.mark.parametrize("name", sorted({*WITH_WINDOW, *WITH_STATE}))
def test_a_small_copy_has_every_kind_of_layer_and_small_windows(name: str) -> None:
    groups = probe(MlxForward(make_loaded(name))).groups
    copied = SmallCopy(name).layout.groups

    assert [group.kind for group in copied] == [group.kind for group in groups]
    assert all(group.window in (0, COPY_WINDOW) for group in copied)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])  # whose modules draw what their biases and decays start with
def test_a_small_copy_has_the_same_weights_every_time(name: str) -> None:
    first, second = (weights_of(SmallCopy(name).forward.model) for _ in range(2))

    assert all(mx.array_equal(first[each], second[each]) for each in first)


@pytest.mark.parametrize("name", ON_MLX)
@pytest.mark.parametrize(
    "check", [checks.one_shot, checks.chunked, checks.stepped, checks.restored, checks.rewound, checks.branched]
)
def test_right_lanes_are_close_to_the_copy(name: str, check: Callable[[Any, Reference], float]) -> None:
    assert SmallCopy(name).difference(check) < 2e-5


@pytest.mark.parametrize("name", WITH_STATE)
def test_any_array_of_a_state_that_is_not_restored_is_noticed_on_the_copy(name: str, monkeypatch: MonkeyPatch) -> None:
    copy, write = SmallCopy(name), MlxStateBuffer.write
    for index in range(len(copy.layout.parts)):

        def lose_one(self: Any, content: Any, index: int = index) -> None:
            write(self, content)
            self.put([mx.zeros_like(each) if tier == index else each for tier, each in enumerate(self.arrays)])

        monkeypatch.setattr(MlxStateBuffer, "write", lose_one)
        assert copy.difference(checks.restored) > NOTICED
        assert copy.difference(checks.branched) > NOTICED


def damage_rows(monkeypatch: MonkeyPatch, group: Group, index: int, num_rows: int) -> None:
    """Let the first rows that a lane takes in of one array be another token's."""
    write = MlxRowBuffer.write

    def damaging(self: Any, page: Any, content: Any, start: int, end: int) -> None:
        write(self, page, content, start, end)
        if self.group == group:
            first, last = start - self.base, end - self.base
            rows = mx.roll(self.arrays[index][..., first:last, :], 1, axis=2)[..., :num_rows, :]
            self.arrays[index][..., first : first + num_rows, :] = rows

    monkeypatch.setattr(MlxRowBuffer, "write", damaging)


@pytest.mark.parametrize("num_rows", [1, 20])
@pytest.mark.parametrize("name", WITH_ROWS)
def test_rows_of_another_token_are_noticed_on_the_copy_in_every_layer(
    name: str, num_rows: int, monkeypatch: MonkeyPatch
) -> None:
    copy = SmallCopy(name)
    for group, rows in copy.layout.rows.items():
        for index in range(2 * len(rows.layers)):
            with monkeypatch.context() as patched:
                damage_rows(patched, group, index, num_rows)
                assert copy.difference(checks.restored) > NOTICED, f"array {index} of {group}"


@pytest.mark.parametrize("name", WITH_WINDOW)
def test_a_window_that_is_a_row_short_is_noticed_on_the_copy(name: str, monkeypatch: MonkeyPatch) -> None:
    copy, needed = SmallCopy(name), Group.first_needed

    def one_short(self: Group, offset: int) -> int:
        return min(offset, needed(self, offset) + (1 if self.kind is Kind.WINDOW and offset >= self.window else 0))

    monkeypatch.setattr(Group, "first_needed", one_short)

    assert copy.difference(checks.stepped) > NOTICED


def ignore_windows(self: Any, N: int, *args: Any, **kwargs: Any) -> str | None:
    return "causal" if N > 1 else None


def test_a_window_that_real_prompts_would_pass_later_is_checked_on_a_small_copy(monkeypatch: MonkeyPatch) -> None:
    loaded = make_loaded("mistral", sliding_window=1024)
    assert verdict_of(loaded).can_reuse

    monkeypatch.setattr(MlxRowLayer, "make_mask", ignore_windows)

    assert not verdict_of(loaded).can_reuse


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["lfm2", "falcon_h1", "mamba2"])
def test_states_that_are_not_restored_forbid_reuse_in_every_type(
    name: str, dtype: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(MlxStateBuffer, "write", lambda self, content: self.reset())

    verdict = verdict_of(load(name, tmp_path, dtype))

    assert (verdict.way, verdict.can_chunk, verdict.can_reuse) == ("lanes", True, False)
    assert "restored" in verdict.reason or "rewound" in verdict.reason or "branched" in verdict.reason


def test_lanes_that_forget_their_rows_give_way_to_the_librarys_cache(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(MlxRowLayer, "update_and_fetch", lambda self, keys, values: (keys, values))

    verdict = verdict_of(make_loaded("llama"))

    assert (verdict.way, verdict.can_chunk, verdict.can_reuse) == ("library", True, False)


def test_a_batch_that_mixes_lanes_up_forbids_batches_only(monkeypatch: MonkeyPatch) -> None:
    update = MlxBatchRowLayer.update_and_fetch
    monkeypatch.setattr(
        MlxBatchRowLayer, "update_and_fetch", lambda self, keys, values: update(self, keys[::-1], values[::-1])
    )

    verdict = verdict_of(make_loaded("llama"))

    assert (verdict.can_reuse, verdict.can_batch) == (True, False)


class OtherCache(cache.KVCache):  # type: ignore[misc]
    """A cache of a type that nobody knows."""


class ForgetfulCache(cache.KVCache):  # type: ignore[misc]
    """A cache that shows a run nothing but the run itself."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        super().update_and_fetch(keys, values)
        return keys, values


@pytest.mark.parametrize(("kind", "way"), [(OtherCache, "library"), (ForgetfulCache, "recompute")])
def test_a_cache_of_an_unknown_type_means_no_reuse_and_is_named(kind: type, way: str, monkeypatch: MonkeyPatch) -> None:
    loaded = make_loaded("llama")
    monkeypatch.setattr(type(loaded.model), "make_cache", lambda self: [kind() for _ in self.layers])

    verdict = verdict_of(loaded)

    assert (verdict.way, verdict.can_chunk, verdict.can_reuse) == (way, True, False)
    assert kind.__name__ in verdict.reason


GEMMA = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
}
GEMMA3N = (
    {"model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 4, "sliding_window": 512}
    | {"layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2, "activation_sparsity_pattern": [0.0] * 10}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "laurel_rank": 8, "altup_num_inputs": 4}
    | {"altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0, "rope_local_base_freq": 1e4}
    | {"rope_scaling": None, "max_position_embeddings": 2048, "final_logit_softcapping": 30.0, "query_rescale_scalar": 1.0}
)


def test_gemma3n_whose_layers_share_rows_only_in_a_cache_is_checked_by_a_fresh_one() -> None:
    forward, ids = make_random({"model_type": "gemma3n", "text_config": GEMMA | GEMMA3N}, mx.float32), list(range(40))
    alone, cached = forward.all_logits(ids)[-1], forward.last_logits(mx.array([ids]), forward.make_cache())[0]
    assert float(abs(alone - cached).max()) > 0.1  # else this tests nothing

    verdict = self_check(forward, probe(forward))

    assert (verdict.way, verdict.can_reuse) == ("lanes", True)
    assert any("small copy" in check for check in verdict.differences)


def test_a_window_that_a_nested_configuration_leaves_to_the_library_is_small_in_the_copy() -> None:
    text = {**GEMMA, "model_type": "gemma3_text", "num_hidden_layers": 12}
    forward = make_random({"model_type": "gemma3", "vocab_size": 97, "text_config": text}, mx.float32)
    layout = probe(forward)
    assert [group.window for group in layout.groups] == [512, 0]

    small = make_small_copy(forward, layout)

    assert small is not None
    assert [group.window for group in probe(small).groups] == [COPY_WINDOW, 0]
    assert len(probe(small).kinds) == 6  # one layer of six looks at everything


def fails(logits: Any) -> Any:
    raise TypeError("made to fail")


@pytest.mark.parametrize("change", [fails, lambda logits: logits[:, ::-1], lambda logits: logits * float("nan")])
def test_a_model_that_is_wrong_without_a_cache_is_checked_by_a_fresh_one(
    change: Callable[[Any], Any], monkeypatch: MonkeyPatch
) -> None:
    loaded = make_loaded("gemma3_text")
    call = type(loaded.model).__call__

    def wants_a_cache(self: Any, inputs: Any, cache: Any = None, **kwargs: Any) -> Any:
        logits = call(self, inputs, cache=cache, **kwargs)
        return change(logits) if cache is None else logits

    monkeypatch.setattr(type(loaded.model), "__call__", wants_a_cache)

    assert verdict_of(loaded).can_reuse


def test_a_model_that_the_device_cannot_run_is_refused_with_the_cause(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="GatherMM"):  # MLX has no experts in half precision on a CPU
        verdict_of(load("qwen3_next", tmp_path, "bfloat16"))


def test_a_model_that_never_answers_the_same_is_refused(monkeypatch: MonkeyPatch) -> None:
    loaded = make_loaded("llama")
    call = type(loaded.model).__call__
    monkeypatch.setattr(
        type(loaded.model), "__call__", lambda self, *args, **kwargs: call(self, *args, **kwargs) + mx.random.normal()
    )

    with pytest.raises(UnsupportedModel, match="different answers"):
        verdict_of(loaded)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2", "falcon_h1"])
def test_half_precision_is_checked_by_the_copy_and_by_the_noise_of_the_real_weights(name: str, tmp_path: Path) -> None:
    verdict = verdict_of(load(name, tmp_path, "bfloat16"))

    assert verdict.can_reuse, verdict.reason
    assert {"restored", "restored (small copy)", "restored (small copy, bfloat16)"} <= verdict.differences.keys()


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_quantized_weights_are_checked_by_a_copy_that_is_not(name: str, tmp_path: Path) -> None:
    verdict = verdict_of(quantized(name, tmp_path))

    assert verdict.can_reuse, verdict.reason
    assert verdict.differences["restored (small copy)"] < 1e-4


@pytest.mark.parametrize(("name", "can_reuse"), [("llama", True), ("mistral", False), ("lfm2", False)])
def test_half_precision_without_a_copy_allows_only_what_a_coarse_check_can_vouch_for(
    name: str, can_reuse: bool, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(self_check_module, "make_small_copy", lambda forward, layout: None)

    verdict = verdict_of(load(name, tmp_path, "bfloat16"))

    assert (verdict.can_chunk, verdict.can_reuse, bool(verdict.reason)) == (can_reuse, can_reuse, not can_reuse)


def test_single_precision_without_a_copy_takes_a_longer_prompt_on_the_real_weights(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(self_check_module, "make_small_copy", lambda forward, layout: None)
    loaded = make_loaded("mistral", sliding_window=100)
    assert verdict_of(loaded).can_reuse

    monkeypatch.setattr(MlxRowLayer, "make_mask", ignore_windows)

    assert not verdict_of(loaded).can_reuse


@pytest.mark.parametrize("error", [MemoryError("made to fail"), RuntimeError("[malloc] Unable to allocate 5 bytes.")])
def test_memory_that_is_short_for_a_moment_is_no_verdict(
    error: Exception, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise error

    settings = Settings(device="cpu", cache_folder=tmp_path)
    monkeypatch.setitem(shared_check.REUSE_CHECKS, "restored", fail)
    with pytest.raises(ModelError, match="memory"):
        MlxEngine(make_loaded("llama"), settings)
    monkeypatch.undo()
    assert MlxEngine(make_loaded("llama"), settings).capabilities.can_reuse


def test_memory_that_does_not_suffice_for_a_copy_is_no_verdict_either(monkeypatch: MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("[metal::malloc] Resource limit exceeded.")

    monkeypatch.setattr("bough.engines.mlx.self_check.small_copy.make_random", fail)

    with pytest.raises(ModelError, match="memory"):
        verdict_of(make_loaded("mistral"))


def test_a_verdict_is_kept_and_used_at_the_next_load(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    settings = Settings(device="cpu", cache_folder=tmp_path)
    first = MlxEngine(make_loaded("falcon_h1"), settings)
    monkeypatch.setattr(engine, "self_check", None)

    second = MlxEngine(make_loaded("falcon_h1"), settings)

    assert second.capabilities == first.capabilities
    assert len(list((tmp_path / "self_checks").iterdir())) == 1


def test_a_verdict_depends_on_configuration_type_and_quantization_but_not_on_the_name(tmp_path: Path) -> None:
    loaded = make_loaded("llama")
    renamed = MlxModel(loaded.model, loaded.config | {"_name_or_path": "somewhere/else"})
    others = [
        make_loaded("llama", num_hidden_layers=3),
        load("llama", tmp_path / "half", "bfloat16"),
        quantized("llama", tmp_path / "quantized"),
    ]

    assert verdict_key(MlxForward(renamed)) == verdict_key(MlxForward(loaded))
    assert len({verdict_key(MlxForward(each)) for each in (loaded, *others)}) == 4


def test_the_check_leaves_no_memory_behind() -> None:
    loaded = make_loaded("gemma3_text")
    verdict_of(loaded)  # the first check makes what stays: constants of the model
    before = mx.get_active_memory()

    verdict_of(loaded)

    assert (mx.get_active_memory(), mx.get_cache_memory()) == (before, 0)


@pytest.mark.parametrize("name", ["gemma3_text", "mamba2"])
def test_a_model_that_one_thread_checked_can_be_used_and_checked_by_another(name: str, tmp_path: Path) -> None:
    loaded = load(name, tmp_path, "float32")
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(verdict_of, loaded).result()

    assert first.can_reuse
    assert verdict_of(loaded) == first
