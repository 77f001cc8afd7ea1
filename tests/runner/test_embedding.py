"""Embeddings through the library: equal to transformers, many at once, and whatever ends them early."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import processors

from bough import EngineError, PromptTooLong, RequestError, Runner
from bough.config import Settings
from bough.engines.torch import TorchEngine
from bough.models.tokenizer import Tokenizer
from bough.runtime import Runtime
from tests.engines.torch.pooled.test_rotary_limit import LIMIT, make_longrope
from tests.models.tiny_tokenizer import byte_level
from tests.tiny_models import make_model
from tests.waiting import BOUND_S, wait_until

CONTEXT = 64
TEXTS = [f"Document {number} says: {'how are you? ' * (number % 5)}" for number in range(200)]
END_ID = 2


def make_tokenizer() -> Any:
    """One that ends every text with a special token, as those of embedding models do."""
    hf = byte_level()
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", END_ID)]
    )
    return hf


def make_runner(model: Any, folder: Path, *, pools: bool = False, tokenizer: Any = None, **settings: Any) -> Runner:
    chosen = Settings(**{"device": "cpu", "cache_folder": folder, "lanes": 2, "device_memory": 64 << 20, **settings})
    return Runner(Runtime(TorchEngine(model, chosen, pools=pools), Tokenizer(tokenizer), chosen))


def make_llama() -> Any:
    return make_model("llama", vocab_size=512)


@pytest.fixture(scope="module", params=[False, True], ids=["lanes", "pool"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("verdicts")
    with make_runner(
        make_llama(), folder, pools=request.param, tokenizer=make_tokenizer(), context=CONTEXT, chunk=32
    ) as made:
        yield made


@pytest.fixture(scope="module")
def wanted() -> Callable[[str], list[float]]:
    """The state of a text as transformers computes it, not normalised."""
    return reference(make_llama())


def reference(model: Any) -> Callable[[str | list[int]], list[float]]:
    hf = make_tokenizer()

    @torch.inference_mode()
    def compute(text: str | list[int]) -> list[float]:
        ids = hf(text, truncation=True, max_length=CONTEXT)["input_ids"] if isinstance(text, str) else text
        state: list[float] = model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1].tolist()
        return state

    return compute


def distance(one: list[float], other: list[float]) -> float:
    """As a share of the norm."""
    found, wanted = torch.tensor(one), torch.tensor(other)
    return float((found - wanted).norm() / wanted.norm())


def unit(vector: list[float]) -> list[float]:
    scaled: list[float] = torch.nn.functional.normalize(torch.tensor(vector), dim=0).tolist()
    return scaled


def is_idle(runner: Runner) -> bool:
    """Whether no request is left, once what was cancelled has been swept."""
    scheduler = runner.runtime.worker.scheduler
    return runner.runtime.worker.call(lambda: not scheduler.has_work and scheduler.num_free_lanes == 2).result(BOUND_S)


class Gate:
    """An engine that computes states only while it is open; `lengths` are those of the runs it was asked for."""

    def __init__(self, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lengths: list[int] = []
        self.was_reached = threading.Event()
        self.is_open = threading.Event()
        self.is_open.set()
        evaluate = runner.runtime.engine.evaluate_state

        def evaluate_state(lane: Any, ids: Any) -> list[float]:
            self.lengths.append(len(ids))
            self.was_reached.set()
            assert self.is_open.wait(BOUND_S)
            return evaluate(lane, ids)

        monkeypatch.setattr(runner.runtime.engine, "evaluate_state", evaluate_state)


# What a vector is


def test_a_vector_is_the_last_hidden_state_of_transformers_scaled_to_length_1(
    runner: Runner, wanted: Callable[[str], list[float]]
) -> None:
    assert distance(runner.embed("Hello there"), unit(wanted("Hello there"))) <= 1e-5
    assert distance(runner.embed("Hello there", normalize=False), wanted("Hello there")) <= 1e-5


def test_a_shorter_vector_is_cut_before_it_is_scaled(runner: Runner, wanted: Callable[[str], list[float]]) -> None:
    assert distance(runner.embed("Hello there", dimensions=10), unit(wanted("Hello there")[:10])) <= 1e-5


def test_a_text_that_is_too_long_is_cut_and_keeps_its_end_token(
    runner: Runner, wanted: Callable[[str], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, text = Gate(runner, monkeypatch), "1 2 3 " * 100

    vector = runner.embed(text)

    assert distance(vector, unit(wanted(text))) <= 1e-5
    assert gate.lengths == [32]  # the second chunk of 64 tokens
    with pytest.raises(PromptTooLong, match=f"and the context holds {CONTEXT}"):
        runner.embed(text, truncate=False)


def test_texts_beyond_the_limit_of_a_rotary_scaling_are_computed_at_once(tmp_path: Path) -> None:
    compute = reference(make_longrope())
    with make_runner(make_longrope(), tmp_path, chunk=16) as runner:
        ids = [3 + number * 7 % 90 for number in range(2 * LIMIT)]
        runner.generate(ids[:50], max_tokens=4)
        for length in (LIMIT - 1, LIMIT, LIMIT + 1, 2 * LIMIT):
            assert distance(embed_ids(runner, ids[:length]), compute(ids[:length])) <= 1e-5, length


def embed_ids(runner: Runner, ids: list[int], salt: str = "") -> list[float]:
    """The vector of token ids, by the embedder alone."""
    told: list[Any] = []
    was_told = threading.Event()

    def on_embedded(result: object) -> None:
        told.append(result)
        was_told.set()

    embedder = runner.runtime.embedder
    embedder.start(embedder.check_ids(ids, truncate=False), on_embedded, is_cancelled=lambda: False, salt=salt)
    assert was_told.wait(BOUND_S)
    (embedded,) = told
    assert embedded.num_tokens == len(ids)
    return list(embedded.numbers)


# Many texts


def test_many_more_texts_than_lanes_come_out_in_their_order(runner: Runner, wanted: Callable[[str], list[float]]) -> None:
    vectors = runner.embed(TEXTS)

    assert len(vectors) == 200
    some = range(0, 200, 13)
    assert max(distance(vectors[number], unit(wanted(TEXTS[number]))) for number in some) <= 1e-5
    assert is_idle(runner)


def test_no_texts_have_no_vectors(runner: Runner) -> None:
    assert runner.embed([]) == []


def test_threads_and_tasks_embed_beside_answers(runner: Runner) -> None:
    texts = TEXTS[:8]
    vectors, answer = runner.embed(texts), runner.generate("Hello there", max_tokens=8)

    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(runner.embed, texts) for _ in range(3)]
        answers = [pool.submit(runner.generate, "Hello there", max_tokens=8) for _ in range(3)]
        awaited = asyncio.run(runner.aembed(texts))

    for found in [awaited, *(each.result() for each in asked)]:
        assert max(distance(one, other) for one, other in zip(found, vectors, strict=True)) <= 1e-5
    assert {each.result().text for each in answers} == {answer.text}


def test_a_known_prefix_is_reused_under_its_own_salt_and_nothing_is_kept(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, text = Gate(runner, monkeypatch), "The capital of France is Paris."
    runner.cache.clear()
    runner.warm(text[:-1], raw=True, salt="tenant")  # with the end token, which the text has elsewhere
    num_tokens = len(runner.tokenize(text, raw=True))
    before = runner.cache.stats()["nodes"]

    vectors = [runner.embed(text, salt=salt) for salt in ("tenant", "tenant", "other")]

    assert gate.lengths == [2, 2, num_tokens]
    assert runner.cache.stats()["nodes"] == before
    assert max(distance(vector, vectors[0]) for vector in vectors) <= 1e-5


# Errors, and early ends


@pytest.mark.parametrize(
    ("inputs", "options", "told"),
    [
        ("a", {"dimensions": 0}, "dimensions is 0, and must be from 1 to 64"),
        ("a", {"dimensions": 65}, "dimensions is 65"),
        ("a", {"dimensions": "5"}, "dimensions is '5'"),
        ("a", {"dimension": 5}, r"unknown option dimension; did you mean dimensions\?"),
        ("a", {"truncate": "no"}, "truncate is 'no', and must be True or False"),
        (["a", 5], {}, "input 1 is a int"),
        (5, {}, "the input is a int"),
        ("a", {"salt": 5}, "salt is 5"),
    ],
)
def test_a_wrong_request_is_told(runner: Runner, inputs: Any, options: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        runner.embed(inputs, **options)


def test_ids_are_checked(runner: Runner) -> None:
    embedder = runner.runtime.embedder
    for ids, told in (
        ([], "0 tokens"),
        ([3, 512], "token id 512 is outside"),
        ([{"role": "user"}], "flat list of token ids"),
    ):
        with pytest.raises(RequestError, match=told):
            embedder.check_ids(ids, truncate=True)  # type: ignore[arg-type]
    with pytest.raises(PromptTooLong, match=f"{CONTEXT + 1} tokens"):
        embedder.check_ids([3] * (CONTEXT + 1), truncate=False)
    assert embedder.check_ids([3] * (CONTEXT + 1), truncate=True) == [3] * CONTEXT


def test_a_text_that_fails_cancels_the_others(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(runner, monkeypatch)
    gate.is_open.clear()
    texts = [*TEXTS[:50], "1 2 3 " * 100, *TEXTS[50:]]

    with pytest.raises(PromptTooLong):
        runner.embed(texts, truncate=False)
    gate.is_open.set()

    assert is_idle(runner)
    assert len(gate.lengths) <= 2


def test_a_cancelled_task_cancels_its_texts(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(runner, monkeypatch)
    gate.is_open.clear()

    async def cancel() -> None:
        task = asyncio.create_task(runner.aembed(TEXTS))
        assert await asyncio.to_thread(gate.was_reached.wait, BOUND_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    gate.is_open.set()

    assert is_idle(runner)
    assert len(gate.lengths) <= 2


def test_a_vector_that_is_not_finite_ends_the_call_and_nothing_else(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = runner.runtime.engine.evaluate_state

    def overflow(lane: Any, ids: Any) -> list[float]:
        return [each * float("inf") for each in evaluate(lane, ids)]

    with monkeypatch.context() as patch:
        patch.setattr(runner.runtime.engine, "evaluate_state", overflow)
        with pytest.raises(EngineError, match="not finite"):
            runner.embed(TEXTS)

    assert is_idle(runner)
    assert len(runner.embed("Hello there")) == 64


def test_closing_ends_the_texts_that_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(make_llama(), tmp_path, tokenizer=make_tokenizer())
    gate = Gate(runner, monkeypatch)
    gate.is_open.clear()
    with ThreadPoolExecutor() as pool:
        embedded = pool.submit(runner.embed, TEXTS)
        assert gate.was_reached.wait(BOUND_S)
        closed = pool.submit(runner.close)
        wait_until(lambda: runner.runtime.worker._is_closing)
        gate.is_open.set()
        with pytest.raises(RequestError, match="the runner is closed"):
            embedded.result(BOUND_S)
        closed.result(BOUND_S)
    with pytest.raises(RequestError, match="the runner is closed"):
        runner.embed("Hello there")


def test_a_model_without_a_known_head_answers_but_has_no_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_llama()
    monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    with make_runner(model, tmp_path, tokenizer=make_tokenizer()) as runner:
        assert runner.generate("Hello there", max_tokens=2).token_ids
        with pytest.raises(RequestError, match="LlamaForCausalLM has no output layer that is known"):
            runner.embed("Hello there")


@pytest.mark.parametrize("truncate", [True, False])
def test_a_text_that_is_no_unicode_is_refused(runner: Runner, truncate: bool) -> None:
    with pytest.raises(RequestError, match="a text of 4 characters has surrogates"):
        runner.embed(["fine", "\ud800 hi"], truncate=truncate)


@pytest.mark.parametrize("dimensions", [0, -1, 10**9, 2.5, True, "3"])
def test_dimensions_that_no_vector_has_are_refused_before_any_work(runner: Runner, dimensions: Any) -> None:
    with pytest.raises(RequestError, match=r"dimensions is .*, and must be from 1 to"):
        runner.embed("Hello", dimensions=dimensions)
