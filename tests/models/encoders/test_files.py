"""The small files of sentence-transformers: every form of them, and what is told if they are broken."""

from __future__ import annotations

import pytest

from bough.errors import UnsupportedModel
from bough.models.encoders.files import (
    Dense,
    EmbedderFiles,
    LayerNorm,
    ModelKind,
    Normalize,
    Pooling,
    RerankerFiles,
    TokenizerOptions,
    find_kind,
    read_embedder,
    read_reranker,
)
from bough.models.files import ModelFiles
from tests.tiny_encoders import old_pooling, pooling, write_json, write_modules

DENSE = {"in_features": 32, "out_features": 8, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}


def read(folder):
    return read_embedder(ModelFiles("small", folder))


def test_a_folder_without_such_files_has_the_default_of_mean_pooling(tmp_path):
    assert read(tmp_path) == EmbedderFiles(Pooling(("mean",)), is_default=True)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (old_pooling(cls_token=True, mean_tokens=False), ("cls",)),
        (old_pooling(mean_tokens=True, max_tokens=True, cls_token=True), ("cls", "max", "mean")),
        (old_pooling(mean_sqrt_len_tokens=True), ("mean_sqrt_len_tokens",)),
        (old_pooling(weightedmean_tokens=True, lasttoken=True), ("weightedmean", "lasttoken")),
        (old_pooling(mean_tokens=False), ("mean",)),
        (pooling("lasttoken"), ("lasttoken",)),
        (pooling(["mean", "cls"]), ("mean", "cls")),
    ],
)
def test_old_and_new_fields_say_the_pooling(tmp_path, step, expected):
    write_modules(tmp_path, step)

    assert read(tmp_path).pooling == Pooling(expected)


def test_the_steps_behind_the_pooling_are_read_in_their_order(tmp_path):
    steps = [("Dense", DENSE), ("Dropout", {"dropout": 0.1}), ("LayerNorm", {"dimension": 8}), ("Normalize", {})]
    write_modules(tmp_path, pooling(include_prompt=False), *steps, name="base.modules.any")
    for name in ("2_Dense", "4_LayerNorm"):
        (tmp_path / name / "model.safetensors").write_bytes(b"")

    found = read(tmp_path)

    assert not found.pooling.includes_prompt
    dense = Dense(tmp_path / "2_Dense", 32, 8, has_bias=False, activation="Identity")
    assert found.steps == (dense, LayerNorm(tmp_path / "4_LayerNorm", 8), Normalize())


def test_length_case_prompt_and_dimensions_are_read(tmp_path):
    write_modules(tmp_path, pooling())
    write_json(tmp_path / "sentence_roberta_config.json", {"max_seq_length": 128, "do_lower_case": True})
    prompts = {"prompts": {"query": "query: ", "document": ""}, "default_prompt_name": "query", "truncate_dim": 16}
    write_json(tmp_path / "config_sentence_transformers.json", prompts)

    found = read(tmp_path)

    assert found.text == TokenizerOptions(128, lowercases=True, prompt="query: ")
    assert found.dimensions == 16


