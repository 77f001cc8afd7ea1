"""Tiny models in folders of 16-bit weights, engines that keep them packed, and what plain transformers makes of the same.

The weights are larger than a fresh model's, so that every layer is heard in the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from bough.config import Settings
from bough.engines.torch import TorchEngine
from bough.engines.torch.cpu.library import load_kernels
from bough.engines.torch.cpu.packing import Packing, install
from bough.engines.torch.cpu.route import WeightsChoice
from bough.engines.torch.cpu.weight import PackedWeight, Products
from bough.engines.torch.model_loader import load_model
from bough.errors import KernelsMissing
from bough.models.weights.packed import row_bytes
from tests.tiny_models import CONFIGS, SEED

GAIN = 0.15
SHAPE = CONFIGS["llama"]


def has_kernels() -> bool:
    """Whether this machine can keep weights packed."""
    try:
        load_kernels()
    except KernelsMissing:
        return False
    return True


def make_wide_model(model_type: str, **config: Any) -> Any:
    """A random float32 model of this type, by default in the shape of the tiny models."""
    shape = CONFIGS.get(model_type, SHAPE) | {"model_type": model_type, "initializer_range": GAIN} | config
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith((".bias", "norm.weight")):  # which start as zeros and ones
                nn.init.normal_(parameter, mean=float(parameter.data.mean()), std=GAIN)
    return model.eval()


def save_model(model: Any, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Save a model in this type. Leaves the model's own weights as they are."""
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=weights)
    return folder


def load_packed(folder: Path, weights: str = "auto", **settings: Any) -> TorchEngine:
    """An engine over the model in `folder`; what self-checks find is kept beside it."""
    return TorchEngine.load(folder, make_settings(folder, weights, **settings))


def make_settings(folder: Path, weights: str = "auto", **settings: Any) -> Settings:
    """Rows in float32 unless the test wants others: what it compares with has no rows at all."""
    chosen = {"device": "cpu", "weights": weights, "cache_folder": folder.parent / "verdicts", "kv": "float32"}
    return Settings(**chosen | settings)


def make_reference(folder: Path, weights: str = "auto") -> Callable[[list[int]], Tensor]:
    """All logits of a run by transformers' own modules without a cache, with the same weights unpacked to float32."""
    model = unpack_model(load_model(folder, make_settings(folder, weights)).model)
    model.set_attn_implementation("eager")

    @torch.inference_mode()
    def compute(ids: list[int]) -> Tensor:
        logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        return logits

    return compute


def make_state_reference(folder: Path, weights: str = "auto") -> Callable[[list[int]], Tensor]:
    """As `make_reference`, for the hidden states that the head reads."""
    model = unpack_model(load_model(folder, make_settings(folder, weights)).model)
    model.set_attn_implementation("eager")

    @torch.inference_mode()
    def compute(ids: list[int]) -> Tensor:
        hidden: Tensor = model.base_model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
        return hidden

    return compute


def unpack_model(model: Any) -> Any:
    """The same model with plain parameters in the place of packed weights."""
    for module in model.modules():
        for name, weight in list(vars(module).items()):
            if isinstance(weight, PackedWeight):
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(weight.unpack(), requires_grad=False))
    return model


def random_blocks(type_name: str, num_rows: int, num_columns: int, spread: float) -> np.ndarray:
    """Rows of random bytes as blocks of a type, with scales so that the weights have this standard deviation."""
    kind = gguf.GGMLQuantizationType[type_name]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    random = np.random.default_rng(num_rows + num_columns)
    blocks = random.integers(0, 256, (num_rows, row_bytes(type_name, num_columns)), np.uint8)
    starts = [size - 2] if type_name == "Q6_K" else [0] if type_name in ("Q4_0", "Q5_0", "Q8_0") else [0, 2]
    at = [block * size + start for block in range(blocks.shape[1] // size) for start in starts]
    scales = random.uniform(-1.0, 1.0, (num_rows, len(at))).astype(np.float16)
    for factor in (1.0, None):
        scales = scales if factor else (scales * (spread / gguf.dequantize(blocks, kind).std())).astype(np.float16)
        for i, start in enumerate(at):
            blocks[:, start : start + 2] = scales[:, [i]].view(np.uint8)
    return blocks


def pack_in_blocks(model: Any, type_name: str) -> WeightsChoice:
    """Give every weight that can be packed random blocks of this type; returns how the engine is to take them."""
    products = Products(load_kernels(), 1)
    packed: dict[str, PackedWeight] = {}
    for name, parameter in list(model.named_parameters()):
        if name.endswith(("proj.weight", "embed_tokens.weight", "lm_head.weight")):
            rows, columns = parameter.shape
            blocks = torch.from_numpy(random_blocks(type_name, rows, columns, 1.5 / columns**0.5))
            matrix = products.pack(type_name, rows, columns, lambda first, last, blocks=blocks: blocks[first:last])
            packed[name] = PackedWeight(matrix, parameter.shape, products)
    install(model, packed)
    return WeightsChoice(Packing(products))


def differs_by(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of logits, in units of their spread where that is more than one."""
    return float((found - wanted).abs().max()) / max(1.0, float(wanted.std()))
