"""Names of applications, and what is told of replicas that cannot start."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = pytest.mark.ray

from bough.errors import SettingsError  # noqa: E402
from bough.ray.app import build_app  # noqa: E402
from bough.ray.applications import _cause, name_application  # noqa: E402

TOLD = """Deploying application bough failed: The deployment failed to start 2 times in a row. Error:
ray::ServeReplica.initialize_and_get_metadata() (pid=7)
  File "replica.py", line 44, in __init__
    runtime = await asyncio.to_thread(_load, own)
ValueError: something before it

During handling of the above exception, another exception occurred:

bough.errors.SettingsError: store is 'x', and needs the package obstore: pip install 'bough-llm[store]'
"""


def test_models_have_applications_of_their_own_whatever_their_names() -> None:
    names = [name_application(model) for model in ("little", "qwen3:4b", "qwen3-4b", "team/model")]
    assert names[0] == "bough-little"
    assert len(set(names)) == 4
    assert not any(character in name for name in names for character in ":/#")


def test_the_last_error_of_a_replica_is_told_and_not_its_traceback() -> None:
    assert _cause(TOLD) == "SettingsError: store is 'x', and needs the package obstore: pip install 'bough-llm[store]'"
    assert _cause("no replica came\nand more") == "no replica came"


def test_several_ingresses_with_keys_need_a_secret(tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("one a-key-that-is-long-enough\n")
    with pytest.raises(SettingsError, match="there are 2 ingresses and a keys_file: set store_secret_file"):
        build_app({"ingresses": 2, "keys_file": str(tmp_path / "keys.txt")})
