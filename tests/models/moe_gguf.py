"""A GGUF file of one layer of a qwen3_moe with random blocks, also of types that gguf can read and not write."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from tests.models.tiny_gguf import add_tokenizer
from tests.models.tiny_tokenizer import CHATML, byte_level

WIDTH = 256  # columns of a block of Q4_K, Q5_K and Q6_K
NUM_EXPERTS = 3
EXPERT_WIDTH = 768  # the only one that transformers reads: it ignores the key and takes its default
Kind = gguf.GGMLQuantizationType

SHAPES: dict[str, tuple[int, ...]] = {
    "output_norm.weight": (WIDTH,),
    "blk.0.attn_norm.weight": (WIDTH,),
    "blk.0.ffn_norm.weight": (WIDTH,),
    "blk.0.attn_q_norm.weight": (WIDTH // 2,),
    "blk.0.attn_k_norm.weight": (WIDTH // 2,),
    "blk.0.attn_q.weight": (WIDTH, WIDTH),
    "blk.0.attn_k.weight": (WIDTH // 2, WIDTH),
    "blk.0.attn_v.weight": (WIDTH // 2, WIDTH),
    "blk.0.attn_output.weight": (WIDTH, WIDTH),
    "blk.0.ffn_gate_inp.weight": (NUM_EXPERTS, WIDTH),
    "blk.0.ffn_gate_exps.weight": (NUM_EXPERTS, EXPERT_WIDTH, WIDTH),
    "blk.0.ffn_up_exps.weight": (NUM_EXPERTS, EXPERT_WIDTH, WIDTH),
    "blk.0.ffn_down_exps.weight": (NUM_EXPERTS, WIDTH, EXPERT_WIDTH),
}
TYPES = {
    "token_embd.weight": Kind.Q6_K,
    "blk.0.attn_q.weight": Kind.Q4_K,
    "blk.0.attn_k.weight": Kind.Q5_K,
    "blk.0.attn_v.weight": Kind.Q6_K,
    "blk.0.attn_output.weight": Kind.BF16,
    "blk.0.ffn_gate_exps.weight": Kind.Q4_K,
    "blk.0.ffn_up_exps.weight": Kind.Q4_K,
    "blk.0.ffn_down_exps.weight": Kind.Q8_0,
}
_SCALES_AT = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}  # bytes of a block that are scales of 16 bits


def write_moe_gguf(file: Path, types: dict[str, Kind] | None = None) -> None:
    """Write the file; `types` changes those of some tensors."""
    hf, kinds = byte_level(CHATML), TYPES | (types or {})
    writer, random = gguf.GGUFWriter(file, "qwen3moe"), np.random.default_rng(5)
    _add_shape(writer, len(hf))
    add_tokenizer(writer, hf)
    for name, shape in {"token_embd.weight": (len(hf), WIDTH), **SHAPES}.items():
        kind = kinds.get(name, Kind.F32)
        blocks = random_blocks(random, shape, kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_blocks(random: np.random.Generator, shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    """Random values of a type: quantized, or else random bytes with small scales, so that all values are finite."""
    if kind not in _SCALES_AT:
        return gguf.quantize(random.standard_normal(shape).astype(np.float32), kind)
    columns, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // columns, num_bytes), np.uint8)
    for at in _SCALES_AT[kind]:
        scales = random.uniform(0.001, 0.01, (*blocks.shape[:-1], 1)).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _add_shape(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(WIDTH // 2)
    writer.add_value_length(WIDTH // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(vocab_size)
    writer.add_expert_count(NUM_EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(EXPERT_WIDTH)
