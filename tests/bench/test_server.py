"""A server for a benchmark: what is said of one that does not start."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.bench.server import LOG, run_server
from bough.errors import EngineError


def test_a_server_that_does_not_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="No such option"), run_server(tmp_path, "bough", "serve", "--no-such-flag"):
        pass

    assert "No such option" in (tmp_path / LOG).read_text(encoding="utf-8")