def test_a_reranker_has_the_activation_that_its_files_name(tmp_path):
    write_json(tmp_path / "config.json", {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}})
    assert read_reranker(ModelFiles("small", tmp_path)) == RerankerFiles("Identity")

    write_json(tmp_path / "config.json", {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"})
    assert read_reranker(ModelFiles("small", tmp_path)) == RerankerFiles("Tanh")

    write_json(tmp_path / "config.json", {})
    assert read_reranker(ModelFiles("small", tmp_path)) == RerankerFiles("Sigmoid")


def write_broken_list(folder):
    (folder / "modules.json").write_text("[{", encoding="utf-8")


BROKEN = {
    "no JSON": (write_broken_list, "modules.json: Expecting"),
    "no list": (lambda folder: write_json(folder / "modules.json", {}), "modules.json holds dict"),
    "no type": (lambda folder: write_json(folder / "modules.json", [{"path": ""}]), "must have a type and a path"),
    "own code": (
        lambda folder: write_json(folder / "modules.json", [{"type": "custom_st.Transformer", "path": ""}]),
        "custom_st.Transformer: code that comes with a model is not run",
    ),
    "a path that leads out": (
        lambda folder: write_json(
            folder / "modules.json", [{"type": "sentence_transformers.models.Pooling", "path": ".."}]
        ),
        r"path '\.\.' for Pooling",
    ),
    "no pooling": (lambda folder: write_modules(folder, ("Normalize", {})), "has the modules Transformer, Normalize"),
    "an unknown mode": (lambda folder: write_modules(folder, pooling("median")), "pooling_mode 'median'"),
    "no mode": (lambda folder: write_modules(folder, pooling([])), r"pooling_mode \[\]"),
    "no configuration of the pooling": (
        lambda folder: (write_modules(folder, pooling()), (folder / "1_Pooling" / "config.json").unlink()),
        "cannot read .*1_Pooling/config.json",
    ),
    "an unknown step": (lambda folder: write_modules(folder, pooling(), ("LSTM", {"x": 1})), "has the module LSTM"),
    "no weights of a step": (
        lambda folder: write_modules(folder, pooling(), ("Dense", DENSE)),
        "no safetensors weights in .*2_Dense: it has no model.safetensors",
    ),
    "an unknown activation": (
        lambda folder: (
            write_modules(folder, pooling(), ("Dense", DENSE | {"activation_function": "os.system"})),
            (folder / "2_Dense" / "model.safetensors").write_bytes(b""),
        ),
        "the activation 'os.system'",
    ),
    "a length below 1": (
        lambda folder: (
            write_modules(folder, pooling()),
            write_json(folder / "sentence_bert_config.json", {"max_seq_length": -1}),
        ),
        "max_seq_length -1",
    ),
    "an unknown prompt": (
        lambda folder: (
            write_modules(folder, pooling()),
            write_json(folder / "config_sentence_transformers.json", {"default_prompt_name": "query"}),
        ),
        "default_prompt_name 'query', and no prompt",
    ),
    "another output": (
        lambda folder: (
            write_modules(folder, pooling()),
            write_json(folder / "sentence_bert_config.json", {"modality_config": {"text": {"method_output_name": "x"}}}),
        ),
        r"modality_config for text \['x'\]",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_files_that_cannot_be_followed_are_named_with_the_value(tmp_path, what):
    breaks, expected = BROKEN[what]
    breaks(tmp_path)

    with pytest.raises(UnsupportedModel, match=expected):
        read(tmp_path)


def test_pickled_weights_of_a_step_are_refused(tmp_path):
    write_modules(tmp_path, pooling(), ("Dense", DENSE))
    (tmp_path / "2_Dense" / "pytorch_model.bin").write_bytes(b"a pickle")

    with pytest.raises(UnsupportedModel, match=r"it has pytorch_model\.bin, and pickles are never loaded"):
        read(tmp_path)


def kind_of(folder, model_type, *architectures):
    write_json(folder / "config.json", {"model_type": model_type, "architectures": list(architectures)})
    return find_kind(ModelFiles("small", folder))


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("llama", "LlamaForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("bert", "BertLMHeadModel"),
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("mamba", "MambaModel"),
    ],
)
def test_models_with_a_head_for_the_next_token_generate(tmp_path, model_type, architecture):
    assert kind_of(tmp_path, model_type, architecture) is ModelKind.GENERATOR


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [("bert", "BertModel"), ("new", "NewForMaskedLM"), ("bert", "BertForPreTraining"), ("t5", "T5EncoderModel")],
)
def test_encoders_embed(tmp_path, model_type, architecture):
    assert kind_of(tmp_path, model_type, architecture) is ModelKind.EMBEDDER


def test_an_encoder_whose_configuration_names_no_architecture_embeds(tmp_path):
    assert kind_of(tmp_path, "mpnet") is ModelKind.EMBEDDER


def test_classifiers_rerank(tmp_path):
    assert kind_of(tmp_path, "xlm-roberta", "XLMRobertaForSequenceClassification") is ModelKind.RERANKER


def test_files_of_sentence_transformers_make_an_embedder_of_a_language_model(tmp_path):
    write_modules(tmp_path, pooling("lasttoken"))

    assert kind_of(tmp_path, "qwen3", "Qwen3ForCausalLM") is ModelKind.EMBEDDER


def test_a_cross_encoder_of_sentence_transformers_is_a_reranker(tmp_path):
    write_modules(tmp_path)
    write_json(tmp_path / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})

    assert kind_of(tmp_path, "bert", "BertForSequenceClassification") is ModelKind.RERANKER


def test_a_sparse_encoder_is_refused_by_its_kind(tmp_path):
    write_modules(tmp_path)
    write_json(tmp_path / "config_sentence_transformers.json", {"model_type": "SparseEncoder"})

    with pytest.raises(UnsupportedModel, match="model_type 'SparseEncoder'"):
        kind_of(tmp_path, "bert", "BertForMaskedLM")
