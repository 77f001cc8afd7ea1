"""What a model does, by its configuration and the files of sentence-transformers."""

from __future__ import annotations

import pytest

from bough.errors import UnsupportedModel
from bough.models.encoders.kinds import ModelKind, find_kind
from bough.models.files import ModelFiles
from tests.tiny_encoders import pooling, write_json, write_modules


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
