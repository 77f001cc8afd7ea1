"""Pages and states that have left their lane, and moving them between the device and the host.

Each has one piece of memory that belongs to it alone: a tensor on the device, or a piece of the host pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bough.cache.tree.state import Buffer, Group, Page, Range, State, Tier
from bough.engines.shared.errors import as_engine_errors
from bough.engines.shared.pages import PageAllocator, content_of, set_content
from bough.engines.torch.host.pool import Piece
from bough.engines.torch.host.transfer import make_transfers
from bough.engines.torch.layout import TorchLayout

Content = Tensor | Piece
_ALIGNMENT = 16  # of a bytearray


class TorchPages(PageAllocator):
    """Allocates every page and state of one model. `transfers` is None where there is no host tier."""

    def __init__(self, layout: TorchLayout, device: torch.device) -> None:
        super().__init__()
        self.transfers = make_transfers(layout, device)
        self._layout = layout
        self._device = device

    @as_engine_errors("moving content to the host")
    def to_host(self, item: Page | State) -> None:
        """Move the content to pinned host memory; does not wait for the copy."""
        content = content_of(item)
        assert self.transfers is not None, "this device has no host tier"
        assert isinstance(content, Tensor), f"{type(item).__name__} of group {item.group.index} is not on the device"
        self._put(item, self.transfers.to_host(content))

    @as_engine_errors("moving content to the device")
    def to_device(self, item: Page | State) -> None:
        """Move the content back to the device; does not wait for the copy."""
        content = content_of(item)
        assert self.transfers is not None, "this device has no host tier"
        assert isinstance(content, Piece), f"{type(item).__name__} of group {item.group.index} is not on the host"
        self._put(item, self.transfers.to_device(content, self._dtype(item.group)))

    @contextmanager
    def on_device(self, page: Page) -> Iterator[Tensor]:
        """The rows of a page on the device, from either tier, for computation within the context."""
        content = content_of(page)
        if isinstance(content, Piece):
            assert self.transfers is not None
            with self.transfers.staged(content) as staged:
                yield staged.view(self._dtype(page.group))
        else:
            assert content is not None, f"a page of [{page.start}, {page.end}) without rows"
            yield content

    def read_state(self, state: State, target: Tensor) -> None:
        """Copy a state, from either tier, to bytes on the device."""
        content = content_of(state)
        assert content is not None, f"a state at {state.offset} without data"
        self._copy_to(content, target)

    def _copy_to(self, content: Content, target: Tensor) -> None:
        """Copy content, from either tier, to bytes on the device."""
        if isinstance(content, Piece):
            assert self.transfers is not None
            self.transfers.copy_to(content, target)
        else:
            target.copy_(content)

    def _put(self, item: Page | State, content: Any) -> None:
        set_content(item, content)
        self._count(item, content.nbytes, Tier.HOST if isinstance(content, Piece) else Tier.DEVICE)

    def _slice(self, page: Page, start: int, end: int) -> Content:
        rows = self._empty_like(page, end - start)
        for piece, whole in zip(self._split(page.group, rows, end - start), self._planes(page), strict=True):
            piece.copy_(whole[:, :, start - page.start : end - page.start])
        return rows

    def _joined(self, left: Page, right: Page) -> Content:
        at, num_rows = left.end - left.start, right.end - left.start
        rows = self._empty_like(left, num_rows)
        planes = self._split(left.group, rows, num_rows)
        for whole, first, second in zip(planes, self._planes(left), self._planes(right), strict=True):
            whole[:, :, :at].copy_(first)
            whole[:, :, at:].copy_(second)
        return rows

    def _to_bytes(self, content: Content) -> memoryview:
        if isinstance(content, Piece):
            content.wait()
            in_memory = content.memory
        else:
            in_memory = content.cpu().view(torch.uint8) if self.transfers is None else self.transfers.read(content)
        return in_memory.numpy().data.toreadonly()

    @as_engine_errors("taking content in")
    def _from_bytes(self, group: Group, span: Range, data: Buffer, tier: Tier) -> Content:
        assert tier is not Tier.DISK, "an engine has no disk"
        content = as_tensor(data)
        if tier is Tier.HOST and self.transfers is not None:
            return self.transfers.copy_from_cpu(content)
        return content.view(self._dtype(group)).to(self._device)

    def _empty_like(self, page: Page, num_rows: int) -> Content:
        """Memory for that many rows, in the page's tier."""
        layout = self._layout.rows[page.group]
        if isinstance(page.rows, Piece):
            assert self.transfers is not None
            return self.transfers.pool.take(num_rows * layout.row_bytes)
        return layout.empty(num_rows, self._device)

    def _planes(self, page: Page) -> list[Tensor]:
        return self._split(page.group, page.rows, page.end - page.start)

    def _split(self, group: Group, content: Content, num_rows: int) -> list[Tensor]:
        """The planes of rows, to be read or written now; on the host, waits for the device's copies."""
        layout = self._layout.rows[group]
        if isinstance(content, Piece):
            content.wait()
            content = content.memory.view(layout.dtype)
        return layout.split(content, num_rows)

    def _dtype(self, group: Group) -> torch.dtype:
        return self._layout.rows[group].dtype if group in self._layout.rows else torch.uint8


def as_tensor(data: Buffer) -> Tensor:
    """The bytes of `data` without a copy, unless they are read-only or not aligned."""
    tensor = torch.frombuffer(bytearray(data) if memoryview(data).readonly else data, dtype=torch.uint8)
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()
