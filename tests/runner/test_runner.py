"""The library through its public names: ids in, ids out, cached against uncached, on every architecture we can build."""

from __future__ import annotations

import gc
import itertools
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bough
from bough import Chunk, Completion, PromptTooLong, RequestError, Runner, SamplingParams
from bough.config import Settings
from tests.tiny_models import CONFIGS, make_folder, make_model, others_slow

CLOSE = 1e-4  # two best log-probabilities nearer than this may change places by rounding
REUSING = (
    "llama",
    "qwen3",
    "mistral",
    "gemma3_text",
    "gpt_oss",
    "qwen3_next",
    "lfm2",
    "falcon_h1",
    "mamba2",
    "granitemoehybrid",
    "gemma2",
    "gemma3n_text",
    "bamba",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(name: str, folders: Path, **settings: object) -> Runner:
    folder = folders / name
    if not folder.exists():
        make_folder(name, folder)
    chosen = {"engine": "torch", "cache_folder": folders / "cache"} | settings
    return bough.load(folder, **chosen)  # type: ignore[arg-type]


def conversation(seed: int) -> list[list[int]]:
    """Prompts as clients send them: growing turns, a second chat, a branch, a retry, an edit, the first chat again."""
    chance = random.Random(seed)

    def some(count: int) -> list[int]:
        return [chance.randrange(3, 97) for _ in range(count)]

    system = some(30)
    first = system + some(12)
    longer = first + some(20)
    other = system + some(25)
    return [
        first,
        longer,
        other,
        longer,
        longer[:45] + some(9),
        other + some(30),
        first,
        system + some(1),
        longer + some(40),
    ]


def check_same(cached: Completion, plain: Completion) -> None:
    """The same greedy tokens, unless two candidates are as good as equal; then the rest may differ."""
    for ours, theirs in zip(cached.logprobs, plain.logprobs, strict=False):
        if ours.token_id != theirs.token_id:
            best, second = theirs.top[0].logprob, theirs.top[1].logprob
            assert best - second < CLOSE, f"{ours} instead of {theirs}"
            return
        assert ours.logprob == pytest.approx(theirs.logprob, abs=CLOSE)
    assert cached.token_ids == plain.token_ids


def bytes_of_two_lanes(runner: Runner) -> int:
    """A budget that is tight: of two lanes with a conversation's tokens each."""
    runner.generate(list(range(3, 90)), max_tokens=4)
    return 2 * int(runner.cache.stats()["lane_bytes"])


def check_budget(tight: Runner, plain: Runner, budget: int, num_conversations: int) -> None:
    """Conversations that do not fit have the same answers as without a cache, within the budget."""
    for prompt in itertools.chain(*map(conversation, range(num_conversations))):
        ours = tight.generate(prompt, max_tokens=4, logprobs=2, ignore_eos=True)
        check_same(ours, plain.generate(prompt, max_tokens=4, logprobs=2, ignore_eos=True))
        assert tight.cache.stats()["used_bytes"] <= budget
    assert tight.cache.stats()["evicted_tokens"] > 0


def check_turns(runner: Runner) -> None:
    """Two streams that take turns say what each says alone."""
    prompts = conversation(5)[1:3]
    alone = [runner.generate(prompt, max_tokens=8, ignore_eos=True).token_ids for prompt in prompts]
    runner.cache.clear()
    streams = [runner.stream(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts]
    turns = list(itertools.zip_longest(*streams))
    ends = [next(piece for piece in pieces if isinstance(piece, Completion)) for pieces in zip(*turns, strict=True)]
    assert [end.token_ids for end in ends] == alone


@pytest.mark.parametrize("name", others_slow(CONFIGS))
def test_cached_answers_equal_uncached_ones(name: str, folders: Path) -> None:
    with load(name, folders) as cached, load(name, folders, cache=False) as plain:
        reused = 0
        for prompt in conversation(1):
            ours = cached.generate(prompt, max_tokens=6, logprobs=2, ignore_eos=True)
            theirs = plain.generate(prompt, max_tokens=6, logprobs=2, ignore_eos=True)
            check_same(ours, theirs)
            assert theirs.usage.cached_tokens == 0
            assert ours.usage.cached_tokens + ours.usage.computed_tokens == len(prompt)
            reused += ours.usage.cached_tokens
        assert (reused > 0) == cached.runtime.engine.capabilities.can_reuse
        assert cached.runtime.engine.capabilities.can_reuse or cached.runtime.engine.capabilities.reason
        if name in REUSING:
            assert cached.runtime.engine.capabilities.can_reuse


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_under_a_tight_budget_answers_stay_right_and_bytes_within(name: str, folders: Path) -> None:
    with load(name, folders) as wide:
        budget = bytes_of_two_lanes(wide)
    with load(name, folders, device_memory=budget, lanes=2) as tight, load(name, folders, cache=False) as plain:
        check_budget(tight, plain, budget, num_conversations=3)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "falcon_h1"])
