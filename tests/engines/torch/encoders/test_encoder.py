"""Encoders on torch: vectors and scores as transformers gives them, with the pooling written out here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from bough.config import Settings
from bough.engines.torch.encoders import TorchEncoder
from bough.errors import EngineError, SettingsError, UnsupportedModel
from bough.models.encoders.files import EmbedderFiles, Pooling, RerankerFiles, read_embedder, read_reranker
from bough.models.files import ModelFiles
from bough.types import EncoderInput
from tests.tiny_encoders import (
    CONTEXT,
    FAMILIES,
    SIZE,
    make_encoder,
    make_masked_lm,
    make_reranker,
    old_pooling,
    pooling,
    write_dense,
    write_json,
    write_modules,
)

ON_CPU = Settings(device="cpu")
LENGTHS = (1, 3, 17, CONTEXT, 8)
BATCH = [EncoderInput([5 + (11 * length + place * place) % 60 for place in range(length)]) for length in LENGTHS]
PADDED = [name for name in FAMILIES if name != "convbert"]


def load(folder: Path, settings: Settings = ON_CPU, description=None) -> TorchEncoder:
    return TorchEncoder.load(folder, description or read_embedder(ModelFiles("small", folder)), settings)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each family, made once."""
    root = tmp_path_factory.mktemp("encoders")
    return {family: make_encoder(root / family, family) for family in FAMILIES}


