"""A GGUF file of two small layers of a llama or a kin of it, with a tokenizer and a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np

from bough.models import GgufSupport
from tests.models.tiny_tokenizer import CHATML, byte_level
from tests.tiny_models import CONFIGS

WIDTH = CONFIGS["llama"]["hidden_size"]
FOR_TORCH = GgufSupport(is_readable=False, is_convertible=True)
FOR_MLX = GgufSupport(is_readable=True, is_convertible=True)


def write_gguf(
    file: Path,
    kind: gguf.GGMLQuantizationType,
    without: str = "",
    architecture: str = "llama",
    scale: float = 1.0,
    rotary_factors: Sequence[float] = (),
    split: str = "",
    adds_start: bool | None = None,
    sampling: Mapping[str, float] | None = None,
) -> dict[str, np.ndarray]:
    """Write the file with its matrices held as `kind`; returns the tensors as they were. `without` leaves one out.

    `split` is how the tokenizer is said to split words; `adds_start` is said if it is not None. `sampling` is what
    the file recommends, by the keys below `general.sampling`.
    """
    hf = byte_level(CHATML)
    writer = gguf.GGUFWriter(file, architecture)
    _add_shape(writer, len(hf), architecture)
    add_tokenizer(writer, hf)
    if split:
        writer.add_tokenizer_pre(split)
    if adds_start is not None:
        writer.add_add_bos_token(adds_start)
    for name, value in (sampling or {}).items():
        add = writer.add_int32 if isinstance(value, int) else writer.add_float32
        add(f"general.sampling.{name}", value)
    tensors = {name: scale * values for name, values in _make_tensors(len(hf), architecture).items()}
    if rotary_factors:
        tensors["rope_freqs.weight"] = np.array(rotary_factors, np.float32)
    for name, values in tensors.items():
        if name != without:
            held = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quantize(values, held), raw_dtype=held)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _head_size(architecture: str) -> int:
    return 128 if architecture == "qwen3" else WIDTH // 4


def _add_shape(writer: gguf.GGUFWriter, vocab_size: int, architecture: str) -> None:
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(_head_size(architecture))
    writer.add_value_length(_head_size(architecture))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(vocab_size)


def add_tokenizer(writer: gguf.GGUFWriter, hf) -> None:
    """Write a byte-level tokenizer and its template to a file."""
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


def _make_tensors(vocab_size: int, architecture: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    head = _head_size(architecture)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(2):
        shapes[f"blk.{layer}.attn_output.weight"] = (WIDTH, 4 * head)
        for name, rows in (("attn_q", 4 * head), ("attn_k", 2 * head), ("attn_v", 2 * head)):
            shapes[f"blk.{layer}.{name}.weight"] = (rows, WIDTH)
            if architecture == "qwen2":
                shapes[f"blk.{layer}.{name}.bias"] = (rows,)
        for name in ("ffn_gate", "ffn_up", "ffn_down"):
            shapes[f"blk.{layer}.{name}.weight"] = (WIDTH, WIDTH)
        for name in ("attn_norm", "ffn_norm"):
            shapes[f"blk.{layer}.{name}.weight"] = (WIDTH,)
        if architecture == "qwen3":
            shapes |= {f"blk.{layer}.{name}.weight": (head,) for name in ("attn_q_norm", "attn_k_norm")}
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name in tensors:
        if name.startswith("blk.") and tensors[name].ndim > 1:
            tensors[name] /= WIDTH**0.5  # a model with larger ones amplifies what rounding does
    # vectors stay float32 in every file, but converting one of float16 rounds them: these it leaves as they are
    return {name: each if each.ndim > 1 else each.astype(np.float16).astype(np.float32) for name, each in tensors.items()}


def split_gguf(folder: Path, names: list[str]) -> list[Path]:
    """A tiny model in as many parts, with keys in the first alone."""
    write_gguf(folder / "whole.gguf", gguf.GGMLQuantizationType.Q8_0)
    library = gguf.GGUFReader(folder / "whole.gguf")
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(folder / name, "llama")
        if not number:
            _copy_fields(library, writer)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", len(names))
        writer.add_int32("split.tensors.count", len(library.tensors))
        for tensor in library.tensors[number :: len(names)]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return [folder / name for name in names]


def _copy_fields(library: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for name, field in library.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
