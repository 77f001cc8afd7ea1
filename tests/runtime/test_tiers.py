"""The tree outlives the process: through the library's public names, on real models."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest

import bough
from bough.cache.admin.trees import list_trees
from bough.config import load_settings
from bough.models import ModelFiles
from bough.runner import Runner
from bough.runtime import load_runtime
from tests.tiny_models import make_folder

pytestmark = pytest.mark.usefixtures("reading_pays")

KINDS = ("llama", "gemma3_text", "qwen3_next", "mamba2", "granitemoehybrid")  # full, window, hybrid and recurrent state
chance = random.Random(5)
PROMPT = [chance.randrange(3, 90) for _ in range(600)]
OTHER = [*PROMPT[:400], *(chance.randrange(3, 90) for _ in range(150))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(name: str, folders: Path, cache_folder: Path, **settings: Any) -> bough.Runner:
    if not (folders / name).exists():
        make_folder(name, folders / name)
    options = {"disk": "1GB", "disk_free": 0} | settings
    return bough.load(folders / name, cache_folder=cache_folder, threads=1, **options)


def ask(runner: bough.Runner, prompt: list[int], **options: Any) -> bough.Completion:
    return runner.generate(prompt, max_tokens=4, ignore_eos=True, **options)


@pytest.mark.parametrize("name", KINDS)
def test_a_restart_reuses_what_was_computed_and_answers_the_same(name: str, folders: Path, tmp_path: Path) -> None:
    with load(name, folders, tmp_path) as runner:
        first = [ask(runner, prompt) for prompt in (PROMPT, OTHER)]
    with load(name, folders, tmp_path) as runner:
        second = [ask(runner, prompt) for prompt in (PROMPT, OTHER)]
    for before, after in zip(first, second, strict=True):
        assert after.usage.cached_tokens == after.usage.prompt_tokens - 1
        assert after.token_ids == before.token_ids
    assert second[0].timings.loading.disk_bytes > 0


def test_a_request_that_is_not_stored_leaves_nothing_on_disk(folders: Path, tmp_path: Path) -> None:
    with load("llama", folders, tmp_path) as runner:
        ask(runner, PROMPT, keep_state=False)
        assert runner.cache.flush()
        assert runner.cache.stats()["disk_files"] == 0
        ask(runner, PROMPT)
        assert runner.cache.flush()
        assert runner.cache.stats()["disk_files"] == 3


def test_clearing_deletes_the_files(folders: Path, tmp_path: Path) -> None:
    with load("llama", folders, tmp_path) as runner:
        ask(runner, PROMPT)
        runner.cache.flush()
        runner.cache.clear()
        (tree,) = list_trees(tmp_path / "trees")
        assert not [file for file in (tree.folder / "pages").rglob("*") if file.is_file()]
    with load("llama", folders, tmp_path) as runner:
        assert ask(runner, PROMPT).usage.cached_tokens == 0


def test_two_salts_share_nothing_after_a_restart(folders: Path, tmp_path: Path) -> None:
    with load("llama", folders, tmp_path) as runner:
        ask(runner, PROMPT, salt="alice")
    with load("llama", folders, tmp_path) as runner:
        assert ask(runner, PROMPT, salt="bob").usage.cached_tokens == 0
        assert ask(runner, PROMPT).usage.cached_tokens == 0
        assert ask(runner, PROMPT, salt="alice").usage.cached_tokens == len(PROMPT) - 1


def test_other_weights_find_nothing(folders: Path, tmp_path: Path) -> None:
    with load("llama", folders, tmp_path) as runner:
        ask(runner, PROMPT)
    make_folder("llama", folders / "again" / "llama", hidden_act="gelu")
    with load("llama", folders / "again", tmp_path) as runner:
        assert ask(runner, PROMPT).usage.cached_tokens == 0


def test_a_second_runner_says_who_has_the_disk_and_reads_it(
    folders: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with load("llama", folders, tmp_path) as first:
        answer = ask(first, PROMPT)
        first.cache.flush()
        with caplog.at_level(logging.WARNING), load("llama", folders, tmp_path) as second:
            owner = f"in use by process {os.getpid()}"
            assert [record.message for record in caplog.records] == [
                f"the tree of llama is {owner}: reading it, writing nothing"
            ]
            stats = second.cache.stats()
            assert stats["disk_is_read_only"] and owner in stats["disk_problem"]
            again = ask(second, PROMPT)
            assert (again.usage.cached_tokens, again.token_ids) == (len(PROMPT) - 1, answer.token_ids)
            ask(second, OTHER)
            assert not second.cache.flush()  # what is new stays in memory
            assert second.cache.export_file(tmp_path / "tree.tar").num_skipped > 0
            with pytest.raises(bough.BoughError, match=f"nothing was added on disk.*{owner}"):
                second.cache.import_file(tmp_path / "tree.tar")
            with pytest.raises(bough.BoughError, match=f"nothing was deleted on disk.*{owner}"):
                second.cache.clear()
            assert ask(second, PROMPT).usage.cached_tokens == 0
        assert ask(first, PROMPT).usage.cached_tokens == len(PROMPT) - 1


def test_a_runner_that_only_reads_removes_no_other_tree(folders: Path, tmp_path: Path) -> None:
    with load("llama", folders, tmp_path) as first, load("gemma3_text", folders, tmp_path) as other:
        for runner in (first, other):
            ask(runner, PROMPT)
            runner.cache.flush()
        other.close()
        with load("llama", folders, tmp_path, disk="1KB"):
            assert len(list_trees(tmp_path / "trees")) == 2
    with load("llama", folders, tmp_path, disk="1KB"):
        assert len(list_trees(tmp_path / "trees")) == 1


def test_a_disk_that_is_off_is_not_touched(folders: Path, tmp_path: Path) -> None:
    with load("llama", folders, tmp_path, disk=0) as runner:
        ask(runner, PROMPT)
    assert not (tmp_path / "trees").exists()


def test_memory_too_small_for_all_conversations_is_made_up_for_by_the_disk(folders: Path, tmp_path: Path) -> None:
    with load("llama", folders, tmp_path, lanes=1) as plain:
        ask(plain, PROMPT)
        lane_bytes, tree_bytes = (plain.cache.stats()[name] for name in ("lane_bytes", "tree_bytes"))
        plain.cache.clear()
    budget = int(lane_bytes) + 2 * int(tree_bytes)  # type: ignore[arg-type]
    prompts = [[number + 3, *PROMPT[1:]] for number in range(6)]
    with load("llama", folders, tmp_path, lanes=1, device_memory=budget) as runner:
        for prompt in prompts * 2:
            answer = ask(runner, prompt)
            assert runner.cache.flush()  # an eviction does not wait for it
            assert runner.cache.stats()["used_bytes"] <= budget  # type: ignore[operator]
        assert answer.usage.cached_tokens == len(PROMPT) - 1
        assert runner.cache.stats()["evicted_tokens"] == 0


def test_a_salt_that_is_no_text_is_refused(folders: Path, tmp_path: Path) -> None:
    with load("llama", folders, tmp_path) as runner, pytest.raises(bough.RequestError, match="valid Unicode"):
        ask(runner, PROMPT, salt="\udc00")


def test_a_salt_sees_its_own_tree_after_a_restart_and_what_it_keeps_or_forgets_is_its_own(
    folders: Path, tmp_path: Path
) -> None:
    with load("llama", folders, tmp_path) as runner:
        for salt in ("alice", "bob"):
            ask(runner, PROMPT, salt=salt)

    with load("llama", folders, tmp_path) as runner:
        assert sum(node.num_tokens for node in runner.cache.tree("alice").nodes) >= len(PROMPT)
        runner.cache.keep(PROMPT, salt="alice")
        assert runner.cache.is_kept(PROMPT, salt="alice") and not runner.cache.is_kept(PROMPT, salt="bob")
        runner.cache.clear("alice")
        assert not runner.cache.tree("alice").nodes and runner.cache.tree("bob").nodes


def test_an_export_comes_into_a_running_tree(folders: Path, tmp_path: Path) -> None:
    with load("llama", folders, tmp_path / "one") as runner:
        first = ask(runner, PROMPT)
        assert runner.cache.export_file(str(tmp_path / "tree.tar")).num_items > 0

    with load("llama", folders, tmp_path / "other") as runner:
        ask(runner, [7] * 300)
        running = runner.stream([9] * 40, max_tokens=8, ignore_eos=True)
        next(running)
        assert runner.cache.import_file(tmp_path / "tree.tar", salt="guest").num_items > 0
        assert len(list(running)) > 1  # it goes on
        again = ask(runner, PROMPT, salt="guest")
        assert (again.usage.cached_tokens, again.token_ids) == (len(PROMPT) - 1, first.token_ids)
        assert ask(runner, [7] * 300).usage.cached_tokens == 299
        runner.runtime.worker.call(runner.runtime.prefix_cache.check).result()


def test_a_model_under_another_name_goes_on_with_its_tree_unless_it_is_in_use(tmp_path):
    folder = make_folder("llama", tmp_path / "weights", vocab_size=64)
    settings = {"cache_folder": tmp_path / "cache", "disk": 64 * 2**20, "lanes": 2, "device": "cpu"}
    prompt = list(range(1, 41))

    def answer(name: str) -> int:
        with Runner(load_runtime(ModelFiles(name, folder), load_settings(settings))) as runner:
            return runner.generate(prompt, max_tokens=2).usage.cached_tokens

    answer("first")
    assert answer("second") == len(prompt) - 1
    with Runner(load_runtime(ModelFiles("first", folder), load_settings(settings))):
        assert answer("third") == 0
    assert len(list((tmp_path / "cache" / "trees").iterdir())) == 2
