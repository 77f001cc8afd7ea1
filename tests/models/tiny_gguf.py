"""A GGUF file of one small llama layer or two, with a tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

from tests.models.tiny_tokenizer import CHATML, byte_level
from tests.tiny_models import CONFIGS

WIDTH = CONFIGS["llama"]["hidden_size"]


def write_gguf(file: Path, kind: gguf.GGMLQuantizationType, without: str = "") -> dict[str, np.ndarray]:
    """Write the file with its matrices held as `kind`; returns the tensors as they were. `without` leaves one out."""
    hf = byte_level(CHATML)
    writer = gguf.GGUFWriter(file, "llama")
    _add_shape(writer, len(hf))
    _add_tokenizer(writer, hf)
    tensors = _make_tensors(len(hf))
    for name, values in tensors.items():
        if name != without:
            held = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(values, held), raw_dtype=held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _add_shape(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(vocab_size)


def _add_tokenizer(writer: gguf.GGUFWriter, hf) -> None:
    model = json.loads(hf.backend_tokenizer.to_str())["model"]
    tokens = hf.convert_ids_to_tokens(list(range(len(hf))))
    kinds = [
        gguf.TokenType.CONTROL if token.startswith("<|") and token.endswith("|>") else gguf.TokenType.NORMAL
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHATML)


def _make_tensors(vocab_size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    shapes = {"token_embd.weight": (vocab_size, WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(2):
        for name, rows in (("attn_q", WIDTH), ("attn_k", WIDTH // 2), ("attn_v", WIDTH // 2), ("attn_output", WIDTH)):
            shapes[f"blk.{layer}.{name}.weight"] = (rows, WIDTH)
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            shapes[f"blk.{layer}.{name}.weight"] = (WIDTH, WIDTH)
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{name}.weight"] = (WIDTH,)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