def states_of(folder: Path, text: EncoderInput) -> torch.Tensor:
    """The states of one text without any padding, by transformers."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor([text.ids])).last_hidden_state[0]


BY_HAND = {
    "cls": lambda states: states[0],
    "lasttoken": lambda states: states[-1],
    "max": lambda states: states.max(dim=0).values,
    "mean": lambda states: states.sum(dim=0) / len(states),
    "mean_sqrt_len_tokens": lambda states: states.sum(dim=0) / math.sqrt(len(states)),
    "weightedmean": lambda states: (
        sum((place + 1) * state for place, state in enumerate(states)) / sum(range(1, len(states) + 1))
    ),
}


def difference(found, expected) -> float:
    return (torch.tensor(found) - torch.stack(list(expected))).abs().max().item()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_pooling_of_a_batch_is_that_of_each_text_alone(folders, family):
    every = EmbedderFiles(Pooling(tuple(BY_HAND)))
    engine = load(folders[family], description=every)
    batches = [BATCH] if engine.max_batch_tokens else [[text] for text in BATCH]

    found = [numbers for batch in batches for numbers in engine.encode(batch)]

    states = [states_of(folders[family], text) for text in BATCH]
    assert difference(found, [torch.cat([pool(each) for pool in BY_HAND.values()]) for each in states]) < 1e-5
    assert engine.dimensions == SIZE * len(BY_HAND)


@pytest.mark.parametrize("family", PADDED)
def test_families_that_mask_their_padding_run_in_batches(folders, family):
    assert load(folders[family]).max_batch_tokens == 2_048


def test_a_family_that_reads_its_padding_runs_texts_one_by_one(folders):
    engine = load(folders["convbert"])

    assert engine.max_batch_tokens == 0
    assert "one by one: padding changes the numbers" in engine.describe()["batching"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_longest_text_is_as_long_as_the_positions_allow(folders, family):
    engine = load(folders[family])

    assert engine.context_tokens in (CONTEXT, CONTEXT + 1)
    assert len(engine.encode([EncoderInput([5] * engine.context_tokens)])[0]) == SIZE


def test_dense_layers_normalising_and_cutting_follow_the_pooling(tmp_path):
    folder = make_encoder(tmp_path / "small")
    tanh = {"in_features": 2 * SIZE, "out_features": 16, "bias": True}  # its function is Tanh if it names none
    plain = {
        "in_features": 16,
        "out_features": 12,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    steps = [old_pooling(cls_token=True, max_tokens=True), ("Dense", tanh), ("Dense", plain), ("Normalize", {})]
    write_modules(folder, *steps)
    write_dense(folder / "2_Dense", 2 * SIZE, 16)
    write_dense(folder / "3_Dense", 16, 12, bias=False)
    write_json(folder / "config_sentence_transformers.json", {"truncate_dim": 10})
    engine = load(folder)

    found = engine.encode(BATCH)

    first = load_file(folder / "2_Dense" / "model.safetensors")
    second = load_file(folder / "3_Dense" / "model.safetensors")
    expected = []
    for text in BATCH:
        states = states_of(folder, text)
        vector = torch.cat([states[0], states.max(dim=0).values])
        vector = torch.tanh(first["linear.weight"] @ vector + first["linear.bias"])
        vector = second["linear.weight"] @ vector
        expected.append((vector / vector.norm())[:10])
    assert difference(found, expected) < 1e-5
    assert engine.dimensions == 10
    shown = "cls and max, then Dense 64 to 16 (Tanh), then Dense 16 to 12 (Identity), then Normalize"
    assert engine.describe()["pooling"] == shown


def test_the_prompt_is_left_out_of_the_pooling_if_the_files_say_so(tmp_path):
    folder = write_modules(make_encoder(tmp_path / "small"), pooling("mean", include_prompt=False))
    texts = [EncoderInput(BATCH[2].ids, num_prompt=4), EncoderInput(BATCH[4].ids)]

    found = load(folder).encode(texts)

    expected = [states_of(folder, texts[0])[4:].mean(dim=0), states_of(folder, texts[1]).mean(dim=0)]
    assert difference(found, expected) < 1e-5


def test_an_encoder_inside_a_masked_language_model_is_found_by_its_prefix(tmp_path):
    folder = make_masked_lm(tmp_path / "small")  # which has no pooler

    engine = load(folder)

    assert difference(engine.encode(BATCH), [states_of(folder, text).mean(dim=0) for text in BATCH]) < 1e-5
    assert engine.describe()["pooling"].startswith("mean: the folder does not say how")


def test_scores_of_pairs_have_token_types_and_the_activation(tmp_path):
    folder = make_reranker(tmp_path / "small")
    pairs = [EncoderInput(text.ids, [place % 2 for place in range(len(text.ids))]) for text in BATCH]
    engine = load(folder, description=read_reranker(ModelFiles("small", folder)))

    found = engine.encode(pairs)

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = [
            model(input_ids=torch.tensor([each.ids]), token_type_ids=torch.tensor([each.type_ids])).logits[0]
            for each in pairs
        ]
    assert difference(found, [torch.sigmoid(logit) for logit in logits]) < 1e-5
    raw = load(folder, description=RerankerFiles("Identity")).encode(pairs)
    assert difference(raw, logits) < 1e-5


def test_a_classifier_that_can_take_no_batch_scores_pairs_one_by_one(tmp_path):
    folder = make_reranker(tmp_path / "small", "qwen3", pad_token_id=None)

    engine = load(folder, description=RerankerFiles())

    assert engine.max_batch_tokens == 0
    assert len(engine.encode([BATCH[1]])) == 1


def test_a_classifier_of_several_labels_is_refused_with_their_number(tmp_path):
    folder = make_reranker(tmp_path / "small", num_labels=3)

    with pytest.raises(UnsupportedModel, match="a classifier of 3 labels, and rerankers have 1"):
        load(folder, description=RerankerFiles())


def test_a_missing_weight_is_an_error_and_never_random(tmp_path):
    folder = make_encoder(tmp_path / "small")
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, file, {"format": "pt"})

    with pytest.raises(UnsupportedModel, match=r"1 are missing, such as encoder\.layer\.1\.output\.dense\.weight"):
        load(folder)


def test_a_classifier_without_its_head_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match=r"are missing, such as classifier"):
        load(make_encoder(tmp_path / "small", num_labels=1), description=RerankerFiles())


def test_pickled_weights_are_refused(tmp_path):
    folder = make_encoder(tmp_path / "small")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(UnsupportedModel, match="pickles are never loaded"):
        load(folder)


@pytest.mark.parametrize(
    ("size", "num_weights", "expected"),
    [(48, 48, "is for vectors of 48 numbers, and they have 32"), (SIZE, 48, r"2_Dense/model\.safetensors cannot be used")],
)
def test_a_step_whose_sizes_do_not_fit_is_named(tmp_path, size, num_weights, expected):
    folder = make_encoder(tmp_path / "small")
    write_modules(folder, pooling(), ("Dense", {"in_features": size, "out_features": 8}))
    write_dense(folder / "2_Dense", num_weights, 8)

    with pytest.raises(UnsupportedModel, match=expected):
        load(folder)


@pytest.mark.parametrize("weights", ["packed", "q8_0", "q4_0"])
def test_packed_weights_are_refused(folders, weights):
    with pytest.raises(SettingsError, match=f"weights is '{weights}', and encoders are never packed"):
        load(folders["bert"], Settings(device="cpu", weights=weights))


def test_the_settings_choose_type_and_context(folders):
    engine = load(folders["bert"], Settings(device="cpu", dtype="bfloat16", context=20))
    exact = load(folders["bert"])

    assert (engine.info.dtype, engine.context_tokens) == ("bfloat16", 20)
    assert difference(engine.encode(BATCH[:2]), map(torch.tensor, exact.encode(BATCH[:2]))) < 0.1


def test_numbers_that_are_not_finite_are_an_error(folders):
    engine = load(folders["bert"])
    engine._model.embeddings.word_embeddings.weight[7] = float("nan")

    with pytest.raises(EngineError, match="numbers that are not finite, in float32"):
        engine.encode([EncoderInput([2, 7, 3])])
    assert len(engine.encode([EncoderInput([2, 8, 3])])) == 1
