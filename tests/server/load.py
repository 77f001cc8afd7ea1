"""Clients by the dozen: chats of every API sent at the same time, read line by line, and clients that hang up on the way.

Every client has a connection of its own and gives up after `PATIENCE_S`: a server that hangs fails the test, and no test
waits for it for ever.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server.servers import Address
from tests.waiting import BOUND_S, wait_until

Api = Literal["ollama", "openai", "anthropic"]
APIS: tuple[Api, ...] = ("ollama", "openai", "anthropic")
PATHS: dict[Api, str] = {"ollama": "/api/chat", "openai": "/v1/chat/completions", "anthropic": "/v1/messages"}
PATIENCE_S = 120.0
WORDS = ("tree", "river", "stone", "house", "light", "water", "green", "small", "road", "time")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Chat:
    """What one client says, and by which API. Without a seed the answer is greedy."""

    api: Api
    text: str
    max_tokens: int = 12
    seed: int | None = None  # which Anthropic's API does not have
    streams: bool = True
    salt: str = ""


@dataclass
class Reply:
    """What a client has so far; times count from when it asked."""

    status: int = 0
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    text: str = ""
    tokens: list[str] = field(default_factory=list)  # Anthropic's API does not tell them
    progress: list[str] = field(default_factory=list)  # the comments that tell how far the prompt has come
    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_s: float | None = None
    is_whole: bool = False
    error: str = ""


Until = Callable[[Reply], bool]


def never(reply: Reply) -> bool:
    return False


def body_of(chat: Chat, model: str) -> dict[str, Any]:
    """The request, in the words of its API."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": chat.text}],
        "stream": chat.streams,
    }
    temperature = 0.0 if chat.seed is None else 1.0
    if chat.api == "ollama":
        options = {"num_predict": chat.max_tokens, "temperature": temperature, "seed": chat.seed or 0}
        return body | {"options": options, "logprobs": True}
    body |= {"max_tokens": chat.max_tokens, "temperature": temperature}
    if chat.api == "anthropic":
        assert chat.seed is None, "Anthropic's API has no seed"
        return body
    usage = {"stream_options": {"include_usage": True}} if chat.streams else {}
    return body | {"seed": chat.seed, "logprobs": True} | usage


async def ask(
    client: httpx.AsyncClient, server: Address, chat: Chat, until: Until = never, reply: Reply | None = None
) -> Reply:
    """Ask and read on until the answer ends, or `until` says so: then hang up. Raises httpx.HTTPError, or TimeoutError.

    Who gives a reply sees it grow.
    """
    reply = Reply() if reply is None else reply
    read = _READERS[chat.api]
    headers = {"x-bough-salt": chat.salt} if chat.salt else {}
    url, began_s = server.url + PATHS[chat.api], time.monotonic()
    async with (
        asyncio.timeout(PATIENCE_S),
        client.stream("POST", url, json=body_of(chat, server.model), headers=headers) as response,
    ):
        reply.status, reply.headers = response.status_code, response.headers
        if response.status_code != 200:
            reply.error = (await response.aread()).decode()
            return reply
        if until(reply):
            return reply
        async for line in response.aiter_lines():
            _take(line, read, reply)
            if reply.first_s is None and reply.text:
                reply.first_s = time.monotonic() - began_s
            if until(reply):
                return reply
    return reply


def _take(line: str, read: Callable[[dict[str, Any], Reply], None], reply: Reply) -> None:
    if line.startswith(":"):
        reply.progress.append(line[1:].strip())
    elif line == "data: [DONE]":
        reply.is_whole = True
    elif line and not line.startswith("event:"):
        found = json.loads(line.removeprefix("data: "))
        if "error" in found:
            reply.error = json.dumps(found["error"])
        else:
            read(found, reply)


def _read_ollama(found: dict[str, Any], reply: Reply) -> None:
    reply.text += found["message"]["content"]
    reply.tokens += [each["token"] for each in found.get("logprobs", ())]
    if found["done"]:
        reply.prompt_tokens, reply.cached_tokens = found["prompt_eval_count"], found["prompt_eval_cached_count"]
        reply.is_whole = True


def _read_openai(found: dict[str, Any], reply: Reply) -> None:
    for choice in found["choices"]:
        said = choice.get("delta") or choice.get("message") or {}
        reply.text += said.get("content") or ""
        reply.tokens += [each["token"] for each in (choice["logprobs"] or {}).get("content", ())]
    if found.get("usage"):
        reply.prompt_tokens = found["usage"]["prompt_tokens"]
        reply.cached_tokens = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        reply.is_whole = reply.is_whole or found["object"] == "chat.completion"


def _read_anthropic(found: dict[str, Any], reply: Reply) -> None:
    if found["type"] == "content_block_delta":
        reply.text += found["delta"]["text"]
    if found["type"] == "message":
        reply.text = "".join(block["text"] for block in found["content"])
    usage = found.get("message", found).get("usage")
    if usage:
        reply.cached_tokens = usage["cache_read_input_tokens"]
        reply.prompt_tokens = usage["input_tokens"] + reply.cached_tokens
    reply.is_whole = reply.is_whole or found["type"] in ("message", "message_stop")


_READERS: dict[Api, Callable[[dict[str, Any], Reply], None]] = {
    "ollama": _read_ollama,
    "openai": _read_openai,
    "anthropic": _read_anthropic,
}


def make_client() -> httpx.AsyncClient:
    """A client whose requests have a connection each, as many as there are."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=PATIENCE_S, limits=limits, trust_env=False)


async def ask_together(server: Address, chats: Sequence[Chat]) -> list[Reply]:
    """All at the same time; the replies in the order of the chats."""
    async with make_client() as client:
        return list(await asyncio.gather(*(ask(client, server, chat) for chat in chats)))


async def ask_in_turn(server: Address, chats: Sequence[Chat]) -> list[Reply]:
    """Each when the one before it has its answer."""
    async with make_client() as client:
        return [await ask(client, server, chat) for chat in chats]


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Be all those clients, on an event loop of their own."""
    return asyncio.run(work)


# What the server says of itself


def figures(server: Address) -> dict[str, Any]:
    """The figures of the model's tree, lanes and queue."""
    (found,) = httpx.get(f"{server.url}/api/cache", timeout=BOUND_S, trust_env=False).raise_for_status().json()["models"]
    return dict(found)


def prompt_tokens(server: Address, kind: str) -> float:
    """So many tokens of prompts were matched, cached or computed since the server began."""
    text = httpx.get(f"{server.url}/metrics", timeout=BOUND_S, trust_env=False).raise_for_status().text
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "bough_prompt_tokens_total" and sample.labels["kind"] == kind
    )


def wait_until_at_rest(server: Address) -> None:
    """Nothing waits and nothing runs, soon after the last client has gone."""
    found: dict[str, Any] = {}

    def is_at_rest() -> bool:
        found.update(figures(server))
        return not any(found[name] for name in ("busy_lanes", "queue", "running"))

    wait_until(is_at_rest, describe=lambda: f"for the server to rest: {found}\n{server.log[-4000:]}")


def text_of(num_words: int, *, begin: str) -> str:
    """A text of about so many tokens, which begins as no other does."""
    return f"{begin}: " + " ".join(Random(begin).choices(WORDS, k=num_words))