def test_two_streams_that_take_turns_do_not_mix(name: str, folders: Path) -> None:
    with load(name, folders) as runner:
        check_turns(runner)


@pytest.fixture(scope="module")
def llama(folders: Path) -> Iterator[Runner]:
    with load("llama", folders) as runner:
        yield runner


def test_a_stream_yields_chunks_and_ends_with_the_completion(llama: Runner) -> None:
    *chunks, last = llama.stream(list(range(3, 20)), max_tokens=5, ignore_eos=True)
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert isinstance(last, Completion)
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == last.token_ids  # type: ignore[union-attr]


def test_a_stream_that_is_left_frees_its_lane_and_keeps_its_work(llama: Runner) -> None:
    prompt = list(range(40, 90))
    stream = llama.stream(prompt, max_tokens=50, ignore_eos=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert llama.cache.stats()["busy_lanes"] == 0
    assert llama.generate(prompt, max_tokens=1).usage.cached_tokens == len(prompt) - 1


def test_a_warmed_prefix_is_kept_and_used(llama: Runner) -> None:
    prefix = [5, 6, 7] * 10
    llama.warm(prefix)
    assert llama.generate([*prefix, 9, 9], max_tokens=1).usage.cached_tokens == len(prefix)
    assert any(len(prefix) in node.kept for node in llama.cache.tree().nodes)


def test_the_tree_and_the_explanation_speak_of_what_is_there(llama: Runner) -> None:
    llama.cache.clear()
    prompt = list(range(3, 43))
    llama.generate(prompt, max_tokens=1)
    found = llama.cache.explain([*prompt[:20], 90, 91])
    assert (found.prompt_tokens, found.matched_tokens, found.cached_tokens) == (22, 20, 20)
    assert "20" in found.reason
    assert [node.num_tokens for node in llama.cache.tree().nodes] == [40]
    assert "40 tokens" in str(llama.cache.tree())
    assert llama.cache.tree().as_dict()[""][0]["token_ids"] == tuple(prompt)


def test_salts_share_nothing(llama: Runner) -> None:
    prompt = [11, 12, 13] * 9
    llama.generate(prompt, max_tokens=1, salt="one")
    assert llama.generate(prompt, max_tokens=1, salt="two").usage.cached_tokens == 0


@pytest.mark.parametrize("prompt", [[], "", [97], [-1], ["a"], [{"role": "user", "content": "hi"}], [1.5]])
def test_bad_prompts_are_refused_with_a_reason(prompt: object, llama: Runner) -> None:
    with pytest.raises(RequestError):
        llama.generate(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1}, {"top_p": 0}, {"nonsense": 1}, {"max_tokens": -2}, {"stop": ("",)}, {"format": "json"}],
)
def test_bad_options_are_refused_by_name(options: dict[str, object], llama: Runner) -> None:
    with pytest.raises(RequestError):
        llama.generate([3, 4], **options)


def test_a_misspelt_option_is_refused_with_the_nearest_name_or_all(llama: Runner) -> None:
    with pytest.raises(RequestError, match=r"^unknown option max_token; did you mean max_tokens\?$"):
        llama.generate([3, 4], max_token=1)  # type: ignore[call-overload]
    with pytest.raises(RequestError, match=r"^unknown option nonsense; there are choice, .*, raw, .*, tools, "):
        llama.generate([3, 4], nonsense=1)  # type: ignore[call-overload]
    for call in (llama.warm, llama.tokenize):
        with pytest.raises(RequestError, match=r"^unknown option nonsense; there are raw, salt, template_kwargs, tools$"):
            call([3, 4], nonsense=1)  # type: ignore[call-arg]


def test_one_text_is_no_list_of_prompts_and_a_list_of_texts_no_prompt(llama: Runner) -> None:
    with pytest.raises(RequestError, match="prompts is a str, and must be a list of prompts"):
        llama.batch("Hello")
    with pytest.raises(RequestError, match="this is a list of texts: `batch` takes those"):
        llama.generate(["Hello", "Goodbye"])  # type: ignore[call-overload]


def test_ids_outside_the_vocabulary_have_no_text(llama: Runner) -> None:
    with pytest.raises(RequestError, match="token id 97 is outside the vocabulary of 97"):
        llama.detokenize([97])


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(llama: Runner) -> None:
    with pytest.raises(PromptTooLong, match="2049 tokens, and the context holds 2048"):
        llama.generate([3] * 2049)


