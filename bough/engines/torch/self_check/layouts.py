"""Layouts of models, kept as small JSON files, so that a model is probed only once.

Only layouts in which every layer has rows and no state are kept: probing the others costs little of what loading them
does. A file that cannot be read, or holds something else, counts as absent.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import torch

from bough.cache.tree.state import Group, Kind
from bough.config import Settings
from bough.engines.shared.shapes import LayerKind
from bough.engines.torch.forward import Forward
from bough.engines.torch.layout import Layout, RowLayout
from bough.engines.torch.self_check.probe import probe
from bough.system.folders import write_private

_FORMAT = 1  # raise it when the probe or the layout changes


def find_layout(settings: Settings, key: str, forward: Forward) -> Layout:
    """The layout kept under the key of the model's verdict, or the one that the probe finds now, which is then kept."""
    file = settings.cache_folder / "layouts" / f"{key}.json"
    layout = _read(file)
    if layout is None:
        layout = probe(forward)
        if layout.groups and not layout.states and not layout.empty:
            _write(file, _describe(layout))
    return layout


def _read(file: Path) -> Layout | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return _make(found) if found["format"] == _FORMAT else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(file: Path, description: dict[str, Any]) -> None:
    """In a folder that cannot be written, the next load probes again."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_private(file, json.dumps(description))


def _describe(layout: Layout) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "groups": [
            {
                "kind": group.kind.value,
                "window": group.window,
                "layers": rows.layers,
                "sizes": [rows.heads, rows.key_dim, rows.value_dim, rows.itemsize],
                "dtype": str(rows.dtype).removeprefix("torch."),
            }
            for group, rows in layout.rows.items()
        ],
        "layers": [[each.rows.value if each.rows else None, each.window] for each in layout.kinds],
        "vocab_size": layout.vocab_size,
    }


def _make(found: dict[str, Any]) -> Layout:
    """The layout of a description. Raises KeyError, TypeError, ValueError or AttributeError if it is none."""
    rows: dict[Group, RowLayout] = {}
    for index, each in enumerate(found["groups"]):
        heads, key_dim, value_dim, itemsize = each["sizes"]
        shape = RowLayout(tuple(each["layers"]), heads, key_dim, value_dim, itemsize, getattr(torch, each["dtype"]))
        rows[Group(index, Kind(each["kind"]), bytes_per_token=shape.row_bytes, window=each["window"])] = shape
    kinds = tuple(LayerKind(Kind(kind) if kind else None, window) for kind, window in found["layers"])
    return Layout(tuple(rows), rows, {}, len(kinds), found["vocab_size"], kinds)
