"""Requests for the last hidden state: computed as prompts are, and nothing is generated or kept."""

from __future__ import annotations

import pytest

from bough.errors import PromptTooLong, TimedOut
from bough.generate.request import Request
from bough.tokens import Tokens
from tests.contract.driving import new_lane
from tests.fakes import MODELS
from tests.scheduling.concert import Client, Concert

TEXT = list(range(40))


def embed(concert: Concert, ids: list[int], salt: str = "", deadline_s: float = 1e9) -> Client:
    return concert.ask(ids, salt=salt, deadline_s=deadline_s, wants_state=True, keep_state=False)


def state_of(concert: Concert, ids: list[int]) -> tuple[float, ...]:
    return tuple(concert.engine.evaluate_state(new_lane(concert.engine, len(ids)), ids))


@pytest.mark.parametrize("model", MODELS)
def test_the_state_of_a_text_in_chunks_is_that_of_all_its_tokens(model: str) -> None:
    concert = Concert(model, chunk=16)

    client = embed(concert, TEXT)
    concert.play()

    assert client.completion is not None
    assert concert.engine.evaluated == [16, 16, 8]
    assert client.completion.embedding == state_of(concert, TEXT)
    assert (client.completion.finish_reason, client.completion.token_ids) == ("length", ())
    assert client.completion.usage.prompt_tokens == 40


def test_an_ordinary_request_has_no_embedding() -> None:
    concert = Concert()

    client = concert.ask(TEXT)
    concert.play()

    assert client.completion is not None and client.completion.embedding == ()


def test_a_text_reuses_the_prefix_of_a_chat_under_its_own_salt_and_keeps_nothing() -> None:
    concert = Concert(chunk=64)
    concert.ask(TEXT, salt="tenant")
    concert.play()
    held, longer = len(concert.engine.live), [*TEXT, 50, 51]

    same, other = embed(concert, longer, "tenant"), embed(concert, longer, "other")
    concert.play()

    assert same.started is not None and other.started is not None
    assert (same.started.cached_tokens, other.started.cached_tokens) == (40, 0)
    assert same.completion is not None and other.completion is not None
    assert same.completion.embedding == other.completion.embedding == state_of(concert, longer)
    assert len(concert.engine.live) == held


def test_texts_and_answers_beside_each_other_come_out_as_alone() -> None:
    concert = Concert(lanes=3, chunk=8)
    texts = [[first, *range(30)] for first in range(20)]
    asked = [(embed(concert, text), concert.ask(text, max_tokens=6)) for text in texts]
    concert.play()

    for text, (embedded, answered) in zip(texts, asked, strict=True):
        assert embedded.completion is not None and embedded.completion.embedding == state_of(concert, text)
        assert answered.tokens == concert.alone(text, max_tokens=6)


def test_a_cancelled_text_has_no_embedding_and_leaves_its_lane() -> None:
    concert = Concert(lanes=1, chunk=16)
    client = embed(concert, TEXT)
    concert.turn()
    client.is_gone = True
    concert.play()

    assert client.completion is not None
    assert (client.completion.finish_reason, client.completion.embedding) == ("cancelled", ())
    assert concert.engine.evaluated == [16]


def test_a_text_past_its_deadline_fails() -> None:
    concert = Concert(lanes=1, chunk=16)
    client = embed(concert, TEXT, deadline_s=0.05)  # five readings of the clock
    concert.play()

    assert isinstance(client.error, TimedOut)


def test_a_text_may_fill_the_whole_context_and_no_more() -> None:
    concert = Concert(chunk=4096)
    context = concert.engine.context_tokens
    ids = [number % 60 for number in range(context)]

    client = embed(concert, ids)
    concert.play()

    assert client.completion is not None and client.completion.embedding == state_of(concert, ids)
    with pytest.raises(PromptTooLong, match=f"{context + 1}"):
        concert.prepare(Request(Tokens.of([*ids, 1]), wants_state=True))