def test_a_seed_gives_the_same_text_and_another_choice_another(llama: Runner) -> None:
    def answer(**options: int) -> tuple[int, ...]:
        return llama.generate([3, 4, 5], max_tokens=12, temperature=1.0, ignore_eos=True, **options).token_ids

    assert answer(seed=1) == answer(seed=1)
    assert answer(seed=1) != answer(seed=2)
    assert answer(seed=1) != answer(seed=1, choice=1)


def test_settings_reach_the_runner(folders: Path) -> None:
    with load("llama", folders, lanes=2, context=100, dtype="bfloat16") as runner:
        assert isinstance(runner.runtime.settings, Settings)
        assert len(runner.runtime.prefix_cache.lanes.slots) == 2
        assert runner.runtime.engine.context_tokens == 100
        assert runner.runtime.engine.info.dtype == "bfloat16"


def test_the_models_own_sampling_is_there_for_who_asks_and_generate_stays_greedy(folders: Path) -> None:
    load("llama", folders).close()
    folder = folders / "with_defaults"
    shutil.copytree(folders / "llama", folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "min_p": 7}')
    with load("with_defaults", folders) as runner:
        assert runner.model_params() == SamplingParams(temperature=0.6, top_p=0.9)
        assert runner.model_params(temperature=0, max_tokens=5) == SamplingParams(temperature=0, top_p=0.9, max_tokens=5)
        assert (
            runner.generate([3, 4], max_tokens=8).token_ids
            == runner.generate([3, 4], temperature=0, max_tokens=8).token_ids
        )
        with pytest.raises(RequestError, match="unknown option nonsense"):
            runner.model_params(nonsense=1)


def test_of_a_model_that_recommends_nothing_the_sampling_is_greedy(llama: Runner) -> None:
    assert llama.model_params(top_k=3) == SamplingParams(top_k=3)


def test_an_answer_that_repeats_itself_ends_and_is_kept(llama: Runner) -> None:
    done = llama.generate([3, 4, 5], max_tokens=-1, frequency_penalty=-2, repeat_last_n=-1)

    assert (done.finish_reason, done.cycle_tokens) == ("loop", 1)
    assert len(set(done.token_ids[-256:])) == 1
    assert llama.generate([3, 4, 5, *done.token_ids], max_tokens=0).usage.cached_tokens >= 3 + len(done.token_ids) - 1


def test_the_settings_limit_answers_and_turn_the_guard_off(folders: Path) -> None:
    with load("llama", folders, max_tokens=300, loop_guard=False) as runner:
        done = runner.generate([3, 4, 5], frequency_penalty=-2, repeat_last_n=-1)

    assert (done.finish_reason, len(done.token_ids)) == ("length", 300)


def test_a_callback_may_look_at_the_cache(llama: Runner) -> None:
    seen: list[object] = []
    llama.generate([3, 4, 5], max_tokens=2, on_progress=lambda *_: seen.append(llama.cache.stats()["tokens"]))
    assert seen


def test_an_abandoned_stream_is_closed_when_the_garbage_collector_finds_it(llama: Runner) -> None:
    stream = llama.stream([3, 4, 5, 6], max_tokens=8, ignore_eos=True)
    next(stream)
    cycle: list[object] = [stream]
    cycle.append(cycle)
    del stream, cycle

    llama.generate([5, 6, 7], max_tokens=2, ignore_eos=True, on_progress=lambda *_: gc.collect())

    assert llama.cache.stats()["busy_lanes"] == 0


def test_closing_twice_and_with_a_stream_open_is_fine(folders: Path) -> None:
    runner = load("llama", folders)
    stream = runner.stream([3, 4, 5], max_tokens=2000, ignore_eos=True, loop_guard=False)
    next(stream)
    runner.close()
    runner.close()
    with pytest.raises(RequestError, match="closed"):
        list(stream)  # after the pieces that were computed before
    with pytest.raises(RequestError, match="closed"):
        runner.generate([3, 4])


@pytest.mark.parametrize(
    "prompt",
    [torch.tensor([[1, 2, 3]]), torch.tensor(3), torch.tensor([1.7, 2.2]), {"role": "user"}, None, {1, 2}, b"ab", [[1]]],
    ids=str,
)
def test_prompts_of_the_wrong_shape_are_refused(prompt: object, llama: Runner) -> None:
    with pytest.raises(RequestError):
        llama.generate(prompt)  # type: ignore[arg-type]


def test_a_flat_tensor_or_tuple_of_ids_is_a_prompt(llama: Runner) -> None:
    expected = llama.generate([3, 4, 5], max_tokens=3).token_ids
    assert llama.generate(torch.tensor([3, 4, 5]), max_tokens=3).token_ids == expected  # type: ignore[arg-type]
    assert llama.generate((3, 4, 5), max_tokens=3).token_ids == expected


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": "5"},
        {"max_tokens": 2.5},
        {"temperature": None},
        {"temperature": float("inf")},
        {"stop": [1]},
        {"stop": 5},
        {"ignore_eos": "no"},
        {"salt": None},
        {"params": {"max_tokens": 1}},
        {"n": "2"},
        {"raw": "no"},
        {"keep_state": 1},
        {"store": 1},
        {"is_cancelled": True},
        {"tools": {"name": "weather"}},
    ],
)
def test_options_of_the_wrong_type_are_refused_by_name(options: dict[str, object], llama: Runner) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        llama.generate([3, 4], **options)


