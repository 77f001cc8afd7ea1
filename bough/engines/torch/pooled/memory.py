"""The pool: one piece of device memory for the rows and states of all lanes and pages of a model.

The rows of a group have the shape [slots, keys | values, layers, heads, 256, dim]: a slot is one piece of memory with the
layout of a whole page on the host and on disk. A state has its tensors one after the other in a slot of its own.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from importlib.util import find_spec

import torch
from torch import Tensor

from bough.cache.tree.state import PAGE_TOKENS, Group
from bough.engines.shared.pool.arena import Arena, ArenaSlot, chunk_size
from bough.engines.shared.pool.slot_rows import SlotRows
from bough.engines.shared.shapes import aligned
from bough.engines.torch.layout import TorchLayout, TorchStatePart
from bough.engines.torch.pooled.attention.bucket import HALF_TYPES
from bough.errors import ModelError

_DIMS = range(16, 257)
PROBE_SLOTS = 4  # of each group, to try out a pass before lanes use it
_LARGE = 64  # chunks


def can_pool(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for a pool on this device: they need CUDA, half precision, and triton."""
    return device.type == "cuda" and dtype in HALF_TYPES and find_spec("triton") is not None


def why_not_pooled(layout: TorchLayout, *, is_test: bool = False) -> str:
    """Why the rows of a model cannot be in a pool; "" if they can."""
    if not layout.rows:
        return layout.unknown or "the model has no rows of attention"
    for rows in layout.rows.values():
        if rows.is_rounded:
            return f"its rows are kept in {layout.kv}"
        if rows.key_dim != rows.value_dim:
            return f"keys have {rows.key_dim} numbers and values {rows.value_dim}"
        if rows.key_dim not in _DIMS or rows.key_dim % 8:
            return f"a head of {rows.key_dim} numbers is not a multiple of 8 from {_DIMS.start} to {_DIMS.stop - 1}"
        if rows.dtype not in HALF_TYPES and not is_test:
            return f"rows are {str(rows.dtype).removeprefix('torch.')}, not bfloat16 or float16"
    return ""


class PoolMemory:
    """The memory of a pool, and its arena.

    Entries of a step without a lane read their states from `blank`, slots of zeros that are never written, and write them
    to `spare`.
    """

    def __init__(self, layout: TorchLayout, device: torch.device, budget_bytes: int) -> None:
        slot_bytes: dict[Hashable, int] = {group: PAGE_TOKENS * rows.row_bytes for group, rows in layout.rows.items()}
        state_bytes = {group: aligned(state.nbytes) for group, state in layout.states.items()}
        chunk = chunk_size(list(slot_bytes.values()), list(state_bytes.values()))
        slot_bytes |= {group: _find_even_part(chunk, nbytes) for group, nbytes in state_bytes.items()}
        num_chunks = _count_chunks(budget_bytes, chunk, list(slot_bytes.values()))
        self.arena = Arena(slot_bytes, num_chunks, chunk)
        self.device = device
        self._probes: dict[Group, list[int]] = {}
        self._flat = _take_memory(num_chunks * chunk, device)
        self.rows: dict[Group, Tensor] = {}
        for group, rows in layout.rows.items():
            shape = (self.arena.num_slots(group), 2, len(rows.layers), rows.heads, PAGE_TOKENS, rows.key_dim)
            self.rows[group] = self._flat.view(rows.dtype).view(shape)
        self.spare = {group: self._keep_slot(group) for group in layout.states}
        self.blank = {group: self._keep_slot(group) for group in layout.states}
        for slot in self.blank.values():
            self.slot_bytes(slot).zero_()

    def close(self) -> None:
        """Release the memory, though lanes and pages may still refer to their slots."""
        self._flat = torch.empty(0, dtype=torch.uint8)
        self.rows = {}

    @property
    def nbytes(self) -> int:
        return self._flat.nbytes

    def layer_rows(self, group: Group, place: int) -> Tensor:
        """The rows in all slots of the `place`-th layer of a group: [slots, 2, heads, 256, dim]."""
        return self.rows[group][:, :, place]

    def view(self, rows: SlotRows) -> Tensor:
        """These rows as the plane [2 * layers, heads, rows, dim] of a page."""
        assert isinstance(rows.slot.kind, Group)
        first = rows.start % PAGE_TOKENS
        return self.rows[rows.slot.kind][rows.slot.index].flatten(0, 1)[:, :, first : first + rows.end - rows.start]

    def slot_bytes(self, slot: ArenaSlot, nbytes: int | None = None) -> Tensor:
        """The bytes of a slot, all or the first `nbytes`."""
        start = self.arena.start_byte(slot)
        return self._flat[start : start + (slot.nbytes if nbytes is None else nbytes)]

    def state_part(self, group: Group, part: TorchStatePart) -> Tensor:
        """One tensor of a recurrent layer in all slots of its group: [slots, …]."""
        typed = self._flat.view(part.dtype)
        stride = self.arena.slot_bytes(group) // part.dtype.itemsize
        strides = [math.prod(part.shape[axis + 1 :]) for axis in range(1, len(part.shape))]
        size = (self.arena.num_slots(group), *part.shape[1:])
        return typed.as_strided(size, (stride, *strides), part.start // part.dtype.itemsize)

    def probe_slots(self, group: Group) -> list[int]:
        """Slots of a row group that belong to no lane, filled with random numbers at the first call."""
        if group not in self._probes:
            slots = [self._keep_slot(group) for _ in range(PROBE_SLOTS)]
            generator = torch.Generator(self.rows[group].device)  # not the device's own: another engine may capture a graph
            for slot in slots:
                self.rows[group][slot.index].normal_(generator=generator)
            self._probes[group] = [slot.index for slot in slots]
        return self._probes[group]

    def _keep_slot(self, group: Group) -> ArenaSlot:
        slot = self.arena.take(group)
        self.arena.add_page(slot)
        return slot


def _count_chunks(budget_bytes: int, chunk: int, slot_bytes: list[int]) -> int:
    """The number of chunks for a budget. A small budget gets more, to try out passes, and where slots differ in size."""
    num_chunks = max(1, budget_bytes // chunk)
    if num_chunks >= _LARGE:
        return num_chunks
    if len(slot_bytes) > 1:
        num_chunks += 2 * len(slot_bytes)
    return num_chunks + sum(-(-PROBE_SLOTS * nbytes // chunk) for nbytes in slot_bytes)


def _take_memory(nbytes: int, device: torch.device) -> Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        free = torch.cuda.mem_get_info(device)[0]
        raise ModelError(
            f"out of memory: lanes and pages are to have {nbytes:,} bytes on {device}, and {free:,} are free: "
            "set device_memory to less"
        ) from error


def _find_even_part(chunk: int, nbytes: int) -> int:
    """The smallest equal part of a chunk with room for that many bytes, so that slots of states are equally far apart."""
    for number in range(chunk // nbytes, 1, -1):
        if chunk % number == 0 and chunk // number == aligned(chunk // number):
            return chunk // number
    return chunk
