"""A tree of 1 GB is exported while answers stream, and the archive imported again under another salt."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.gaps.figures import GapCase, GapFigures
from benchmarks.gaps.server import TIMEOUT_S, Server, running_server
from benchmarks.gaps.stored import TreeFacts, write_conversations
from benchmarks.gaps.streams import GapStreams

PART = "transfer"
TREE_BYTES = 10**9
QUIET_S = 15.0

_SALT, _OTHER_SALT = "exported", "imported"
_PIECE_BYTES = 2**20
_AFTER_S = 1.0
_SHOWN_CHARACTERS = 300


def measure_transfer(model: str, folder: Path, facts: TreeFacts) -> Iterator[GapCase]:
    """Export, then import, each beside the streams."""
    num_bytes = write_conversations(folder, facts, _SALT, TREE_BYTES)
    archive = folder / "archive.tar"
    with running_server(model, folder) as server, GapStreams(server.url, model) as streams:
        for name, transfer in (("export", _export), ("import", _import)):
            quiet, gaps = streams.rest(QUIET_S), list[float]()
            with streams.watch(gaps):
                found = transfer(server, archive)
                time.sleep(_AFTER_S)
            yield GapCase(
                PART,
                f"{name} of {num_bytes / 1e9:.1f} GB",
                quiet,
                GapFigures.of(gaps),
                _note(found),
                streams.add_facts(found),
            )


def _note(found: dict[str, Any]) -> str:
    seconds = f"{found['total_s']:.1f} s"
    return seconds if found.get("is_taken", True) else f"refused with {found['status']} after {seconds}"


def _export(server: Server, archive: Path) -> dict[str, Any]:
    started_s, headers = time.monotonic(), {"X-Bough-Salt": _SALT}
    url = f"{server.url}/api/cache/export"
    with httpx.stream("POST", url, headers=headers, timeout=TIMEOUT_S) as answer, archive.open("wb") as output:
        answer.raise_for_status()
        answered_s = time.monotonic() - started_s
        for piece in answer.iter_raw(_PIECE_BYTES):
            output.write(piece)
    total_s = time.monotonic() - started_s
    return {"answered_s": round(answered_s, 2), "total_s": round(total_s, 2), "bytes": archive.stat().st_size}


def _import(server: Server, archive: Path) -> dict[str, Any]:
    """Send the archive. Whether it is taken or refused is told as it is."""
    size, started_s = archive.stat().st_size, time.monotonic()
    headers = {"X-Bough-Salt": _OTHER_SALT, "Content-Length": str(size)}
    url = f"{server.url}/api/cache/import"
    answer = httpx.post(url, content=_pieces(archive), headers=headers, timeout=TIMEOUT_S)
    total_s = round(time.monotonic() - started_s, 2)
    is_taken = answer.status_code == 200
    found = {"is_taken": is_taken, "status": answer.status_code, "total_s": total_s, "bytes": size}
    return found | {"answer": answer.json() if is_taken else answer.text[:_SHOWN_CHARACTERS]}


def _pieces(file: Path) -> Iterator[bytes]:
    with file.open("rb") as source:
        while piece := source.read(_PIECE_BYTES):
            yield piece
