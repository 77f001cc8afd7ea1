"""Random encoders of a few thousand weights with a real tokenizer, and the small files of sentence-transformers.

The same name always gives the same weights. The tokenizer knows every lowercase word, letter by letter.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

SEED = 17
SIZE = 32
CONTEXT = 64
_SPECIAL = ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")
_LETTERS = string.ascii_lowercase + string.digits + ".,:?!"
VOCABULARY = {
    token: number
    for number, token in enumerate([*_SPECIAL, *_LETTERS, *(f"##{letter}" for letter in _LETTERS), "the", "cat", "dog"])
}
_COMMON = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_OFFSET = {"max_position_embeddings": CONTEXT + 1}  # the first positions are for padding
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "bert": _COMMON,
    "xlm-roberta": {**_COMMON, **_OFFSET, "type_vocab_size": 1},
    "mpnet": {**_COMMON, "pad_token_id": 1, "max_position_embeddings": CONTEXT + 2},
    "distilbert": {**_COMMON, "dim": SIZE, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
    "modernbert": {**_COMMON, "local_attention": 8, "global_attn_every_n_layers": 2},
    "convbert": {**_COMMON, "embedding_size": SIZE, "conv_kernel_size": 3, "head_ratio": 1},
    "nomic_bert": {**_COMMON, "head_dim": 16},
    "qwen3": {**_COMMON, "num_key_value_heads": 1, "head_dim": 16},
    "gemma3_text": {**_COMMON, "num_key_value_heads": 1, "head_dim": 16, "use_bidirectional_attention": True},
}


def make_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer with the special tokens and token types of BERT."""
    backend = Tokenizer(models.WordPiece(VOCABULARY, unk_token="<unk>"))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **names, **options)


def make_encoder(folder: Path, family: str = "bert", auto_model: Any = AutoModel, **overrides: Any) -> Path:
    """A folder with a random encoder and its tokenizer, and without files of sentence-transformers."""
    config = AutoConfig.for_model(family, **{**FAMILIES[family], **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = auto_model.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            weight.data.add_(0.05 * torch.randn_like(weight))  # biases, too
    model.save_pretrained(folder)
    types = [] if family == "bert" else ["token_type_ids"]
    tokenizer = make_tokenizer(model_max_length=CONTEXT)
    tokenizer.model_input_names = [name for name in tokenizer.model_input_names if name not in types]
    tokenizer.save_pretrained(folder)
    return folder


def make_masked_lm(folder: Path, family: str = "bert") -> Path:
    """As `make_encoder`, of a masked language model: its names have a prefix, and the pooler is missing."""
    return make_encoder(folder, family, AutoModelForMaskedLM)


def make_reranker(folder: Path, family: str = "bert", num_labels: int = 1, **overrides: Any) -> Path:
    """A folder with a random classifier of pairs."""
    return make_encoder(folder, family, AutoModelForSequenceClassification, num_labels=num_labels, **overrides)


def write_modules(folder: Path, *steps: tuple[str, Mapping[str, Any]], name: str = "models") -> Path:
    """Add `modules.json`, and a folder with the configuration of each step behind the transformer."""
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"sentence_transformers.{name}.Transformer"}]
    for number, (kind, config) in enumerate(steps, start=1):
        path = f"{number}_{kind}"
        modules.append({"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{name}.{kind}"})
        if config or kind != "Normalize":
            write_json(folder / path / "config.json", config)
    write_json(folder / "modules.json", modules)
    return folder


def pooling(mode: str | Sequence[str] = "mean", **options: Any) -> tuple[str, Mapping[str, Any]]:
    """The step of pooling, as newer files say it."""
    return "Pooling", {"embedding_dimension": SIZE, "pooling_mode": mode, **options}


def old_pooling(**modes: bool) -> tuple[str, Mapping[str, Any]]:
    """The step of pooling, as older files say it: `cls_token=True`."""
    return "Pooling", {"word_embedding_dimension": SIZE, **{f"pooling_mode_{mode}": is_on for mode, is_on in modes.items()}}


def write_dense(folder: Path, in_features: int, out_features: int, *, bias: bool = True) -> None:
    """Add the random weights of a linear layer to the folder of a step."""
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        weights = {"linear.weight": torch.randn(out_features, in_features) / 8}
        if bias:
            weights["linear.bias"] = torch.randn(out_features) / 8
    save_file(weights, folder / "model.safetensors")


def write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content), encoding="utf-8")