def test_a_prefix_that_finds_no_room_is_not_silently_forgotten(folders: Path) -> None:
    with load("llama", folders) as runner:
        runner.generate(list(range(3, 90)), max_tokens=1)
        lane_bytes = runner.cache.stats()["lane_bytes"]
    with load("llama", folders, device_memory=lane_bytes + 100) as tight, pytest.raises(bough.DoesNotFit):
        tight.warm(list(range(3, 90)))


def test_ctrl_c_leaves_a_free_lane_and_keeps_the_work(llama: Runner) -> None:
    llama.cache.clear()
    prompt = [7, 8, 9] * 20
    with pytest.raises(KeyboardInterrupt):
        llama.generate(prompt, max_tokens=4, on_progress=lambda done, _: done and signal.raise_signal(signal.SIGINT))
    assert llama.cache.stats()["busy_lanes"] == 0
    assert llama.generate(prompt, max_tokens=1).usage.cached_tokens == len(prompt) - 1


@pytest.mark.parametrize(
    ("missing", "engine", "message"),
    [
        (
            ["torch", "mlx"],
            "auto",
            "no engine is installed: pip install 'bough-llm[torch]' or pip install 'bough-llm[mlx]'",
        ),
        (["torch"], "torch", "the engine torch is not installed: pip install 'bough-llm[torch]'"),
        (["mlx_lm"], "mlx", "the engine mlx is not installed: pip install 'bough-llm[mlx]'"),
        (["torch.nn"], "torch", "the engine torch cannot be used: No module named 'torch.nn"),
    ],
)
def test_an_engine_that_is_missing_or_broken_is_told_with_the_way_to_install_it(
    missing: list[str], engine: str, message: str, folders: Path
) -> None:
    load("llama", folders).close()  # so that the folder is there
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r}))\n"
        "import bough\n"
        f"try: bough.load({str(folders / 'llama')!r}, engine={engine!r}, cache_folder={str(folders / 'cache')!r})\n"
        "except bough.UnsupportedModel as error: print(error)"
    )

    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)

    assert found.stdout.startswith(message), found.stderr[-2000:]
    assert "pip install 'bough-llm[" in found.stdout


def test_a_banned_token_never_comes_and_one_outside_the_vocabulary_is_refused(folders: Path) -> None:
    with load("llama", folders) as runner:
        first = runner.generate([5, 6, 7], max_tokens=1, ignore_eos=True).token_ids[0]
        answer = runner.generate([5, 6, 7], max_tokens=8, ignore_eos=True, logit_bias={first: -100})

        assert answer.token_ids and first not in answer.token_ids
        with pytest.raises(
            RequestError, match=f"token id 5000, which is outside the vocabulary of {runner.runtime.engine.vocab_size}"
        ):
            runner.generate([5, 6, 7], logit_bias={5000: 1})


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_the_log_probabilities_of_a_prompt_are_those_of_transformers(name: str, folders: Path) -> None:
    ids = conversation(5)[1]
    with torch.inference_mode():
        rows = make_model(name)(torch.tensor([ids])).logits[0, :-1].log_softmax(dim=-1)
    expected = rows.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1).tolist()

    with load(name, folders, chunk=9) as runner:
        runner.generate(ids, max_tokens=1)
        scored = [runner.generate(ids, max_tokens=0, logprobs=3, prompt_logprobs=True) for _ in range(2)]
        after = runner.generate(ids, max_tokens=1)

        for each in scored:
            assert [token.token_id for token in each.prompt_logprobs] == ids[1:]
            assert [token.logprob for token in each.prompt_logprobs] == pytest.approx(expected, abs=1e-4)
            tops = [[other.logprob for other in token.top] for token in each.prompt_logprobs]
            assert torch.tensor(tops) == pytest.approx(rows.topk(3).values, abs=1e-4)
            assert (each.usage.cached_tokens, each.token_ids) == (0, ())
        assert after.usage.cached_tokens == (len(ids) - 1 if runner.runtime.engine.capabilities.can_reuse else 0)


def test_the_log_probabilities_of_a_prompt_need_a_number_of_alternatives(folders: Path) -> None:
    with load("llama", folders) as runner, pytest.raises(RequestError, match="prompt_logprobs needs logprobs"):
        runner.generate([5, 6], prompt_logprobs=True)
