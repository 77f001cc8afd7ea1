"""The default model in a server of its own, asked by the clients of every API: what needs weights.

What goes over the wire is tested in `tests/server/apis`, over an engine that computes nothing. Here are whole chats by
each API, and what depends on what the model says: texts, probabilities, and that a warm answer is that of a cold one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
from pydantic import BaseModel

from tests.server.load import (
    APIS,
    Chat,
    Reply,
    ask_in_turn,
    ask_together,
    make_client,
    prompt_tokens,
    run,
    text_of,
    wait_until_at_rest,
)
from tests.server.load import ask as ask_as
from tests.server.servers import Server

pytestmark = pytest.mark.model

HELLO = [{"role": "user", "content": "Say hello."}]
PARIS = [{"role": "user", "content": "Tell me about the history of Paris."}]
GREEDY = {"temperature": 0, "repeat_penalty": 1, "num_predict": 8}
WEATHER = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=120) as opened:
        yield opened


@pytest.fixture(scope="module")
def of_openai(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def of_anthropic(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def of_ollama(server: Server) -> Iterator[ollama.Client]:
    with ollama.Client(server.url, timeout=120) as opened:
        yield opened


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """The answer as a whole."""
    found: dict[str, Any] = http.post(path, json={"model": "smollm2", "stream": False, **body}).raise_for_status().json()
    return found


# OpenAI: chats


@pytest.fixture
def ask(of_openai: openai.OpenAI) -> Any:
    """Asks for a short greedy answer, unless told otherwise."""

    def create(**fields: Any) -> Any:
        defaults: dict[str, Any] = {"model": "smollm2", "messages": HELLO, "temperature": 0, "max_tokens": 8}
        return of_openai.chat.completions.create(**{**defaults, **fields})

    return create


def test_a_repeated_chat_is_answered_alike_and_tells_what_was_cached(ask: Any) -> None:
    messages = [{"role": "system", "content": "You count trees."}, {"role": "user", "content": "How many are three trees?"}]

    cold, warm = ask(messages=messages), ask(messages=messages)

    assert warm.choices[0].message.content == cold.choices[0].message.content
    assert warm.usage.prompt_tokens == cold.usage.prompt_tokens
    assert 0 < warm.usage.prompt_tokens_details.cached_tokens < warm.usage.prompt_tokens
    assert cold.usage.total_tokens == cold.usage.prompt_tokens + cold.usage.completion_tokens


def test_logprobs_of_a_greedy_answer_name_its_tokens_first_among_their_rivals(ask: Any) -> None:
    choice = ask(logprobs=True, top_logprobs=3, max_tokens=4).choices[0]

    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == choice.message.content
    assert all(len(token.top_logprobs) == 3 and token.top_logprobs[0].token == token.token for token in tokens)


def test_streamed_logprobs_are_those_of_the_whole_answer(ask: Any) -> None:
    whole = ask(logprobs=True, max_tokens=4).choices[0].logprobs.content
    chunks = list(ask(logprobs=True, max_tokens=4, stream=True))

    streamed = [each for chunk in chunks if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    assert [each.token for each in streamed] == [each.token for each in whole]


class Flag(BaseModel):
    """What the model is made to write."""

    is_red: bool


def test_a_schema_shapes_the_answer(of_openai: openai.OpenAI) -> None:
    parsed = of_openai.chat.completions.parse(
        model="smollm2", messages=[{"role": "user", "content": "Is it red?"}], response_format=Flag, max_tokens=24
    )

    assert isinstance(parsed.choices[0].message.parsed, Flag)


# OpenAI: completions, responses and embeddings


@pytest.fixture
def complete(of_openai: openai.OpenAI) -> Any:
    """Asks for a short greedy continuation, unless told otherwise."""

    def create(prompt: str = "One, two, three,", **fields: Any) -> Any:
        return of_openai.completions.create(
            prompt=prompt, **{"model": "smollm2", "temperature": 0, "max_tokens": 4, **fields}
        )

    return create


def test_a_text_is_continued_as_it_stands(complete: Any) -> None:
    answer = complete()

    assert answer.object == "text_completion"
    assert "four" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"


def test_a_repeated_prompt_tells_what_was_cached(complete: Any) -> None:
    prompt = "The quick brown fox jumps over the lazy dog, and then"
    cold, warm = complete(prompt), complete(prompt)

    assert warm.choices[0].text == cold.choices[0].text
    assert 0 < warm.usage.prompt_tokens_details.cached_tokens < warm.usage.prompt_tokens == cold.usage.prompt_tokens


def test_logprobs_stand_side_by_side_with_where_each_token_begins(complete: Any) -> None:
    choice = complete(logprobs=2).choices[0]

    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(4)]
    assert [
        top[token] for top, token in zip(logprobs.top_logprobs, logprobs.tokens, strict=True)
    ] == logprobs.token_logprobs


@pytest.fixture
def respond(of_openai: openai.OpenAI) -> Any:
    """Asks for a short greedy response."""

    def create(**fields: Any) -> Any:
        return of_openai.responses.create(**{"model": "smollm2", "temperature": 0, "max_output_tokens": 8, **fields})

    return create


def test_a_repeated_request_tells_what_was_cached(respond: Any) -> None:
    asked = {"input": "Which trees grow by rivers?", "instructions": "You know every tree."}
    cold, warm = respond(**asked), respond(**asked)

    assert warm.output_text == cold.output_text
    assert 0 < warm.usage.input_tokens_details.cached_tokens < warm.usage.input_tokens == cold.usage.input_tokens


def test_a_response_and_a_chat_share_what_is_cached(respond: Any, ask: Any) -> None:
    question = "Which mushrooms grow under birches in autumn?"
    ask(messages=[{"role": "user", "content": question}], max_tokens=2)

    assert respond(input=question).usage.input_tokens_details.cached_tokens > 0


def test_texts_of_one_meaning_have_vectors_that_are_close_by_both_apis(
    of_ollama: ollama.Client, of_openai: openai.OpenAI
) -> None:
    texts = ["The cat sleeps.", "A kitten naps.", "Stocks fell."]
    cat, kitten, stocks = of_ollama.embed("smollm2", texts).embeddings
    others = of_openai.embeddings.create(model="smollm2", input=texts).data

    def similarity(one: Any, other: Any) -> float:
        return sum(a * b for a, b in zip(one, other, strict=True))

    assert similarity(cat, cat) == pytest.approx(1, abs=1e-5)
    assert similarity(cat, kitten) > similarity(cat, stocks)
    assert [each.embedding for each in others] == [pytest.approx(each, abs=1e-5) for each in (cat, kitten, stocks)]


# Ollama


def test_a_prompt_that_was_seen_before_is_counted_in_full_and_as_cached(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Count to ten, as slowly as an old clock would: one, two and so on."}]
    cold = post(http, "/api/chat", messages=messages, options=GREEDY)

    warm = post(http, "/api/chat", messages=messages, options=GREEDY)

    assert warm["prompt_eval_count"] == cold["prompt_eval_count"]
    assert cold["prompt_eval_cached_count"] < warm["prompt_eval_cached_count"] < warm["prompt_eval_count"]
    assert warm["message"] == cold["message"]


def test_the_asynchronous_client_runs_several_chats_at_once(server: Server) -> None:
    async def chat(opened: ollama.AsyncClient, text: str) -> str:
        pieces = await opened.chat("smollm2", [{"role": "user", "content": text}], stream=True, options=GREEDY)
        return "".join([piece.message.content or "" async for piece in pieces])

    async def chat_in_parallel() -> list[str]:
        async with ollama.AsyncClient(server.url, timeout=120) as opened:
            return await asyncio.gather(*(chat(opened, text) for text in ("Say one.", "Say two.", "Say one.")))

    first, other, again = asyncio.run(chat_in_parallel())

    assert first == again != other


def test_a_seed_gives_the_same_text_again(of_ollama: ollama.Client) -> None:
    options = {"temperature": 1.5, "seed": 11, "num_predict": 12}

    texts = {of_ollama.chat("smollm2", PARIS, options=options).message.content for _ in range(2)}

    assert len(texts) == 1


def test_json_is_json(of_ollama: ollama.Client) -> None:
    answer = of_ollama.chat(
        "smollm2",
        [{"role": "user", "content": 'Give me {"a": 1} as JSON, nothing else.'}],
        format="json",
        options={"temperature": 0, "num_predict": 60},
    )

    assert answer.done_reason == "length" or json.loads(answer.message.content or "") is not None


def test_logprobs_have_text_bytes_and_rivals(http: httpx.Client) -> None:
    answer = post(http, "/api/chat", messages=PARIS, logprobs=True, top_logprobs=2, options=GREEDY)

    assert len(answer["logprobs"]) == 8
    for each in answer["logprobs"]:
        assert bytes(each["bytes"]).decode() == each["token"]
        assert each["logprob"] <= 0
        assert each["top_logprobs"][0]["logprob"] == pytest.approx(each["logprob"])
        assert len(each["top_logprobs"]) == 2


def test_a_raw_prompt_goes_on_as_it_stands(http: httpx.Client) -> None:
    answer = post(http, "/api/generate", prompt="The capital of France is", raw=True, options=GREEDY)

    assert answer["prompt_eval_count"] == 5
    assert answer["response"].startswith(" Paris")
    assert "context" not in answer


def test_a_context_that_is_sent_back_is_remembered_and_cached(http: httpx.Client) -> None:
    first = post(http, "/api/generate", prompt="My name is Rosalind.", options=GREEDY)

    second = post(http, "/api/generate", prompt="Go on.", context=first["context"], options=GREEDY)

    assert len(first["context"]) == first["prompt_eval_count"] + first["eval_count"]
    assert second["context"][: len(first["context"])] == first["context"]
    assert second["prompt_eval_cached_count"] >= first["prompt_eval_count"] - 1


# Anthropic


def ask_anthropic(client: anthropic.Anthropic, messages: Any = HELLO, max_tokens: int = 6, **fields: Any) -> Any:
    return client.messages.create(
        model="smollm2", max_tokens=max_tokens, messages=messages, extra_body={"temperature": 0}, **fields
    )


def total(usage: Any) -> int:
    found: int = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    return found


def test_the_second_time_the_prompt_is_read_from_the_cache(of_anthropic: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "Tell me of the sea, of the wind and of the stars above the two of them."}]

    first, second = (ask_anthropic(of_anthropic, messages, system="You sing.") for _ in range(2))

    assert second.content == first.content
    assert total(second.usage) == total(first.usage)
    assert second.usage.cache_read_input_tokens > first.usage.cache_read_input_tokens
    assert second.usage.input_tokens > 0


def test_a_stop_sequence_ends_the_answer_and_is_named(of_anthropic: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "Count from 1 to 9."}, {"role": "assistant", "content": "1, 2, 3, "}]

    message = ask_anthropic(of_anthropic, messages, max_tokens=16, stop_sequences=["6", "never"])

    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "6")
    assert message.content[0].text.strip() == "4, 5,"


def test_a_tool_that_must_be_used_is_used_as_its_schema_says(of_anthropic: anthropic.Anthropic) -> None:
    question = [{"role": "user", "content": "What is the weather in Rome?"}]

    message = ask_anthropic(of_anthropic, question, 40, tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})

    assert message.stop_reason == "tool_use"
    assert [block.type for block in message.content] == ["tool_use"]
    assert message.content[0].id.startswith("toolu_")
    assert message.content[0].name == "weather"
    assert message.content[0].input["city"] in ("Paris", "Rome")


def test_what_a_tool_gave_is_part_of_the_conversation(of_anthropic: anthropic.Anthropic) -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny, 20 degrees"}
    messages = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]

    message = ask_anthropic(of_anthropic, messages, 16, tools=[WEATHER])

    assert "sunny" in message.content[0].text


# Two APIs, and Bough's own


def test_the_default_model_is_sampled_alike_by_two_apis(http: httpx.Client) -> None:
    italy = [{"role": "user", "content": "What is the capital of Italy?"}]

    by_ollama = post(http, "/api/chat", messages=italy, options={"seed": 1, "num_predict": 12})
    by_openai = post(http, "/v1/chat/completions", messages=italy, seed=1, max_tokens=12)

    assert by_ollama["message"]["content"] == by_openai["choices"][0]["message"]["content"]
    assert "temperature                    0.2" in post(http, "/api/show")["parameters"]


def test_a_warmed_prefix_is_explained_carried_away_and_serves_the_first_chat(http: httpx.Client) -> None:
    salt = {"X-Bough-Salt": "of the whole test"}
    system = {"role": "system", "content": "You are a helpful assistant, and the capital of France is Paris."}
    prefix = {"model": "smollm2", "messages": [system]}

    warmed = http.post("/api/cache/warm", json=prefix, headers=salt).raise_for_status().json()
    explained = http.post("/api/cache/explain", json=prefix, headers=salt).raise_for_status().json()
    archive = http.post("/api/cache/export", headers=salt).raise_for_status().content
    http.delete("/api/cache", headers=salt).raise_for_status()
    gone = http.post("/api/cache/explain", json=prefix, headers=salt).raise_for_status().json()
    http.post("/api/cache/import", content=archive, headers=salt).raise_for_status()
    body = {"model": "smollm2", "messages": [system, *PARIS], "options": GREEDY, "stream": False}
    answered = http.post("/api/chat", json=body, headers=salt).raise_for_status().json()

    assert warmed["cached_tokens"] + warmed["computed_tokens"] == warmed["prompt_tokens"] == explained["matched_tokens"]
    assert explained["prompt_tokens"] == gone["prompt_tokens"] and gone["matched_tokens"] == 0
    assert answered["prompt_eval_cached_count"] >= warmed["prompt_tokens"] - 1


# Many clients at the same time: nothing mixes, nobody is stuck behind a long prompt, and nothing is computed twice

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
            asked = Chat("openai", text_of(6000, begin="long"))
            reading = asyncio.create_task(ask_as(client, server, asked, is_over, long))
            await has_begun.wait()
            assert not reading.done()
            await ask_as(client, server, Chat("openai", "Hello there."), lambda reply: bool(reply.text), short)
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
            long = asyncio.create_task(ask_as(client, server, Chat("openai", text_of(900, begin="patient"), max_tokens=2)))
            while not long.done():
                await asyncio.gather(
                    *(ask_as(client, server, Chat(APIS[i % 3], f"Hello {num_short + i}.", max_tokens=4)) for i in range(3))
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
