"""The cache that a lane passes to a transformers model: layers that write in place into the lane's buffers.

A layer knows where it stands from its lane alone: between two runs every layer stands at `lane.offset`, and it does not
move before the run is over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from bough.cache.tree.state import Group
from bough.engines.torch.attention import LaneRows, Rows, Table, attach_lanes, attach_window
from bough.engines.torch.lanes.buffers import RowBuffer
from bough.engines.torch.layout import StatePart

Tables = Mapping[Group, Table]
"""Where the rows of a group lie on each lane of a batch, for groups that one kernel can serve on all lanes."""


class HasOffset(Protocol):
    """What tells the layers of a lane how many tokens it holds."""

    @property
    def offset(self) -> int: ...


class RowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer, in the buffer of its group."""

    def __init__(self, lane: HasOffset, buffer: RowBuffer, layer_in_group: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.is_sliding = buffer.group.window > 0
        self._lane = lane
        self.group = buffer.group
        self.layer_in_group = layer_in_group
        self._buffer = buffer

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: a lane's buffers exist before the model runs."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the run's rows; returns those that its queries may look at, the run's own included."""
        keys, values = self.written
        keys.copy_(key_states)
        values.copy_(value_states)
        return self.seen

    @property
    def written(self) -> tuple[Tensor, Tensor]:
        """Where the rows of the run under way belong."""
        return self._buffer.written[self.layer_in_group]

    @property
    def seen(self) -> tuple[Tensor, Tensor]:
        """The rows that the queries of this run may look at, its own included."""
        keys, values = self._buffer.seen[self.layer_in_group]
        return attach_window(keys, self._buffer.group.window) if self.is_sliding else keys, values

    def get_seq_length(self) -> int:
        return self._lane.offset

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        first = self._buffer.group.first_needed(self._lane.offset)
        return self._lane.offset - first + query_length, first

    def get_max_length(self) -> int:
        return self._buffer.group.window or -1


class StateLayer(LinearAttentionLayer):
    """The states of one recurrent layer: transformers' own layer over the lane's memory."""

    def __init__(self, num_states: int) -> None:
        super().__init__(number_of_states=num_states)

    def bind(self, name: str, state_index: int, view: Tensor) -> None:
        """Keep the state `name` in this memory from now on."""
        getattr(self, name)[state_index] = view
        getattr(self, f"is_{name}_initialized")[state_index] = True
        if name == "conv_states":
            self.conv_kernel_size[state_index] = view.shape[-1]
        self.dtype, self.device = view.dtype, view.device  # type: ignore[assignment]

    def unbind(self) -> None:
        """Refer to no memory of the lane."""
        for name in ("conv_states", "recurrent_states"):
            for state_index in range(self.number_of_states):
                getattr(self, name)[state_index] = None
                getattr(self, f"is_{name}_initialized")[state_index] = False

    def mark(self, marks: Sequence[bool]) -> None:
        """Say for each state index whether the model may go on from it."""
        self.has_previous_state.update(enumerate(marks))


class StateAndRowLayer(StateLayer, RowLayer):  # type: ignore[no-untyped-call, override]
    """A layer that has both attention and a recurrent state."""

    def __init__(self, num_states: int, lane: HasOffset, buffer: RowBuffer, layer_in_group: int) -> None:
        RowLayer.__init__(self, lane, buffer, layer_in_group)
        StateLayer.__init__(self, num_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: a lane's buffers exist before the model runs."""


class LaneCache(Cache):
    """The cache of one lane. It answers for recurrent layers too, where its base class raises or picks another layer."""

    def __init__(self, lane: HasOffset, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self._lane = lane
        self._first_rows = next((layer for layer in layers if isinstance(layer, RowLayer)), None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._lane.offset

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        layer = layer if isinstance(layer, RowLayer) else self._first_rows
        return layer.get_mask_sizes(query_length) if layer else (self._lane.offset + query_length, 0)


class BatchRowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of several lanes within one forward pass: each lane's row goes into its own buffer."""

    def __init__(self, layers: Sequence[RowLayer], tables: Tables) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.is_sliding = layers[0].is_sliding
        self._layers = layers
        self._table = tables.get(layers[0].group)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the lanes' buffers exist before the model runs."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write each lane's row. The keys that are returned carry the rows of all lanes to `attention`."""
        if self._table is not None:
            first = self._layers[0]
            self._table.write(first.layer_in_group, key_states, value_states)
            return attach_lanes(key_states, LaneRows(self._table, first.layer_in_group, self._seen)), value_states
        targets = [layer.written for layer in self._layers]
        rows = [*key_states.chunk(len(key_states)), *value_states.chunk(len(value_states))]
        torch._foreach_copy_([*(keys for keys, _ in targets), *(values for _, values in targets)], rows)
        return attach_lanes(key_states, LaneRows(None, 0, self._seen)), value_states

    def _seen(self) -> Rows:
        return [layer.seen for layer in self._layers]

    def get_seq_length(self) -> int:
        return max(layer.get_seq_length() for layer in self._layers)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._layers[0].get_max_length()


class BatchStateAndRowLayer(StateLayer, BatchRowLayer):  # type: ignore[no-untyped-call, override]
    """One layer of several lanes that has both attention and a recurrent state."""

    def __init__(self, layers: Sequence[StateAndRowLayer], tables: Tables) -> None:
        BatchRowLayer.__init__(self, layers, tables)
        StateLayer.__init__(self, layers[0].number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the lanes' buffers exist before the model runs."""


class BatchCache(Cache):
    """The cache of several lanes for one step: rows stay where they are, states are stacked and then scattered."""

    def __init__(
        self,
        caches: Sequence[LaneCache],
        parts: Sequence[StatePart],
        states: Sequence[Sequence[Tensor]],
        tables: Tables,
    ) -> None:
        """`states` are the tensors of each lane, in the order of `parts`; `tables` where groups' rows lie, if known."""
        layers = [_batch_layer(layers, tables) for layers in zip(*(cache.layers for cache in caches), strict=True)]
        super().__init__(layers=layers)
        self._length = max(cache.get_seq_length() for cache in caches)
        self._parts = parts
        self._states = states
        for part, views in zip(parts, zip(*states, strict=True), strict=True):
            layer: Any = self.layers[part.layer]
            layer.bind(part.name, part.state_index, torch.cat(views))

    def scatter(self) -> None:
        """Copy the recurrent states back to each lane."""
        for index, part in enumerate(self._parts):
            stacked = getattr(self.layers[part.layer], part.name)[part.state_index]
            for views, state in zip(self._states, stacked.chunk(len(stacked)), strict=True):
                views[index].copy_(state)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._length + query_length, 0


def _batch_layer(layers: Sequence[Any], tables: Tables) -> Any:
    first = layers[0]
    if isinstance(first, StateAndRowLayer):
        batch: Any = BatchStateAndRowLayer(layers, tables)
    elif isinstance(first, RowLayer):
        return BatchRowLayer(layers, tables)
    elif isinstance(first, StateLayer):
        batch = StateLayer(first.number_of_states)
    else:
        return first  # a layer that holds nothing
    batch.mark(tuple(first.has_previous_state.values()))
    return batch
