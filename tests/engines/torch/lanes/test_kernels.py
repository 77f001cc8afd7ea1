"""The kernels that serve all lanes at once, against attention lane by lane; on CUDA only."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bough.cache.tree.state import Group, Kind
from bough.engines.shared.row_memory import LaneSizes
from bough.engines.torch.lanes.buffers import TorchRowBuffer
from bough.engines.torch.layout import TorchRowLayout
from bough.engines.torch.row_types import ClippedNumbers

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
LAYERS = 3


def buffers(lengths: list[int], heads: int, dim: int, dtype: torch.dtype) -> list[TorchRowBuffer]:
    """Lanes of these lengths with random rows, each about to take in one more."""
    device = torch.device("cuda")
    made = []
    for length in lengths:
        layout = TorchRowLayout(tuple(range(LAYERS)), heads, dim, dim, dtype.itemsize, dtype, dtype)
        buffer = TorchRowBuffer(
            Group(0, Kind.FULL, layout.row_bytes), layout, device, LaneSizes(1 << 17, 512), ClippedNumbers(device)
        )
        buffer.reserve(length + 1, 0)
        for plane in buffer._planes:
            plane.normal_()
        buffer.begin_run(length, 1)
        made.append(buffer)
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "shared", "dim"), [(8, 4, 128), (3, 3, 64), (1, 8, 256), (4, 1, 32), (2, 24, 64)])
def test_all_lanes_at_once_are_each_lane_by_itself(heads: int, shared: int, dim: int, dtype: torch.dtype) -> None:
    from bough.engines.torch.lanes.kernels import LaneTable

    torch.manual_seed(0)
    lanes = buffers([1, 63, 64, 511, 512, 513, 5000], heads, dim, dtype)
    table = LaneTable(lanes, torch.device("cuda"))
    for layer in range(LAYERS):
        keys, values = (torch.randn(len(lanes), 1, heads, dim, device="cuda", dtype=dtype).transpose(1, 2) for _ in "kv")
        query = torch.randn(len(lanes), heads * shared, 1, dim, device="cuda", dtype=dtype)
        table.write(layer, keys, values)
        output = table.attend(layer, query, heads, query.shape[-1] ** -0.5)

        for number, lane in enumerate(lanes):
            own_keys, own_values = lane.seen[layer]
            assert torch.equal(own_keys[0, :, -1], keys[number, :, 0])
            assert torch.equal(own_values[0, :, -1], values[number, :, 0])
            expected = F.scaled_dot_product_attention(
                query[number : number + 1].float(), own_keys.float(), own_values.float(), enable_gqa=True
            )
            assert (output[number] - expected[0]).abs().max() < 0.02


def test_a_lane_gets_the_same_bits_whatever_runs_beside_it() -> None:
    from bough.engines.torch.lanes.kernels import LaneTable

    torch.manual_seed(0)
    lanes = buffers([700, 40, 9000], 2, 64, torch.bfloat16)
    query = torch.randn(3, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    together = LaneTable(lanes, torch.device("cuda")).attend(1, query, 2, query.shape[-1] ** -0.5)

    for number, lane in enumerate(lanes):
        alone = LaneTable([lane], torch.device("cuda")).attend(1, query[number : number + 1], 2, query.shape[-1] ** -0.5)
        assert torch.equal(together[number], alone[0])
