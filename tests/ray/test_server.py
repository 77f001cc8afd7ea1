"""Three replicas behind one server: every API answers, what is shown names each, and a kill disturbs no client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from tests.ray.conftest import REPLICAS, let_router_hear
from tests.server.servers import Server
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.alone]

BACK_S = 120
LONG = " ".join(f"word{number}" for number in range(60))
NAMES = [f"replica-{number}" for number in range(REPLICAS)]


def ask(
    server: Server, number: int, tokens: int, heard: threading.Event | None = None, timeout_s: float = 120
) -> tuple[str, str, int]:
    """A streamed answer: its text, why it ended and how many tokens it has. Odd ones are seeded, the others greedy."""
    options: dict[str, Any] = {"num_predict": tokens}
    if number % 2:
        options |= {"temperature": 1.0, "seed": number}
    messages = [{"role": "user", "content": f"{number} {LONG}"}]
    text, last = [], None
    with ollama.Client(server.url, timeout=timeout_s) as client:
        for part in client.chat(server.model, messages, stream=True, options=options):
            text.append(part.message.content or "")
            last = part
            if heard is not None and len(text) > tokens // 4:
                heard.set()
    assert last is not None and last.done
    return "".join(text), str(last.done_reason), int(last.eval_count or 0)


def read_replicas(server: Server) -> dict[str, dict[str, Any]]:
    (model,) = httpx.get(f"{server.url}/api/cache", timeout=60).json()["models"]
    replicas: dict[str, dict[str, Any]] = model["replicas"]
    return replicas


def pid_of(server: Server, name: str) -> int | None:
    """The process that holds the folder of a replica."""
    written = (server.cache_folder / name / "lock").read_text().strip()
    return int(written) if written else None


def wait_for(server: Server, name: str, but_not: int) -> dict[str, Any]:
    """The figures of a replica when another process has its folder and takes requests."""
    found: dict[str, dict[str, Any]] = {}

    def is_back() -> bool:
        found.update(read := read_replicas(server))
        return len(read) == REPLICAS and pid_of(server, name) not in (None, but_not)

    wait_until(is_back, BACK_S, describe=lambda: f"for {name} to be back:\n{server.log[-4000:]}")
    return found[name]


def test_each_api_answers_over_replicas(ray_server: Server) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    with openai.OpenAI(base_url=f"{ray_server.url}/v1", api_key="any", max_retries=0) as client:
        several = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, n=4, logprobs=True)
        streamed = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, stream=True)
        texts = [part.choices[0].delta.content or "" for part in streamed if part.choices]
        vectors = client.embeddings.create(model="tiny", input=["one", "two"]).data
        with pytest.raises(openai.BadRequestError, match="the context holds 2048"):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": LONG * 20}])
    expected = several.choices[0].message.content
    assert len(several.choices) == 4
    assert "".join(texts) == expected
    assert vectors[0].embedding != vectors[1].embedding
    with (
        anthropic.Anthropic(base_url=ray_server.url, api_key="any", max_retries=0) as claude,
        claude.messages.stream(model="tiny", max_tokens=6, messages=messages) as answer,
    ):
        assert answer.get_final_text() == expected
    with ollama.Client(ray_server.url) as local:
        assert local.chat("tiny", messages, options={"num_predict": 6}).message.content == expected


def test_the_next_message_of_a_chat_goes_where_its_beginning_is(ray_server: Server) -> None:
    shares = []

    def chat(messages: list[dict[str, str]]) -> dict[str, Any]:
        body = {"model": "tiny", "messages": messages, "stream": False, "options": {"num_predict": 4}}
        answer: dict[str, Any] = httpx.post(f"{ray_server.url}/api/chat", json=body, timeout=60).json()
        return answer

    for number in range(6):
        messages = [{"role": "user", "content": f"chat {number} {LONG}"}]
        messages += [chat(messages)["message"], {"role": "user", "content": "and then?"}]
        let_router_hear()
        answer = chat(messages)
        shares.append(answer["prompt_eval_cached_count"] / answer["prompt_eval_count"])
    assert sum(share > 0.7 for share in shares) >= 5, shares


def test_tree_explain_ps_and_metrics_name_every_replica(ray_server: Server) -> None:
    with ThreadPoolExecutor(12) as pool:  # so that each has something
        list(pool.map(lambda number: ask(ray_server, number, 8), range(12)))
    assert sorted(read_replicas(ray_server)) == NAMES
    metrics = httpx.get(f"{ray_server.url}/metrics").text
    explained = httpx.post(f"{ray_server.url}/api/cache/explain", json={"prompt": f"0 {LONG}"}).json()
    assert sorted(explained["replicas"]) == NAMES
    assert explained["cached_tokens"] == max(each["cached_tokens"] for each in explained["replicas"].values()) > 0
    shown = _run("ps", "--url", ray_server.url)
    for name in NAMES:
        assert f'bough_lanes{{model="tiny",replica="{name}",state="idle"}}' in metrics
        assert name in shown
    roots = httpx.get(f"{ray_server.url}/api/cache/tree").json()["roots"]
    assert set(roots) <= {f"{name}:" for name in NAMES} and roots
    assert explained["replica"] in _run("tree", "--url", ray_server.url)


def _run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "bough", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("kills", "streams"), [(2, 8), pytest.param(20, 20, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])]
)
def test_no_client_notices_that_a_replica_was_killed(ray_server: Server, kills: int, streams: int) -> None:
    expected = [ask(ray_server, number, 120) for number in range(streams)]
    for kill in range(kills):
        name = NAMES[kill % REPLICAS]
        victim = pid_of(ray_server, name)
        assert victim is not None
        heard = threading.Event()
        with ThreadPoolExecutor(streams) as pool:
            answers = [pool.submit(ask, ray_server, number, 120, heard) for number in range(streams)]
            assert heard.wait(60)
            os.kill(victim, signal.SIGKILL)
            assert [answer.result() for answer in answers] == expected
        figures = wait_for(ray_server, name, but_not=victim)
        assert figures["tokens"] > 0  # it came back with its tree


def test_a_model_with_recurrent_layers_goes_through_the_router_too(hybrid_server: Server) -> None:
    first, second = ask(hybrid_server, 0, 12), ask(hybrid_server, 1, 12)
    let_router_hear()
    assert (ask(hybrid_server, 0, 12), ask(hybrid_server, 1, 12)) == (first, second)
    explained = httpx.post(f"{hybrid_server.url}/api/cache/explain", json={"prompt": f"0 {LONG}"}).json()
    assert explained["matched_tokens"] == explained["prompt_tokens"]
    assert Path(hybrid_server.cache_folder / "replica-1").is_dir()
