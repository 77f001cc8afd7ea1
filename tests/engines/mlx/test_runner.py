"""The library on MLX through its public names: the answers are those of torch without a cache, whatever was reused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import bough
from bough import Completion, Runner
from bough.runtime import load_shape
from tests.runner.conftest import one_thread as one_thread  # a fixture: it works by being here
from tests.runner.test_runner import bytes_of_two_lanes, check_budget, check_same, check_turns, conversation
from tests.tiny_models import CONFIGS, ON_MLX, make_folder, others_slow

pytestmark = pytest.mark.mlx


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(name: str, folders: Path, engine: str = "mlx", **settings: object) -> Runner:
    folder = folders / name
    if not folder.exists():
        make_folder(name, folder)
    return bough.load(folder, cache_folder=folders / "cache", engine=engine, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", others_slow(ON_MLX))
def test_cached_answers_on_mlx_equal_uncached_ones_on_torch(name: str, folders: Path) -> None:
    with load(name, folders) as cached, load(name, folders, "torch", cache=False) as plain:
        reused = 0
        for prompt in conversation(1):
            ours = cached.generate(prompt, max_tokens=6, logprobs=2, ignore_eos=True)
            check_same(ours, plain.generate(prompt, max_tokens=6, logprobs=2, ignore_eos=True))
            assert ours.usage.cached_tokens + ours.usage.computed_tokens == len(prompt)
            reused += ours.usage.cached_tokens
        assert (cached.runtime.engine.info.name, plain.runtime.engine.info.name) == ("mlx", "torch")
        assert reused > 0 and cached.runtime.engine.capabilities.can_reuse


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_under_a_tight_budget_answers_stay_right_and_bytes_within(name: str, folders: Path) -> None:
    with load(name, folders) as wide:
        budget = bytes_of_two_lanes(wide)
    with load(name, folders, device_memory=budget, lanes=2) as tight, load(name, folders, "torch", cache=False) as plain:
        check_budget(tight, plain, budget, num_conversations=2)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "falcon_h1"])
def test_two_streams_that_take_turns_do_not_mix(name: str, folders: Path) -> None:
    with load(name, folders) as runner:
        check_turns(runner)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "falcon_h1"])
def test_a_conversation_may_go_on_in_another_thread(name: str, folders: Path) -> None:
    prompts = conversation(3)
    with load(name, folders) as runner, load(name, folders, "torch", cache=False) as plain:
        answers: list[Completion] = []
        for prompt in prompts:
            asking = threading.Thread(
                target=lambda ids=prompt: answers.append(runner.generate(ids, max_tokens=4, logprobs=2, ignore_eos=True))
            )
            asking.start()
            asking.join()
        expected = [plain.generate(prompt, max_tokens=4, logprobs=2, ignore_eos=True) for prompt in prompts]

    assert len(answers) == len(prompts)  # no thread ended in an error
    for ours, theirs in zip(answers, expected, strict=True):
        check_same(ours, theirs)
    assert sum(answer.usage.cached_tokens for answer in answers) > 0


@pytest.fixture
def random_llama(tmp_path: Path) -> Iterator[Runner]:
    with Runner(load_shape({"model_type": "llama", **CONFIGS["llama"]}, engine="mlx", cache_folder=tmp_path)) as runner:
        yield runner


def test_a_shape_runs_with_random_weights(random_llama: Runner) -> None:
    first = random_llama.generate(list(range(3, 40)), max_tokens=4, ignore_eos=True)
    again = random_llama.generate(list(range(3, 40)), max_tokens=4, ignore_eos=True)

    assert random_llama.runtime.engine.info.name == "mlx"
    assert first.token_ids == again.token_ids
    assert again.usage.computed_tokens == 1


def test_a_device_of_another_engine_is_refused_by_name(folders: Path) -> None:
    with pytest.raises(bough.ModelError, match="cuda"):
        load("llama", folders, device="cuda")
