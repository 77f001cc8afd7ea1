"""Reads the structure of a model from its modules: what the kernels need to run a whole step of it.

Known are decoders of the Llama kind: RMS norms before, or before and after, attention and MLP; separate or joined
projections with or without biases; norms of queries and keys by head; rotations by halves, which may differ by layer or be
absent; grouped queries, windows and soft caps; SwiGLU and GeGLU. What a module computes is tried out where its name could
mislead. A model with anything else has no such structure, and runs in transformers' own forward pass. The self-check
compares what was found here with that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bough.cache.tree.state import Group
from bough.engines.torch.cpu.matrix import Matrix
from bough.engines.torch.cpu.weight import PackedWeight
from bough.engines.torch.layout import TorchLayout

_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "gate_up_proj", "down_proj", "act_fn", "activation_fn"}
_NORMS = {"input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}
_EPSILONS = ("variance_epsilon", "eps")
_NAMED = 3  # parts that a reason names
_IDLE = (nn.Dropout, nn.Identity)
_STATIC_ROTATIONS = {"default", "linear", "llama3", "yarn"}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


class UnknownStructure(Exception):
    """The model has a part that the kernels do not know. The text says which, as the end of a sentence."""


@dataclass(frozen=True)
class LayerStructure:
    """One decoder layer. A norm that is None is not there. `group` and `layer_in_group` say where its rows lie in a lane.

    `rotation` is an index into `Structure.rotations`; -1 is none.
    """

    norm_in: Tensor | None
    norm_attention: Tensor | None
    norm_mlp: Tensor | None
    norm_mlp_out: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    group: int
    layer_in_group: int
    rotation: int
    window: int

    @property
    def norms(self) -> tuple[Tensor | None, ...]:
        """Norms applied to the whole row, not to each head."""
        return self.norm_in, self.norm_attention, self.norm_mlp, self.norm_mlp_out


@dataclass(frozen=True)
class Structure:
    """A whole model. `rotations` each give cosines and sines [positions, dim] for a range of positions.

    `kv` is the type in which lanes keep its rows.
    """

    layers: list[LayerStructure]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    score_cap: float
    logit_cap: float
    logit_divisor: float
    residual: float
    activation: str
    norm: Tensor
    head: Matrix
    embed_tokens: Callable[[Tensor], Tensor]
    embedding_factor: float
    rotations: list[Callable[[Tensor], tuple[Tensor, Tensor]]]
    rotary_dim: int
    groups: tuple[Group, ...]
    kv: str

    @property
    def hidden_size(self) -> int:
        return self.norm.numel()


def read_structure(model: Any, layout: TorchLayout) -> Structure:
    """The structure of a float32 model on the CPU. Raises UnknownStructure."""
    try:
        structure = _read(model, layout)
    except (UnknownStructure, MemoryError):
        raise
    except Exception as error:  # modules of another family may lack anything, and fail in any way when they are tried
        raise UnknownStructure(f"its modules are not those of a Llama-like model ({error})") from error
    _require_fit(structure)
    return structure


def _read(model: Any, layout: TorchLayout) -> Structure:
    if layout.states:
        raise UnknownStructure("it has recurrent layers")
    decoder = _require(getattr(model, "model", None), "it has no decoder named `model`")
    decoder_layers = list(_require(getattr(decoder, "layers", None), "its decoder has no `layers`"))
    head = _require(getattr(model, "lm_head", None), "it has no `lm_head`")
    _require_only(model, {"model", "lm_head"}, "the model")
    _require_only(decoder, {"embed_tokens", "layers", "norm", "rotary_emb"}, "its decoder")
    if layout.num_layers != len(decoder_layers):
        raise UnknownStructure("not every layer keeps keys and values of its own")
    rotations = _Rotations(decoder.rotary_emb, model.config)
    first = decoder_layers[0].self_attn
    shape = next(iter(layout.rows.values()))
    _require_plain_rows(layout)
    config = model.config
    norm = _norm_weight(decoder.norm)
    layers = [_read_layer(i, layer, layout, rotations) for i, layer in enumerate(decoder_layers)]
    _same([_eps_of(module) for module in decoder.modules() if _is_norm(module)], "epsilons")
    return Structure(
        layers=layers,
        num_heads=layers[0].q.num_rows // shape.key_dim,
        num_kv_heads=shape.heads,
        head_dim=shape.key_dim,
        eps=_eps_of(decoder.norm),
        scale=float(_same([layer.self_attn.scaling for layer in decoder_layers], "scalings")),
        score_cap=float(getattr(first, "attn_logit_softcapping", None) or 0.0),
        logit_cap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
        logit_divisor=float(getattr(config, "logits_scaling", None) or 1.0),
        residual=float(_same([getattr(layer, "residual_multiplier", 1.0) for layer in decoder_layers], "residuals")),
        activation=_same([_activation_of(layer.mlp) for layer in decoder_layers], "activations"),
        norm=norm,
        head=_projection(head),
        embed_tokens=decoder.embed_tokens,
        embedding_factor=float(getattr(decoder, "embedding_multiplier", None) or 1.0),
        rotations=rotations.kinds,
        rotary_dim=rotations.dim,
        groups=layout.groups,
        kv=layout.kv,
    )


def _read_layer(index: int, layer: Any, layout: TorchLayout, rotations: _Rotations) -> LayerStructure:
    _require_only(layer, {"self_attn", "mlp", *_NORMS}, "a layer")
    _require_only(layer.self_attn, _ATTENTION_PARTS, "its attention")
    _require_only(layer.mlp, _MLP_PARTS, "its MLP")
    attention, mlp = layer.self_attn, layer.mlp
    group = next(group for group, rows in layout.rows.items() if index in rows.layers)
    shape = layout.rows[group]
    is_sandwich = hasattr(layer, "pre_feedforward_layernorm")
    q, k, v = _split_attention(attention, shape.heads * shape.key_dim)
    gate, up = _split_mlp(mlp)
    q_norm, k_norm = (_head_norm(getattr(attention, name, None), shape.key_dim) for name in ("q_norm", "k_norm"))
    return LayerStructure(
        norm_in=_norm_weight(layer.input_layernorm),
        norm_attention=_norm_weight(layer.post_attention_layernorm) if is_sandwich else None,
        norm_mlp=_norm_weight(layer.pre_feedforward_layernorm if is_sandwich else layer.post_attention_layernorm),
        norm_mlp_out=_norm_weight(layer.post_feedforward_layernorm) if is_sandwich else None,
        q_norm=q_norm,
        k_norm=k_norm,
        q=q,
        k=k,
        v=v,
        o=_projection(attention.o_proj),
        gate=gate,
        up=up,
        down=_projection(mlp.down_proj),
        group=layout.groups.index(group),
        layer_in_group=shape.layers.index(index),
        rotation=rotations.find(attention, index),
        window=group.window,
    )


def _split_attention(attention: Any, kv_rows: int) -> tuple[Matrix, Matrix, Matrix]:
    if not hasattr(attention, "qkv_proj"):
        return _projection(attention.q_proj), _projection(attention.k_proj), _projection(attention.v_proj)
    joined = _projection(attention.qkv_proj)
    end = joined.num_rows
    return (
        joined.slice(0, end - 2 * kv_rows),
        joined.slice(end - 2 * kv_rows, end - kv_rows),
        joined.slice(end - kv_rows, end),
    )


def _split_mlp(mlp: Any) -> tuple[Matrix, Matrix]:
    if not hasattr(mlp, "gate_up_proj"):
        return _projection(mlp.gate_proj), _projection(mlp.up_proj)
    joined = _projection(mlp.gate_up_proj)
    half = joined.num_rows // 2
    return joined.slice(0, half), joined.slice(half, 2 * half)


def _projection(module: Any) -> Matrix:
    if not isinstance(module, nn.Linear):
        raise UnknownStructure(f"a projection is a {type(module).__name__}, not a linear layer")
    weight, bias = module.weight, module.bias
    if isinstance(weight, PackedWeight):
        matrix = weight.matrix
    elif weight.dtype == torch.float32 and weight.is_contiguous():
        matrix = Matrix.of_tensor(weight.data)
    else:
        raise UnknownStructure(f"a projection has weights in {_name(weight.dtype)}")
    if bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()):
        raise UnknownStructure(f"a projection has a bias in {_name(bias.dtype)}")
    return replace(matrix, bias=None if bias is None else bias.data)


def _norm_weight(module: Any) -> Tensor:
    """The factors of an RMS norm, found by trying it: some families add one to their weights."""
    weight: Tensor | None = getattr(module, "weight", None)
    eps = _eps_of(module)
    if weight is None or weight.ndim != 1 or getattr(module, "bias", None) is not None:
        raise UnknownStructure(f"{type(module).__name__} is not an RMS norm with one weight for each column")
    if not weight.isfinite().all():
        raise UnknownStructure(f"a {type(module).__name__} has weights that are not finite numbers")
    x = torch.linspace(-2.0, 3.0, weight.numel(), dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        plain = x * torch.rsqrt(x.pow(2).mean() + eps)
        got = module(x[None])[0].float()
    for factors in (weight.data.float(), 1.0 + weight.data.float()):
        if torch.allclose(got, plain * factors, rtol=1e-5, atol=1e-6):
            return factors.contiguous()
    raise UnknownStructure(f"{type(module).__name__} is not an RMS norm")


def _head_norm(module: Any, head_dim: int) -> Tensor | None:
    if module is None or isinstance(module, _IDLE):
        return None
    weight = _norm_weight(module)
    if weight.numel() != head_dim:
        raise UnknownStructure(f"its norm of queries or keys covers {weight.numel()} columns, and a head has {head_dim}")
    return weight


def _eps_of(module: Any) -> float:
    for name in _EPSILONS:
        if isinstance(getattr(module, name, None), float):
            return float(getattr(module, name))
    raise UnknownStructure(f"{type(module).__name__} has no epsilon")


def _activation_of(mlp: Any) -> str:
    found = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    if found is None:
        raise UnknownStructure("its MLP names no activation")
    x = torch.linspace(-6.0, 6.0, 101, dtype=torch.float32, device="cpu")
    with torch.inference_mode():
        got = found(x)
    for name, known in _ACTIVATIONS.items():
        if torch.allclose(got, known(x), rtol=1e-6, atol=1e-6):
            return name
    raise UnknownStructure(f"its activation {type(found).__name__} is neither SiLU nor the tanh form of GELU")


class _Rotations:
    """The kinds of rotation in a model: one for all layers, or one for each type of layer."""

    def __init__(self, module: Any, config: Any) -> None:
        self._module, self._types = module, getattr(config, "layer_types", None) or []
        self._by_type = "layer_type" in inspect.signature(module.forward).parameters
        names = getattr(module, "rope_type", "default")
        for name in names.values() if isinstance(names, dict) else [names]:
            if name not in _STATIC_ROTATIONS:
                raise UnknownStructure(f"its rotation {name!r} is not one of {', '.join(sorted(_STATIC_ROTATIONS))}")
        self.kinds: list[Callable[[Tensor], tuple[Tensor, Tensor]]] = []
        self._known: dict[str, int] = {}

    def find(self, attention: Any, index: int) -> int:
        """The number of the rotation of a layer; -1 if it has none."""
        if not getattr(attention, "use_rope", True):
            return -1
        kind = (getattr(attention, "layer_type", None) or self._types[index]) if self._by_type else ""
        if kind not in self._known:
            self._known[kind] = len(self.kinds)
            self.kinds.append(self._make(kind))
        return self._known[kind]

    @property
    def dim(self) -> int:
        """The columns of a head that are rotated; 0 if no layer rotates any."""
        sizes = [kind(torch.arange(1, device="cpu"))[0].shape[-1] for kind in self.kinds]
        return int(_same(sizes, "numbers of rotated columns")) if sizes else 0

    def _make(self, kind: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        arguments = (kind,) if self._by_type else ()

        def compute(positions: Tensor) -> tuple[Tensor, Tensor]:
            with torch.inference_mode():
                like = torch.empty(0, dtype=torch.float32, device="cpu")
                cosines, sines = self._module(like, positions[None], *arguments)
            return cosines[0].float(), sines[0].float()

        return compute


def _require(found: Any, why: str) -> Any:
    if found is None:
        raise UnknownStructure(why)
    return found


def _require_only(module: nn.Module, known: Iterable[str], what: str) -> None:
    """Every child with weights or an effect of its own must be known."""
    strange = [name for name, child in module.named_children() if name not in known and not isinstance(child, _IDLE)]
    names = strange + [name for name, _ in module.named_parameters(recurse=False)]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        raise UnknownStructure(f"{what} has {', '.join(names[:_NAMED])}{more}, which the kernels do not know")


def _require_plain_rows(layout: TorchLayout) -> None:
    for rows in layout.rows.values():
        if rows.key_dim != rows.value_dim or rows.computed != torch.float32:
            raise UnknownStructure(
                f"its keys have {rows.key_dim} and its values {rows.value_dim} columns, in {_name(rows.computed)}: the "
                "kernels know equal ones in float32"
            )
    if len({(rows.heads, rows.key_dim) for rows in layout.rows.values()}) > 1:
        raise UnknownStructure("its layers have heads of different shapes")


def _require_fit(structure: Structure) -> None:
    """Every part has the shape that the kernels take it to have: they check nothing."""
    hidden, inner = structure.hidden_size, structure.layers[0].gate.num_rows
    queries, keys = structure.num_heads * structure.head_dim, structure.num_kv_heads * structure.head_dim
    wanted = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    wanted |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for layer in structure.layers:
        for name, shape in wanted.items():
            _require_shape(f"{name} of a layer", getattr(layer, name), shape)
        if any(norm is not None and norm.numel() != hidden for norm in layer.norms):
            raise UnknownStructure(f"a norm does not have {hidden} columns")
    _require_shape("its head", structure.head, (structure.head.num_rows, hidden))
    if (
        structure.num_heads % structure.num_kv_heads
        or structure.rotary_dim % 2
        or structure.rotary_dim > structure.head_dim
    ):
        heads = f"{structure.num_heads} heads for {structure.num_kv_heads}, of {structure.head_dim} columns"
        raise UnknownStructure(f"it has {heads}, of which {structure.rotary_dim} are rotated")


def _require_shape(name: str, linear: Matrix, shape: tuple[int, int]) -> None:
    found = (linear.num_rows, linear.num_columns)
    if found != shape or (linear.bias is not None and linear.bias.shape != shape[:1]):
        raise UnknownStructure(f"{name} has the shape {found}, and {shape} is the one that the kernels know")


def _is_norm(module: Any) -> bool:
    return any(isinstance(getattr(module, name, None), float) for name in _EPSILONS)


def _same(values: list[Any], what: str) -> Any:
    if any(value != values[0] for value in values):
        raise UnknownStructure(f"its layers have different {what}")
    return values[0]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
