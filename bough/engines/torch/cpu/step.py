"""A whole step of a model in one call of the kernels, over the buffers of the lanes.

A step is one token on each of several lanes, or a run of tokens on one lane. The kernels write keys and values into the
lanes' buffers, where transformers' own forward pass would have put them. The result of a lane depends on that lane alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.cache.tree.state import Group
from bough.engines.shared.compute import RunResult
from bough.engines.torch.cpu.library import TYPES
from bough.engines.torch.cpu.matrix import Matrix, MatrixStruct
from bough.engines.torch.cpu.structure import LayerStructure, Structure
from bough.engines.torch.cpu.weight import Products, empty_floats
from bough.engines.torch.lanes.lane import TorchLane

_LONGEST_RUN = 512  # tokens in one call: the memory for their activations grows with them
_PHASES = 8  # of a layer in kernels/step.h
_FIRST_POSITIONS = 1_024
_ROW_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "Q8_0"}
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

_Pointer, _Int, _Long, _Float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class _LayerStruct(ctypes.Structure):
    """`Layer` of the kernels; its fields have the names of `LayerStructure`."""

    _fields_ = (
        *_fields(_Pointer, "norm_in", "norm_attention", "norm_mlp", "norm_mlp_out", "q_norm", "k_norm"),
        *_fields(MatrixStruct, "q", "k", "v", "o", "gate", "up", "down"),
        *_fields(_Int, "group", "layer_in_group", "rotation", "window"),
    )


class _ModelStruct(ctypes.Structure):
    """`Model` of the kernels."""

    _fields_ = (
        *_fields(_Int, "layers", "hidden", "heads", "kv_heads", "dim", "inter", "groups", "rotary_dim", "activation"),
        *_fields(_Int, "terms", "row_type", "unused"),
        *_fields(_Float, "eps", "scale", "score_cap", "logit_cap", "residual", "unused2"),
        ("norm", _Pointer),
        ("layer", _Pointer),
        ("head", MatrixStruct),
    )


class _RowsStruct(ctypes.Structure):
    """`Rows` of the kernels."""

    _fields_ = (*_fields(_Pointer, "k", "v"), *_fields(_Long, "layer", "head", "rows", "first"))


class _BatchStruct(ctypes.Structure):
    """`Batch` of the kernels."""

    _fields_ = (
        *_fields(_Pointer, "rows", "positions", "cosines", "sines", "x", "logits", "clipped"),
        *_fields(_Int, "lanes", "tokens", "logit_rows", "threads"),
        ("table_rows", _Long),
    )


class WholeStep:
    """Runs a model of a known structure. It refers to the model's weights, and owns the memory for activations."""

    def __init__(self, structure: Structure, products: Products) -> None:
        self._structure = structure
        self._kernels = products.kernels
        self._num_threads = products.num_threads
        self._layers = (_LayerStruct * len(structure.layers))(*map(_layer_struct, structure.layers))
        self._tables = _RotationTables(structure.rotations)
        self._model = _model_struct(structure, self._layers, products.terms)
        self._work = empty_floats(0)
        self._counters = torch.zeros(2 * (_PHASES * len(structure.layers) + 2), dtype=torch.int32, device="cpu")
        self._vocab_size = structure.head.num_rows

    def step(self, lanes: Sequence[TorchLane], ids: Sequence[int]) -> list[Tensor]:
        """Append one token to each lane; returns the logits of each."""
        return list(self._run(lanes, self._embed(ids), 1, len(lanes)).unbind())

    @torch.inference_mode()
    def run(self, lane: TorchLane, ids: Sequence[int], result: RunResult) -> Tensor:
        """Append a run to a lane, some tokens in each call."""
        x = self._embed(ids)
        logits = [
            self._run([lane], part, len(part), len(part) if result is RunResult.ALL_LOGITS else 1)
            for part in torch.split(x, _LONGEST_RUN)
        ]
        if result is RunResult.LAST_STATE:  # the kernels leave it in `x`, unnormed
            return F.rms_norm(x[-1], x.shape[-1:], self._structure.norm, self._structure.eps)
        return torch.cat(logits) if result is RunResult.ALL_LOGITS else logits[-1][0]

    def run_at(self, lane: TorchLane, ids: Sequence[int], position: int) -> Tensor:
        """All logits of a run on an empty lane whose positions begin at `position`, as the self-check looks far ahead."""
        return self._run([lane], self._embed(ids), len(ids), len(ids), shift=position)

    @torch.inference_mode()
    def _embed(self, ids: Sequence[int]) -> Tensor:
        """Fails if one of the tokens does not exist, before a lane has changed."""
        found, factor = self._structure.embed_tokens(torch.tensor(ids, device="cpu")), self._structure.embedding_factor
        return (found if factor == 1.0 else found * factor).contiguous()

    @torch.inference_mode()
    def _run(self, lanes: Sequence[TorchLane], x: Tensor, num_tokens: int, num_logits: int, shift: int = 0) -> Tensor:
        """Run the embeddings [lanes * tokens, hidden], which are changed."""
        for lane in lanes:
            lane.begin_run(num_tokens)
        positions = [lane.offset + i for lane in lanes for i in range(num_tokens)]
        tables = self._tables.starting_at(shift) if shift else self._tables
        tables.reach(max(positions) + 1)
        where = torch.tensor(positions, dtype=torch.int32, device="cpu")
        logits = x.new_empty(num_logits, self._vocab_size)
        rows = _rows_structs(lanes, num_tokens, self._structure.groups)
        batch = _BatchStruct(
            ctypes.addressof(rows),
            where.data_ptr(),
            tables.cosines.data_ptr(),
            tables.sines.data_ptr(),
            x.data_ptr(),
            logits.data_ptr(),
            lanes[0].clipped.address,
            len(lanes),
            num_tokens,
            num_logits,
            self._num_threads,
            tables.num_rows,
        )
        self._call(batch)
        for lane in lanes:
            lane.end_run(num_tokens)
        return logits if self._structure.logit_divisor == 1.0 else logits.div_(self._structure.logit_divisor)

    def _call(self, batch: _BatchStruct) -> None:
        model, step = ctypes.addressof(self._model), ctypes.addressof(batch)
        needed = self._kernels.step_floats(model, step)
        if self._work.numel() < needed:
            self._work = self._work.new_empty(needed)
        self._counters.zero_()
        self._kernels.step(model, step, self._work.data_ptr(), self._counters.data_ptr())


