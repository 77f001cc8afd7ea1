"""The cache that a lane passes to a transformers model: layers that write in place into the lane's buffers.

Every layer's length is `lane.offset`, which changes only after a run. The memory exists before the model runs, so
`lazy_initialization` does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from bough.cache.tree.state import Group
from bough.engines.shared.lane import HasOffset
from bough.engines.torch.attention import LaneRows, Rows, Table, attach_lanes, attach_window
from bough.engines.torch.lanes.buffers import TorchRowBuffer
from bough.engines.torch.layout import TorchLayout, TorchStatePart

Tables = Mapping[Group, Table]
"""The addresses of a group's rows on each lane of a batch, for groups that one kernel can serve on all lanes."""


class TorchRowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of one layer, in the buffer of its group."""

    def __init__(self, lane: HasOffset, buffer: TorchRowBuffer, layer_in_group: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.is_sliding = buffer.group.window > 0
        self._lane = lane
        self.group = buffer.group
        self.layer_in_group = layer_in_group
        self._buffer = buffer

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the run's rows; returns those that its queries may see, the run's own included."""
        self.write(key_states, value_states)
        return self.seen

    def write(self, keys: Tensor, values: Tensor) -> None:
        self._buffer.layout.write((keys, values), self.written, self._buffer.clipped)

    @property
    def is_rounded(self) -> bool:
        """Whether rows are kept in another type than the model's."""
        return self._buffer.layout.is_rounded

    @property
    def written(self) -> tuple[Tensor, Tensor]:
        """The memory for the rows of the current run."""
        return self._buffer.written[self.layer_in_group]

    @property
    def seen(self) -> tuple[Tensor, Tensor]:
        keys, values = self._buffer.layout.read(self._buffer.seen[self.layer_in_group])
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
        """Keep the state `name` in this memory."""
        getattr(self, name)[state_index] = view
        getattr(self, f"is_{name}_initialized")[state_index] = True
        if name == "conv_states":
            self.conv_kernel_size[state_index] = view.shape[-1]
        self.dtype, self.device = view.dtype, view.device  # type: ignore[assignment]

    def unbind(self) -> None:
        for name in ("conv_states", "recurrent_states"):
            for state_index in range(self.number_of_states):
                getattr(self, name)[state_index] = None
                getattr(self, f"is_{name}_initialized")[state_index] = False

    def mark(self, marks: Sequence[bool]) -> None:
        """Set for each state index whether the model may continue from it."""
        self.has_previous_state.update(enumerate(marks))


class StateAndRowLayer(StateLayer, TorchRowLayer):  # type: ignore[no-untyped-call, override]
    """A layer that has both attention and a recurrent state."""

    def __init__(self, num_states: int, lane: HasOffset, buffer: TorchRowBuffer, layer_in_group: int) -> None:
        TorchRowLayer.__init__(self, lane, buffer, layer_in_group)
        StateLayer.__init__(self, num_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass


def make_layers(layout: TorchLayout, make_rows: Callable[[Group, int, int | None], Any]) -> list[Any]:
    """The layers of one lane's cache.

    `make_rows` makes a layer with attention from its row group, its place in the group, and its number of states or None.
    """
    places = {layer: (group, place) for group, rows in layout.rows.items() for place, layer in enumerate(rows.layers)}
    num_states = {layer: num for state in layout.states.values() for layer, num in state.num_states.items()}
    layers: list[Any] = []
    for layer in range(layout.num_layers):
        num = num_states.get(layer)
        if layer in places:
            layers.append(make_rows(*places[layer], num))
        else:
            layers.append(layout.empty[layer]() if num is None else StateLayer(num))
    return layers


def make_row_layer(lane: HasOffset, buffer: TorchRowBuffer, layer_in_group: int, num_states: int | None) -> TorchRowLayer:
    if num_states is None:
        return TorchRowLayer(lane, buffer, layer_in_group)
    return StateAndRowLayer(num_states, lane, buffer, layer_in_group)


class LaneCache(Cache):
    """The cache of one lane. Lengths hold for recurrent layers too, where the base class raises or picks another layer."""

    def __init__(self, lane: HasOffset, layers: list[Any]) -> None:
        super().__init__(layers=layers)
        self._lane = lane
        self._first_rows = next((layer for layer in layers if isinstance(layer, TorchRowLayer)), None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._lane.offset

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        layer = layer if isinstance(layer, TorchRowLayer) else self._first_rows
        return layer.get_mask_sizes(query_length) if layer else (self._lane.offset + query_length, 0)


class TorchBatchRowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of several lanes within one forward pass: each lane's row is written to its own buffer."""

    def __init__(self, layers: Sequence[TorchRowLayer], tables: Tables) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self.is_sliding = layers[0].is_sliding
        self._layers = layers
        self._table = tables.get(layers[0].group)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write each lane's row. The returned keys carry the rows of all lanes to `attention`."""
        if self._table is not None:
            first = self._layers[0]
            self._table.write(first.layer_in_group, key_states, value_states)
            return attach_lanes(key_states, LaneRows(self._table, first.layer_in_group, self._seen)), value_states
        self._write(key_states.chunk(len(key_states)), value_states.chunk(len(value_states)))
        return attach_lanes(key_states, LaneRows(None, 0, self._seen)), value_states

    def _write(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        if self._layers[0].is_rounded:
            for layer, *rows in zip(self._layers, keys, values, strict=True):
                layer.write(*rows)
            return
        targets = [layer.written for layer in self._layers]
        torch._foreach_copy_([*(each for each, _ in targets), *(each for _, each in targets)], [*keys, *values])

    def _seen(self) -> Rows:
        return [layer.seen for layer in self._layers]

    def get_seq_length(self) -> int:
        return max(layer.get_seq_length() for layer in self._layers)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._layers[0].get_max_length()


class BatchStateAndRowLayer(StateLayer, TorchBatchRowLayer):  # type: ignore[no-untyped-call, override]
    def __init__(self, layers: Sequence[StateAndRowLayer], tables: Tables) -> None:
        TorchBatchRowLayer.__init__(self, layers, tables)
        StateLayer.__init__(self, layers[0].number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass


class BatchCache(Cache):
    """The cache of several lanes for one step: rows are not copied, states are stacked and then scattered."""

    def __init__(
        self,
        caches: Sequence[LaneCache],
        parts: Sequence[TorchStatePart],
        states: Sequence[Sequence[Tensor]],
        tables: Tables,
    ) -> None:
        """`states` are the tensors of each lane, in the order of `parts`."""
        layers = [_batch_layer(layers, tables) for layers in zip(*(cache.layers for cache in caches), strict=True)]
        super().__init__(layers=layers)
        self._length = max(cache.get_seq_length() for cache in caches)
        self._parts = parts
        self._states = states
        for part, views in zip(parts, zip(*states, strict=True), strict=True):
            layer: Any = self.layers[part.layer]
            layer.bind(part.name, part.state_index, torch.cat(views))

    def scatter(self) -> None:
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
    elif isinstance(first, TorchRowLayer):
        return TorchBatchRowLayer(layers, tables)
    elif isinstance(first, StateLayer):
        batch = StateLayer(first.number_of_states)
    else:
        return first  # it has no content
    batch.mark(tuple(first.has_previous_state.values()))
    return batch
