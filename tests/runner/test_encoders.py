"""The library with encoders: reranking by threads and tasks, and what an encoder cannot do."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import bough
from bough.errors import PromptTooLong, RequestError
from tests.tiny_encoders import make_encoder, make_reranker
from tests.tiny_models import make_folder

DOCUMENTS = ["the cat", "a dog", "the cat and the dog", "hello " * 40, ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_reranker(tmp_path_factory.mktemp("reranker") / "ranks")


@pytest.fixture(scope="module")
def runner(folder):
    with bough.load(folder, device="cpu") as runner:
        yield runner


def scores_by_hand(folder, query: str) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for document in DOCUMENTS:
        inputs = tokenizer([query], [document], truncation="longest_first", max_length=64, return_tensors="pt")
        with torch.inference_mode():
            scores.append(torch.sigmoid(model(**inputs).logits[0, 0]).item())
    return scores


def test_documents_are_ranked_by_the_models_score(runner, folder):
    expected = scores_by_hand(folder, "where is the cat?")

    ranked = runner.rerank("where is the cat?", DOCUMENTS)

    assert [each.index for each in ranked] == sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
    assert all(abs(each.score - expected[each.index]) < 1e-5 for each in ranked)


def test_top_n_keeps_the_best(runner):
    ranked = runner.rerank("the dog", DOCUMENTS)

    assert [each.index for each in runner.rerank("the dog", DOCUMENTS, top_n=2)] == [each.index for each in ranked[:2]]
    assert len(runner.rerank("the dog", DOCUMENTS, top_n=50)) == len(DOCUMENTS)
    assert runner.rerank("the dog", []) == []


def test_many_documents_are_ranked_in_windows_and_in_a_task_as_well(runner):
    documents = [f"the cat number {number}" for number in range(200)]

    ranked = runner.rerank("cat", documents)
    soon = asyncio.run(runner.arerank("cat", documents))

    assert sorted(each.index for each in ranked) == list(range(200))
    by_index = {each.index: each.score for each in soon}
    assert all(abs(by_index[each.index] - each.score) < 1e-5 for each in ranked)


def test_one_document_that_is_too_long_fails_all_and_leaves_nothing_behind(runner):
    documents = ["cat"] * 100 + ["dog " * 80]

    with pytest.raises(PromptTooLong, match="context holds 64") as told:
        runner.rerank("cat", documents, truncate=False)
    assert told.value.__notes__ == ["That is number 100 of 101, counted from 0."]
    with pytest.raises(PromptTooLong, match="context holds 64"):
        asyncio.run(runner.arerank("cat", documents, truncate=False))

    assert len(runner.rerank("cat", ["dog"])) == 1


def test_a_cancelled_task_leaves_a_runner_that_ranks(runner):
    async def cancel() -> None:
        task = asyncio.ensure_future(runner.arerank("cat", ["the dog"] * 500))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())

    assert len(runner.rerank("cat", DOCUMENTS)) == len(DOCUMENTS)


@pytest.mark.parametrize(
    ("query", "documents", "options", "expected"),
    [
        (5, ["a"], {}, "query is int"),
        ("a", "a document", {}, "documents is one text"),
        ("a", ["a", 7], {}, r"documents\[1\] is int"),
        ("a", ["a"], {"top_n": 0}, "top_n is 0"),
        ("a", ["a"], {"top_n": "1"}, "top_n is '1'"),
    ],
)
def test_what_is_no_query_or_document_is_refused(runner, query, documents, options, expected):
    with pytest.raises(RequestError, match=expected):
        runner.rerank(query, documents, **options)


def test_an_encoder_says_what_it_is_and_generates_nothing(tmp_path):
    with bough.load(make_encoder(tmp_path / "embeds", "modernbert"), device="cpu") as runner:
        assert repr(runner) == "<Runner embeds (ModernBertModel) on torch, cpu, float32: makes embeddings>"
        assert runner.describe()["output"] == "vectors of 32 numbers"
        assert runner.context_tokens == 64
        for use in (
            lambda: runner.generate("a"),
            lambda: runner.stream("a"),
            lambda: runner.batch(["a"]),
            lambda: runner.tokenize("a"),
            lambda: runner.warm("a"),
            lambda: runner.cache,
            lambda: asyncio.run(runner.agenerate("a")),
            lambda: runner.chat().send("a"),
        ):
            with pytest.raises(RequestError, match="the model embeds makes embeddings, and generates no text"):
                use()
        with pytest.raises(RequestError, match="the model embeds makes embeddings: this needs one that scores pairs"):
            runner.rerank("a", ["b"])


def test_a_generator_ranks_nothing(tmp_path):
    folder = make_folder("llama", tmp_path / "talks")
    with (
        bough.load(folder, device="cpu", cache=False) as runner,
        pytest.raises(RequestError, match="the model talks generates text: this needs one that scores pairs of texts"),
    ):
        runner.rerank("a", ["b"])


def test_a_closed_runner_ranks_nothing(folder):
    runner = bough.load(folder, device="cpu")
    runner.rerank("a", ["b"])

    runner.close()

    with pytest.raises(bough.BoughError):
        runner.rerank("a", ["b"])
