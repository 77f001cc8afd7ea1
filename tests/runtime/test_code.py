"""State is only used by the code that computed it: other sources or versions of a library find nothing of it."""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

import bough
from bough.cache.admin.trees import list_trees
from bough.cache.disk import DiskError
from bough.engines.torch import engine
from tests.tiny_models import make_folder

pytestmark = pytest.mark.usefixtures("reading_pays")
chance = random.Random(7)
PROMPT = [chance.randrange(3, 90) for _ in range(400)]
SOURCES = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.configuration_llama",
    "transformers.cache_utils",
    "transformers.masking_utils",
    "transformers.modeling_rope_utils",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder("llama", tmp_path_factory.mktemp("models") / "llama")


def load(model: Path, folder: Path, **settings: Any) -> bough.Runner:
    options = {"disk": "1GB", "disk_free": 0} | settings
    return bough.load(model, cache_folder=folder, threads=1, **options)


def ask(model: Path, folder: Path, **settings: Any) -> bough.Completion:
    with load(model, folder, **settings) as runner:
        return runner.generate(PROMPT, max_tokens=4, ignore_eos=True)


def change_source(monkeypatch: pytest.MonkeyPatch, name: str, folder: Path) -> None:
    """Let a module's file be another one, as if it had been installed in another version."""
    module = sys.modules[name]
    assert module.__file__ is not None
    changed = folder / f"{name}.py"
    changed.write_text(Path(module.__file__).read_text(encoding="utf-8") + "# corrected\n", encoding="utf-8")
    monkeypatch.setattr(module, "__file__", str(changed))


@pytest.mark.parametrize("name", SOURCES)
def test_what_one_source_computed_another_does_not_use_and_says_so_once(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = ask(model, tmp_path)
    assert ask(model, tmp_path).usage.cached_tokens == len(PROMPT) - 1
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        change_source(patch, name, tmp_path)
        after = ask(model, tmp_path)
        assert after.usage.cached_tokens == 0
        assert after.token_ids == before.token_ids
        assert ["is set aside: it was computed by" in record.message for record in caplog.records] == [True]
        assert ask(model, tmp_path).usage.cached_tokens == len(PROMPT) - 1
        assert len(caplog.records) == 1
    assert ask(model, tmp_path).usage.cached_tokens == len(PROMPT) - 1  # the tree of that code is still there


def test_what_one_source_computed_another_does_not_find_in_a_store(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore")
    (secret := tmp_path / "secret").write_text("a secret of a few words")
    shared = {"store": str(tmp_path / "store"), "store_secret_file": secret}
    ask(model, tmp_path / "first", **shared)
    assert ask(model, tmp_path / "second", **shared, disk=0).usage.cached_tokens > 0
    change_source(monkeypatch, SOURCES[0], tmp_path)
    assert ask(model, tmp_path / "third", **shared, disk=0).usage.cached_tokens == 0


def test_an_archive_of_another_source_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(model, tmp_path / "first") as runner:
        runner.generate(PROMPT, max_tokens=1)
        runner.cache.flush()
        runner.cache.export_file(tmp_path / "tree.tar")
    change_source(monkeypatch, SOURCES[0], tmp_path)
    with load(model, tmp_path / "second") as runner, pytest.raises(DiskError, match="other weights, settings or versions"):
        runner.cache.import_file(tmp_path / "tree.tar")


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_a_patch_version_keeps_the_tree_and_a_minor_version_does_not(
    library: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = getattr(engine, library)
    major, minor, _ = Version(module.__version__).release
    ask(model, tmp_path)
    monkeypatch.setattr(module, "__version__", f"{major}.{minor}.99+elsewhere")
    assert ask(model, tmp_path).usage.cached_tokens == len(PROMPT) - 1
    monkeypatch.setattr(module, "__version__", f"{major}.{minor + 1}.0")
    assert ask(model, tmp_path).usage.cached_tokens == 0


@pytest.mark.mlx
def test_what_another_source_of_mlx_lm_computed_is_not_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx_lm")
    ask(model, tmp_path, engine="mlx")
    assert ask(model, tmp_path, engine="mlx").usage.cached_tokens == len(PROMPT) - 1
    change_source(monkeypatch, "mlx_lm.models.llama", tmp_path)
    assert ask(model, tmp_path, engine="mlx").usage.cached_tokens == 0


def test_a_tree_says_what_computed_it(model: Path, tmp_path: Path) -> None:
    ask(model, tmp_path)
    (tree,) = list_trees(tmp_path / "trees")
    assert f"transformers {'.'.join(transformers.__version__.split('.')[:2])}" in tree.computed_by


def test_rows_of_one_type_are_not_used_as_another_and_found_again(model: Path, tmp_path: Path) -> None:
    cached = [ask(model, tmp_path, kv=kv).usage.cached_tokens for kv in ("auto", "float16", "int8", "float16", "float32")]

    assert cached == [0, 0, 0, len(PROMPT) - 1, len(PROMPT) - 1]  # float32 is what auto is for float32 weights
