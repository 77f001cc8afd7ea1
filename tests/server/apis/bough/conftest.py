"""The servers of these tests: one for everybody, and one with the keys of Alice and Bob."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.servers import Address, StartServer


@pytest.fixture(scope="session")
def served(tiny_server: StartServer) -> Address:
    return tiny_server()


@pytest.fixture(scope="session")
def keyed(tiny_server: StartServer, tmp_path_factory: pytest.TempPathFactory) -> Address:
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("alices-key\nbobs-key\n")
    file.chmod(0o600)
    return tiny_server(keys_file=file, log_json=True)
