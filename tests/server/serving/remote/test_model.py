"""A model at replicas answers as one in this process does, also when replicas are lost in the middle."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from bough.cache.admin.nodes import read_node
from bough.errors import EngineError, EngineStuck, PromptTooLong, RequestError, ShuttingDown, Unavailable
from bough.prompting.ask import Ask
from bough.server.apis.bough.health import status_of
from bough.server.serving.answer import Delta, Finished
from bough.server.serving.cache import NodeName
from bough.server.serving.embedding import EmbedAsk
from bough.server.serving.remote.held_pages import ROUTED_TOKENS, digest_prompt, make_keys
from bough.server.serving.remote.replicas import Operation, ReplicaLost
from bough.server.serving.service import Service
from bough.types import SamplingParams
from tests.gates import Gate
from tests.server.serving.remote.local_replicas import SECRET, LocalReplicas

PROMPT = "once upon a time there was a tree "
ANSWERS = {
    "greedy": SamplingParams(max_tokens=24),
    "seeded": SamplingParams(max_tokens=24, temperature=1.0, seed=7, ignore_eos=True),
    "penalised": SamplingParams(max_tokens=24, temperature=0.8, seed=3, repeat_penalty=1.3, ignore_eos=True),
    "scored": SamplingParams(max_tokens=12, temperature=1.0, seed=5, logprobs=2, ignore_eos=True),
    "as JSON": SamplingParams(max_tokens=24, temperature=1.0, seed=11, format="json"),
}


async def answer(service: Service, params: SamplingParams, **options: Any) -> tuple[str, Finished]:
    """What a client reads piece by piece, and the whole."""
    opened = await service.open(Ask("tiny", text=PROMPT, params=params, **options))
    try:
        events = [event async for event in opened]
    finally:
        opened.close()
    (finished,) = [event for event in events if isinstance(event, Finished)]
    return "".join(event.text for event in events if isinstance(event, Delta)), finished


@pytest.mark.parametrize("kind", ANSWERS)
def test_an_answer_goes_on_at_another_replica_with_the_tokens_it_would_have_had(kind: str, play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        told, whole = await answer(service, ANSWERS[kind])
        number = len(whole.completion.token_ids)
        for at in (0, 1, number // 2, number):
            replicas.breaks = [at]
            told_again, again = await answer(service, ANSWERS[kind])
            assert (told_again, again.text) == (told, whole.text)
            assert again.completion.token_ids == whole.completion.token_ids
            assert again.finish_reason == whole.finish_reason
            assert [each.data for each in again.logprobs] == [each.data for each in whole.logprobs]
            assert len(replicas.requests[-1].request.resumed_ids) == at
            assert replicas.requests[-1].avoid == {"replica-0"}

    play(scene)


def test_answers_and_texts_end_when_their_model_is_unloaded(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        has_begun, never = asyncio.Event(), asyncio.Event()

        async def wait(operation: Operation) -> None:
            has_begun.set()
            await never.wait()

        monkeypatch.setattr(replicas, "call", wait)
        replicas.may_go_on = Gate()
        opened = await service.open(Ask("tiny", text=PROMPT, params=SamplingParams(max_tokens=4, ignore_eos=True)))
        embedding = asyncio.create_task(service.embeddings.embed(EmbedAsk("tiny", ["a text"])))
        await has_begun.wait()
        closing = asyncio.create_task(service.close())
        with pytest.raises(ShuttingDown):
            [event async for event in opened]
        with pytest.raises(ShuttingDown):
            await embedding
        opened.close()
        await closing

    play(scene)


def test_a_text_that_is_no_longer_wanted_is_cancelled_at_its_replica(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        begun, cancelled = asyncio.Event(), asyncio.Event()

        async def wait(operation: Operation) -> None:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        monkeypatch.setattr(replicas, "call", wait)
        embedding = asyncio.create_task(service.embeddings.embed(EmbedAsk("tiny", ["a text"])))
        await begun.wait()
        embedding.cancel()
        await cancelled.wait()

    play(scene)


def test_a_text_whose_replica_fails_by_a_mistake_is_not_waited_for(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        async def fail(operation: Operation) -> None:
            raise RuntimeError("a mistake")

        monkeypatch.setattr(replicas, "call", fail)
        with pytest.raises(EngineError, match="a mistake"):
            await service.embeddings.embed(EmbedAsk("tiny", ["a text"]))

    play(scene)


def test_a_request_that_has_lost_two_replicas_is_refused(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        replicas.breaks = [3, 4, 5]
        with pytest.raises(EngineError, match=r"lost with 2 replicas \(replica-0 and replica-1\): it is not tried again"):
            await answer(service, ANSWERS["greedy"])
        assert replicas.breaks == [5]

    play(scene)


def test_the_prompt_s_log_probabilities_are_told_once(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        _, whole = await answer(service, ANSWERS["scored"], scores_prompt=True)
        replicas.breaks = [1]  # after those of the prompt
        _, again = await answer(service, ANSWERS["scored"], scores_prompt=True)
        replicas.breaks = [3]  # after some of the answer's tokens
        _, later = await answer(service, ANSWERS["scored"], scores_prompt=True)
        assert [each.data for each in again.prompt_logprobs] == [each.data for each in whole.prompt_logprobs]
        assert len(later.prompt_logprobs) == len(whole.prompt_logprobs) > 0
        assert later.completion.token_ids == whole.completion.token_ids

    play(scene)


def test_what_a_replica_refuses_is_refused_as_in_this_process(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        with pytest.raises(RequestError, match="format"):
            await answer(service, SamplingParams(format={"type": "nonsense"}))
        with pytest.raises(PromptTooLong):
            await service.open(Ask("tiny", text=PROMPT * 500))

    play(scene)


def test_trees_figures_and_explanations_name_every_replica(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        replicas.breaks = [5]
        await answer(service, ANSWERS["greedy"])  # the second replica has it whole
        explained = await service.cache.explain(Ask("tiny", text=PROMPT))
        assert explained.replica in ("replica-0", "replica-1")
        assert explained.known["replica-1"].matched == explained.result.prompt_tokens
        view = (await service.cache.tree(None, None)).result
        assert "replica-1:" in view.roots
        (node, *_) = view.records.roots["replica-1:"]
        details = await service.cache.at_node(NodeName(None, "replica-1:", node.key), read_node)
        assert details.result.record.key == node.key
        with pytest.raises(RequestError, match="must name a replica"):
            await service.cache.at_node(NodeName(None, "", node.key), read_node)
        (figures,) = await service.cache.stats(None, None)
        assert figures.result["lanes"] == 8
        assert [figures.result["replicas"][name]["lanes"] for name in ("replica-0", "replica-1")] == [4, 4]
        await service.cache.clear(None, None)
        assert (await service.cache.stats(None, None))[0].result["tokens"] == 0

    play(scene)


def test_a_replica_that_cannot_answer_is_left_out_but_not_when_trees_are_cleared(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        call, outcomes = replicas.call, list[Exception]()

        async def fail(operation: Operation) -> Any:
            if operation.replica == "replica-0":
                raise outcomes[-1]
            return await call(operation)

        monkeypatch.setattr(replicas, "call", fail)
        for outcome in (EngineStuck("a step takes too long"), ReplicaLost("killed")):
            outcomes.append(outcome)
            (figures,) = await service.cache.stats(None, None)
            assert list(figures.result["replicas"]) == ["replica-1"]
            with pytest.raises(Unavailable, match="replica-0 could not be asked"):
                await service.cache.clear(None, None)
        outcomes.append(RequestError("a wrong root"))
        with pytest.raises(RequestError):
            await service.cache.stats(None, None)

    play(scene)


def test_without_replicas_the_server_says_so_and_goes_on(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        async def until(is_ready: bool) -> None:
            await replicas.reads.until(lambda: service.health.has_replicas is is_ready)

        await until(True)
        hosts, replicas.hosts = replicas.hosts, {}
        await until(False)
        with pytest.raises(Unavailable, match="no replica is ready"):
            await service.cache.stats(None, None)
        assert b"bough_models_loaded 1.0" in generate_latest(service.metrics.registry)
        assert (service.health.disk_state, service.health.disk_problem, service.health.is_stuck) == ("off", "", False)
        assert status_of(SimpleNamespace(), service) == "no replica"
        replicas.hosts = hosts
        await until(True)
        assert status_of(SimpleNamespace(), service) == "ok"

    play(scene)


def test_a_replica_tells_the_pages_of_what_it_has_computed_and_what_it_drops(play: Any) -> None:
    async def scene(service: Service, replicas: LocalReplicas) -> None:
        host = replicas.hosts["replica-0"]
        assert (await host.look()).notes == {}
        text = PROMPT * 8
        started = (await service.complete(Ask("tiny", text=text, params=SamplingParams(max_tokens=1)))).started
        digests = digest_prompt(make_keys(SECRET), started.prompt, "")
        assert len(digests) == len(started.prompt) // ROUTED_TOKENS > 1
        notes = (await host.look()).notes
        assert set(digests) <= set(notes)
        assert all(notes[each] is not None for each in digests)
        assert not set(digests) & set(digest_prompt(make_keys(SECRET), started.prompt, "another salt"))
        host._pages.check()
        await service.cache.clear(None, None)
        assert (await host.look()).notes == dict.fromkeys(notes)

    play(scene)
