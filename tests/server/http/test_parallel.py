"""Many clients at the same time: nothing mixes, nobody is stuck behind a long prompt, and nothing is computed twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.server.load import (
    APIS,
    Chat,
    Reply,
    ask,
    ask_in_turn,
    ask_together,
    make_client,
    prompt_tokens,
    run,
    text_of,
    wait_until_at_rest,
)
from tests.server.servers import Server

pytestmark = pytest.mark.model

QUESTIONS = (
    "Name a colour.",
    "What is the capital of France?",
    "Count from one to ten.",
    "Write a line about the sea.",
    "Who wrote Hamlet?",
    "Say good morning in Spanish.",
    "What do bees make?",
    "Name three rivers of Europe.",
)


def chats(kind: str, salt: str) -> list[Chat]:
    """The questions by every API that can ask them so, greedy or with a seed each."""
    if kind == "greedy":
        return [Chat(APIS[i % 3], text, streams=i % 2 == 0, salt=salt) for i, text in enumerate(QUESTIONS)]
    seeded = ("ollama", "openai")  # Anthropic's API has no seed
    return [Chat(seeded[i % 2], text, seed=i, streams=i % 4 < 2, salt=salt) for i, text in enumerate(QUESTIONS)]  # type: ignore[arg-type]


def said(replies: Sequence[Reply]) -> list[tuple[str, list[str], int]]:
    return [(reply.text, reply.tokens, reply.prompt_tokens) for reply in replies]


@pytest.mark.parametrize("kind", ["greedy", pytest.param("seeded", marks=pytest.mark.slow)])
def test_eight_chats_at_once_are_answered_as_each_alone_token_by_token(server: Server, kind: str) -> None:
    together = run(ask_together(server, chats(kind, f"{kind} together")))
    alone = run(ask_in_turn(server, chats(kind, f"{kind} alone")))  # another salt: nothing of the others is known

    assert said(together) == said(alone)
    assert all(reply.is_whole and reply.text for reply in together)


def test_seeded_chats_are_answered_the_same_beside_other_ones_and_a_prefill(server: Server) -> None:
    asked = chats("seeded", "beside others")[:3]
    first = run(ask_together(server, asked))

    again = run(ask_together(server, [*reversed(asked), Chat("anthropic", text_of(300, begin="beside"))]))

    assert said(again[2::-1]) == said(first)


def test_a_short_request_has_its_first_token_while_a_long_prompt_is_still_read(server: Server) -> None:
    async def ask_both() -> tuple[Reply, Reply, str]:
        long, short, has_begun = Reply(), Reply(), asyncio.Event()

        def is_over(reply: Reply) -> bool:
            if len(reply.progress) == 2:  # it has a lane and its first chunk is done
                has_begun.set()
            return bool(short.text)

        async with make_client() as client:
            reading = asyncio.create_task(ask(client, server, Chat("openai", text_of(6000, begin="long")), is_over, long))
            await has_begun.wait()
            assert not reading.done()
            await ask(client, server, Chat("openai", "Hello there."), lambda reply: bool(reply.text), short)
            so_far = long.text
            await reading  # it hangs up: that its prompt is not done was seen
        return short, long, so_far

    short, long, so_far = run(ask_both())

    done, total = map(int, long.progress[-1].removeprefix("prefill ").split("/"))
    assert short.text and not so_far and not long.text
    assert total > 5500 and done < total
    wait_until_at_rest(server)


def test_a_long_prompt_goes_on_while_short_ones_keep_coming(server: Server) -> None:
    async def ask_all() -> tuple[Reply, int]:
        num_short = 0
        async with make_client() as client:
            long = asyncio.create_task(ask(client, server, Chat("openai", text_of(900, begin="patient"), max_tokens=2)))
            while not long.done():
                await asyncio.gather(
                    *(ask(client, server, Chat(APIS[i % 3], f"Hello {num_short + i}.", max_tokens=4)) for i in range(3))
                )
                num_short += 3
        return long.result(), num_short

    long, num_short = run(ask_all())

    assert long.is_whole and long.text
    assert num_short >= 3


@pytest.mark.parametrize("api", APIS)
def test_a_long_prefix_that_four_clients_begin_with_is_computed_once(server: Server, api: str) -> None:
    prefix = text_of(600, begin=f"shared prefix of {api}")
    asked = [Chat(api, f"{prefix} {question}", max_tokens=2) for question in QUESTIONS[:4]]  # type: ignore[arg-type]

    replies = run(ask_together(server, asked))

    cached = sorted(reply.cached_tokens for reply in replies)
    assert cached[0] < 100  # the one that computed it
    assert all(number > 550 for number in cached[1:])


def test_the_same_prompt_asked_by_four_clients_at_once_is_computed_once(server: Server) -> None:
    before = prompt_tokens(server, "computed")

    replies = run(ask_together(server, [Chat("openai", text_of(600, begin="the same"), max_tokens=2)] * 4))

    computed = prompt_tokens(server, "computed") - before
    (total,) = {reply.prompt_tokens for reply in replies}
    assert total > 550
    assert computed <= total + 4 * 16  # each evaluates a few tokens at its own end
    assert len({reply.text for reply in replies}) == 1