class _RotationTables:
    """Cosines and sines of all positions from `first` to the largest so far: [kinds, positions, dim] each."""

    def __init__(self, rotations: Sequence[Callable[[Tensor], tuple[Tensor, Tensor]]], first: int = 0) -> None:
        self._rotations = rotations
        self._first = first
        self.num_rows = 0
        self.cosines = self.sines = empty_floats(0)

    def starting_at(self, position: int) -> _RotationTables:
        """Empty tables of the same rotations, for positions from this one on."""
        return _RotationTables(self._rotations, position)

    def reach(self, num_positions: int) -> None:
        """Have entries for the first `num_positions` positions."""
        if num_positions <= self.num_rows:
            return
        self.num_rows = max(num_positions, 2 * self.num_rows, _FIRST_POSITIONS)
        where = torch.arange(self._first, self._first + self.num_rows, device="cpu")
        tables = [rotation(where) for rotation in self._rotations]
        if tables:
            self.cosines = torch.stack([cosines for cosines, _ in tables]).contiguous()
            self.sines = torch.stack([sines for _, sines in tables]).contiguous()


def _model_struct(structure: Structure, layers: ctypes.Array[_LayerStruct], terms: int) -> _ModelStruct:
    return _ModelStruct(
        layers=len(layers),
        hidden=structure.hidden_size,
        heads=structure.num_heads,
        kv_heads=structure.num_kv_heads,
        dim=structure.head_dim,
        inter=structure.layers[0].gate.num_rows,
        groups=len(structure.groups),
        rotary_dim=structure.rotary_dim,
        activation=_ACTIVATIONS[structure.activation],
        terms=terms,
        row_type=TYPES[_ROW_TYPES[structure.kv]],
        eps=structure.eps,
        scale=structure.scale,
        score_cap=structure.score_cap,
        logit_cap=structure.logit_cap,
        residual=structure.residual,
        norm=_field(structure.norm),
        layer=ctypes.addressof(layers),
        head=_field(structure.head),
    )


def _layer_struct(layer: LayerStructure) -> _LayerStruct:
    return _LayerStruct(**{each.name: _field(getattr(layer, each.name)) for each in fields(layer)})


def _field(value: Tensor | Matrix | int | None) -> Any:
    """A part of a layer as the kernels take it."""
    if isinstance(value, Matrix):
        return value.as_struct()
    return value.data_ptr() if isinstance(value, Tensor) else value


def _rows_structs(lanes: Sequence[TorchLane], num_tokens: int, groups: Sequence[Group]) -> ctypes.Array[_RowsStruct]:
    """Where each lane's rows lie, for each group; the run has begun on all of them."""
    structs = (_RowsStruct * (len(lanes) * len(groups)))()
    for i, lane in enumerate(lanes):
        for j, group in enumerate(groups):
            buffer = lane.rows_of(group)
            keys, values, layer_bytes, head_stride, num_rows = buffer.addresses()
            head_bytes, before = head_stride * buffer.layout.itemsize, num_rows - num_tokens
            row = _RowsStruct(keys, values, layer_bytes, head_bytes, before, lane.offset - before)
            structs[i * len(groups) + j] = row
    return structs
