"""A whole step of a model in one call of the kernels, over the buffers of the lanes.

A step is one token on each of several lanes, or a run of tokens on one lane. The kernels write keys and values into the
lanes' buffers, where transformers' own forward pass would have put them. The result of a lane depends on that lane alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bough.cache.tree.state import Group
from bough.engines.torch.cpu.library import Kernels
from bough.engines.torch.cpu.matrix import MatrixStruct
from bough.engines.torch.cpu.structure import LayerStructure, Projection, Structure
from bough.engines.torch.cpu.weight import empty_floats
from bough.engines.torch.lanes.lane import TorchLane

_LONGEST_RUN = 512  # tokens in one call: the memory for their activations grows with them
_PHASES = 8  # of a layer in kernels.c
_FIRST_POSITIONS = 1_024
_FLOAT_BYTES = 4
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

_Pointer, _Int, _Long, _Float = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


def _fields(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class _LayerStruct(ctypes.Structure):
    """`Layer` of kernels.c."""

    _fields_ = (
        *_fields(_Pointer, "norm_in", "norm_attention", "norm_mlp", "norm_mlp_out", "q_norm", "k_norm"),
        *_fields(MatrixStruct, "q", "k", "v", "o", "gate", "up", "down"),
        *_fields(_Int, "group", "layer_in_group", "rotation", "window"),
    )


class _ModelStruct(ctypes.Structure):
    """`Model` of kernels.c."""

    _fields_ = (
        *_fields(_Int, "layers", "hidden", "heads", "kv_heads", "dim", "inter", "groups", "rotary_dim", "activation"),
        ("unused", _Int),
        *_fields(_Float, "eps", "scale", "score_cap", "logit_cap", "residual", "unused2"),
        ("norm", _Pointer),
        ("layer", _Pointer),
        ("head", MatrixStruct),
    )


class _RowsStruct(ctypes.Structure):
    """`Rows` of kernels.c."""

    _fields_ = (*_fields(_Pointer, "k", "v"), *_fields(_Long, "layer", "head", "rows"))


class _BatchStruct(ctypes.Structure):
    """`Batch` of kernels.c."""

    _fields_ = (
        *_fields(_Pointer, "rows", "positions", "cosines", "sines", "x", "logits"),
        *_fields(_Int, "lanes", "tokens", "logit_rows", "threads"),
        ("table_rows", _Long),
    )


class WholeStep:
    """Runs a model of a known structure. It refers to the model's weights, and owns the memory for activations."""

    def __init__(self, structure: Structure, kernels: Kernels, num_threads: int) -> None:
        self._structure = structure
        self._kernels = kernels
        self._num_threads = num_threads
        self._layers = (_LayerStruct * len(structure.layers))(*map(_layer_struct, structure.layers))
        self._tables = _RotationTables(structure.rotations)
        self._model = _model_struct(structure, self._layers)
        self._work = empty_floats(0)
        self._counters = torch.zeros(2 * (_PHASES * len(structure.layers) + 2), dtype=torch.int32, device="cpu")
        self._vocab_size = structure.head.matrix.num_rows

    def step(self, lanes: Sequence[TorchLane], ids: Sequence[int]) -> list[Tensor]:
        """Append one token to each lane; returns the logits of each."""
        return list(self._run(lanes, self._embed(ids), 1, len(lanes)).unbind())

    def evaluate(self, lane: TorchLane, ids: Sequence[int]) -> Tensor:
        """Append a run to a lane; returns the logits after its last token."""
        for part in _parts(self._embed(ids)):
            logits = self._run([lane], part, len(part), 1)
        return logits[0]

    def evaluate_all(self, lane: TorchLane, ids: Sequence[int]) -> Tensor:
        """Append a run to a lane; returns the logits after each of its tokens."""
        parts = _parts(self._embed(ids))
        return torch.cat([self._run([lane], part, len(part), len(part)) for part in parts])

    @torch.inference_mode()
    def evaluate_state(self, lane: TorchLane, ids: Sequence[int]) -> Tensor:
        """Append a run to a lane; returns what the head reads after its last token. The kernels leave it unnormed."""
        x = self._embed(ids)
        for part in _parts(x):
            self._run([lane], part, len(part), 1)
        return F.rms_norm(x[-1], x.shape[-1:], self._structure.norm, self._structure.eps)

    def evaluate_at(self, lane: TorchLane, ids: Sequence[int], position: int) -> Tensor:
        """As `evaluate_all` on an empty lane, with positions from `position` on: the self-check looks far ahead with it."""
        return self._run([lane], self._embed(ids), len(ids), len(ids), shift=position)

    @torch.inference_mode()
    def _embed(self, ids: Sequence[int]) -> Tensor:
        """Fails if one of the tokens does not exist, before a lane has changed."""
        return self._structure.embed(torch.tensor(ids, device="cpu")).contiguous()

    @torch.inference_mode()
    def _run(self, lanes: Sequence[TorchLane], x: Tensor, num_tokens: int, num_logits: int, shift: int = 0) -> Tensor:
        """Run the embeddings [lanes * tokens, hidden], which are changed."""
        for lane in lanes:
            lane.begin_run(num_tokens)
        positions = [lane.offset + i for lane in lanes for i in range(num_tokens)]
        tables = self._tables.starting_at(shift) if shift else self._tables
        tables.reach(max(positions) + 1)
        where = torch.tensor(positions, dtype=torch.int32, device="cpu")
        logits = empty_floats(num_logits, self._vocab_size)
        rows = _rows_structs(lanes, num_tokens, self._structure.groups)
        batch = _BatchStruct(
            ctypes.addressof(rows),
            where.data_ptr(),
            tables.cosines.data_ptr(),
            tables.sines.data_ptr(),
            x.data_ptr(),
            logits.data_ptr(),
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
            self._work = empty_floats(needed)
        self._counters.zero_()
        self._kernels.step(model, step, self._work.data_ptr(), self._counters.data_ptr())


def _parts(x: Tensor) -> list[Tensor]:
    """A run in parts that one call takes."""
    return [x[start : start + _LONGEST_RUN] for start in range(0, len(x), _LONGEST_RUN)]


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


def _model_struct(structure: Structure, layers: ctypes.Array[_LayerStruct]) -> _ModelStruct:
    return _ModelStruct(
        layers=len(layers),
        hidden=structure.hidden_size,
        heads=structure.num_heads,
        kv_heads=structure.num_kv_heads,
        dim=structure.head_dim,
        inter=structure.layers[0].gate.matrix.num_rows,
        groups=len(structure.groups),
        rotary_dim=structure.rotary_dim,
        activation=_ACTIVATIONS[structure.activation],
        eps=structure.eps,
        scale=structure.scale,
        score_cap=structure.score_cap,
        logit_cap=structure.logit_cap,
        residual=structure.residual,
        norm=structure.norm.data_ptr(),
        layer=ctypes.addressof(layers),
        head=_struct_of(structure.head),
    )


def _layer_struct(layer: LayerStructure) -> _LayerStruct:
    norms = (layer.norm_in, layer.norm_attention, layer.norm_mlp, layer.norm_mlp_out, layer.q_norm, layer.k_norm)
    linears = (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)
    return _LayerStruct(
        *(None if norm is None else norm.data_ptr() for norm in norms),
        *map(_struct_of, linears),
        layer.group,
        layer.layer_in_group,
        layer.rotation,
        layer.window,
    )


def _struct_of(linear: Projection) -> MatrixStruct:
    return linear.matrix.as_struct(linear.bias)


def _rows_structs(lanes: Sequence[TorchLane], num_tokens: int, groups: Sequence[Group]) -> ctypes.Array[_RowsStruct]:
    """Where each lane's rows lie, for each group; the run has begun on all of them."""
    structs = (_RowsStruct * (len(lanes) * len(groups)))()
    for i, lane in enumerate(lanes):
        for j, group in enumerate(groups):
            keys, values, layer_bytes, head_stride, num_rows = lane.rows_of(group).addresses()
            row = _RowsStruct(keys, values, layer_bytes // _FLOAT_BYTES, head_stride, num_rows - num_tokens)
            structs[i * len(groups) + j] = row
    return structs
