"""Encoders as a whole: loaded from a folder, texts of many threads, cancelling, kinds that are refused, and the end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from bough.config import Settings
from bough.errors import BoughError, PromptTooLong, RequestCancelled, RequestError, ShuttingDown, UnsupportedModel
from bough.models.files import ModelFiles
from bough.runtime import EncoderRuntime, Runtime, load_any, load_encoder, load_runtime
from bough.runtime.embedding import WINDOW, ComputedText
from bough.scheduling.worker import Limits
from tests.tiny_encoders import make_encoder, make_reranker, pooling, write_json, write_modules
from tests.tiny_models import make_folder
from tests.waiting import BOUND_S

ON_CPU = Settings(device="cpu", disk=0)
TEXTS = ["the cat", "", "a dog?", "the dog sat on the cat", "hello " * 30, "the cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_modules(make_encoder(tmp_path_factory.mktemp("encoder") / "small"), pooling("mean"), ("Normalize", {}))


@pytest.fixture(scope="module")
def runtime(folder):
    runtime = load_encoder(ModelFiles("small", folder), ON_CPU)
    yield runtime
    runtime.close()


def embed(runtime: EncoderRuntime, texts: Sequence[str], **options) -> list[ComputedText]:
    """The vectors of texts, which are all queued at once."""
    arrived: queue.SimpleQueue[tuple[int, ComputedText | BoughError]] = queue.SimpleQueue()
    embedder = runtime.embedder
    for number, text in enumerate(texts):
        ids = embedder.tokenize(text, truncate=True)
        embedder.start(ids, lambda result, number=number: arrived.put((number, result)), is_cancelled=lambda: False)
    found = dict(arrived.get(timeout=BOUND_S) for _ in texts)
    return [found[number] for number in range(len(texts))]


def test_vectors_are_those_of_transformers_and_its_tokenizer(runtime, folder):
    found = embed(runtime, TEXTS)

    model, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(folder)
    for text, each in zip(TEXTS, found, strict=True):
        inputs = tokenizer(text, truncation=True, max_length=64, return_tensors="pt")
        with torch.inference_mode():
            vector = model(**inputs).last_hidden_state[0].mean(dim=0)
        assert each.num_tokens == inputs["input_ids"].shape[1]
        assert (torch.tensor(each.numbers) - vector / vector.norm()).abs().max() < 1e-5
    assert runtime.embedder.dimensions == 32
    assert runtime.embedder.max_tokens == 64


def test_300_texts_of_12_threads_equal_those_computed_alone(runtime):
    texts = ["the cat " * (1 + number % 17) + "dog" * (number % 5) for number in range(25)]
    alone = [embed(runtime, [text])[0] for text in texts]
    results: dict[int, list[ComputedText]] = {}

    def run(thread: int) -> None:
        results[thread] = embed(runtime, texts)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)

    expected = torch.tensor([each.numbers for each in alone])
    assert len(results) == 12
    for found in results.values():
        assert (torch.tensor([each.numbers for each in found]) - expected).abs().max() < 1e-5
    assert runtime.worker.num_waiting == runtime.worker.num_running == 0


def test_a_cancelled_text_is_told_once_and_not_computed(runtime):
    told: queue.SimpleQueue[ComputedText | BoughError] = queue.SimpleQueue()

    runtime.embedder.start([2, 40, 3], told.put, is_cancelled=lambda: True)

    assert isinstance(told.get(timeout=BOUND_S), RequestCancelled)
    assert len(embed(runtime, ["the cat"])[0].numbers) == 32
    assert told.empty()


def test_a_text_that_is_too_long_is_cut_or_refused(runtime):
    ids = runtime.embedder.tokenize("the cat " * 100, truncate=True)

    assert (len(ids), ids[0], ids[-1]) == (64, 2, 3)
    with pytest.raises(PromptTooLong, match="202 tokens, and the context holds 64"):
        runtime.embedder.tokenize("the cat " * 100, truncate=False)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        runtime.embedder.check_ids([100_000], truncate=True)


def test_the_queue_counts_requests_of_many_texts(folder):
    runtime = load_encoder(ModelFiles("small", folder), ON_CPU, limits=Limits(queue=2))

    assert runtime.worker.limits.queue == 2 * WINDOW
    runtime.close()


def test_the_prompt_of_the_model_goes_before_each_text_and_not_before_ids(tmp_path):
    folder = write_modules(make_encoder(tmp_path / "small"), pooling("mean", include_prompt=False))
    plain = load_encoder(ModelFiles("plain", folder), ON_CPU)
    prompts = {"prompts": {"query": "the dog: "}, "default_prompt_name": "query"}
    write_json(folder / "config_sentence_transformers.json", prompts)
    prompted = load_encoder(ModelFiles("prompted", folder), ON_CPU)

    ids = prompted.embedder.tokenize("cat", truncate=True)

    assert ids == plain.embedder.tokenize("the dog: cat", truncate=True)
    states = AutoModel.from_pretrained(folder).eval()(input_ids=torch.tensor([ids])).last_hidden_state[0]
    found = torch.tensor(embed(prompted, ["cat"])[0].numbers)
    assert (found - states[4:].mean(dim=0)).abs().max() < 1e-5  # without [CLS] the dog :
    for each in (plain, prompted):
        each.close()


def test_a_reranker_scores_a_query_and_a_document(tmp_path):
    folder = make_reranker(tmp_path / "small")
    runtime = load_encoder(ModelFiles("small", folder), ON_CPU)
    told: queue.SimpleQueue[ComputedText | BoughError] = queue.SimpleQueue()

    runtime.reranker.start_pair("the cat", "a dog", told.put)

    scored = told.get(timeout=BOUND_S)
    assert isinstance(scored, ComputedText)
    assert 0 < scored.numbers[0] < 1
    assert scored.num_tokens == 7
    with pytest.raises(PromptTooLong, match="context holds 64"):
        runtime.reranker.start_pair("the cat", "dog " * 80, told.put, truncate=False)
    with pytest.raises(RequestError, match="the model small scores pairs of texts: this needs one that makes embeddings"):
        _ = runtime.embedder
    runtime.close()


def test_an_embedder_is_no_reranker(runtime):
    with pytest.raises(RequestError, match="the model small makes embeddings: this needs one that scores pairs"):
        _ = runtime.reranker


def test_closing_ends_what_waits_and_a_closed_one_refuses(folder):
    runtime = load_encoder(ModelFiles("small", folder), ON_CPU)
    inside, go_on = threading.Event(), threading.Event()
    told: queue.SimpleQueue[ComputedText | BoughError] = queue.SimpleQueue()
    blocked = runtime.worker.call(lambda: (inside.set(), go_on.wait(BOUND_S)))
    assert inside.wait(BOUND_S)
    runtime.embedder.start([2, 40, 3], told.put, is_cancelled=lambda: False)

    runtime.close_soon()
    go_on.set()
    blocked.result(BOUND_S)
    runtime.close()

    assert isinstance(told.get(timeout=BOUND_S), ShuttingDown)
    with pytest.raises(ShuttingDown):
        runtime.embedder.start([2, 40, 3], told.put, is_cancelled=lambda: False)
    runtime.close()


def test_a_runtime_that_was_never_used_closes(folder):
    runtime = load_encoder(ModelFiles("small", folder), ON_CPU)

    runtime.close()

    with pytest.raises(RequestError, match="the runner is closed"):
        _ = runtime.worker


def test_each_kind_of_model_is_loaded_by_its_own_function(folder, tmp_path):
    generator = ModelFiles("talks", make_folder("llama", tmp_path / "llama"))
    encoder = ModelFiles("small", folder)

    with pytest.raises(UnsupportedModel, match="the model small makes embeddings, and generates no text"):
        load_runtime(encoder, ON_CPU)
    with pytest.raises(UnsupportedModel, match="the model talks generates text, and is no encoder"):
        load_encoder(generator, ON_CPU)
    for files, kind in ((generator, Runtime), (encoder, EncoderRuntime)):
        runtime = load_any(files, ON_CPU)
        assert isinstance(runtime, kind)
        runtime.close()


def test_an_encoder_needs_torch(folder, monkeypatch):
    encoder = ModelFiles("small", folder)

    with pytest.raises(UnsupportedModel, match=r"needs the engine torch, and the setting engine is 'mlx': pip install"):
        load_encoder(encoder, Settings(engine="mlx"))
    monkeypatch.setattr("bough.runtime.loading.find_installed", lambda: {"mlx"})
    with pytest.raises(UnsupportedModel, match=r"torch is not installed: pip install 'bough-llm\[torch\]'"):
        load_encoder(encoder, Settings())


def test_an_encoder_without_a_tokenizer_is_refused(tmp_path):
    folder = make_encoder(tmp_path / "small")
    (folder / "tokenizer.json").unlink()

    with pytest.raises(UnsupportedModel, match="has no tokenizer"):
        load_encoder(ModelFiles("small", folder), ON_CPU)
