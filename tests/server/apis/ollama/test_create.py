"""Models that clients make from others, by Ollama's own client and by the raw API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import ollama
import pytest

from bough.errors import RequestError
from bough.models.aliases import Overlay
from bough.server.apis.ollama.create import Modelfile, parse_modelfile, write_modelfile, write_parameters

CHAT = [{"role": "user", "content": "What is your name?"}]
OPTIONS = {"temperature": 0, "num_predict": 4}


@pytest.fixture(autouse=True)
def _no_names_left(little: httpx.Client) -> Iterator[None]:
    yield
    for name in {each["name"] for each in little.get("/api/tags").json()["models"]} - {"little:latest", "tiny:latest"}:
        little.request("DELETE", "/api/delete", json={"model": name})


def chat(http: httpx.Client, model: str, messages=CHAT, **fields):
    return http.post("/api/chat", json={"model": model, "messages": messages, "stream": False, **fields}).json()


def test_the_client_of_ollama_makes_a_model_that_shares_weights_and_tree(little):
    shots = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]
    with ollama.Client(str(little.base_url)) as client:
        made = client.create(
            "mario", from_="little", system="You are Mario.", parameters=OPTIONS, messages=shots, stream=True
        )
        statuses = [each.status for each in made]
        shown = client.show("mario")
        answered = client.chat("mario", CHAT)
        client.copy("mario", "luigi")
        listed = [each.model for each in client.list().models]
    system = {"role": "system", "content": "You are Mario."}
    same = chat(little, "little", [system, *shots, *CHAT], options=OPTIONS)
    again = chat(little, "luigi")

    assert statuses[-1] == "success"
    assert 'SYSTEM """You are Mario."""' in shown.modelfile and shown.modelfile.startswith("FROM little\n")
    assert "num_predict                    4" in shown.parameters
    assert {"little:latest", "mario:latest", "luigi:latest"} <= set(listed)
    assert (answered.model, answered.done_reason, answered.eval_count) == ("mario", "length", 4)
    assert same["prompt_eval_count"] == answered.prompt_eval_count
    assert same["prompt_eval_cached_count"] == again["prompt_eval_cached_count"] == same["prompt_eval_count"] - 1
    assert [each["name"] for each in little.get("/api/ps").json()["models"]].count("little:latest") == 1


def test_the_request_comes_before_the_created_model(little):
    little.post("/api/create", json={"model": "short", "from": "little", "system": "A", "parameters": {"num_predict": 3}})
    own = [{"role": "system", "content": "B"}, *CHAT]

    longer = chat(little, "short", own, options=OPTIONS)

    assert longer["eval_count"] == 4
    assert longer["prompt_eval_count"] == chat(little, "little", own, options=OPTIONS)["prompt_eval_count"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"])
def test_a_created_model_is_the_same_for_every_api(little, path):
    little.post("/api/create", json={"model": "long", "from": "little", "system": "You are a rather long system prompt."})
    bodies = {"/v1/messages": {"max_tokens": 1, "messages": CHAT}, "/v1/responses": {"input": "x", "max_output_tokens": 16}}
    body = bodies.get(path, {"max_tokens": 1, "messages": CHAT})

    def count(model: str) -> int:
        found = little.post(path, json={"model": model, **body}).json()
        usage = found.get("usage", found)
        fields = ("prompt_tokens", "input_tokens", "cache_read_input_tokens")
        return sum(usage.get(field, 0) for field in fields)

    assert count("long") > count("little") + 3


def test_a_modelfile_with_a_template_in_go_is_used(little):
    text = 'FROM little\nTEMPLATE """[{{ .Prompt }}]"""\nPARAMETER num_predict 2'
    made = little.post("/api/create", json={"name": "bare", "modelfile": text, "stream": False}).json()

    answered = little.post("/api/generate", json={"model": "bare", "prompt": "abc", "stream": False}).json()
    raw = little.post(
        "/api/generate", json={"model": "little", "prompt": "[abc]", "raw": True, "stream": False, "options": OPTIONS}
    )

    assert made == {"status": "success"}
    assert answered["prompt_eval_count"] == raw.json()["prompt_eval_count"]
    assert little.post("/api/show", json={"model": "bare"}).json()["template"] == "[{{ .Prompt }}]"


def test_a_created_model_is_replaced_and_made_from_another(little):
    for body in (
        {"model": "first", "from": "little", "system": "old", "parameters": {"seed": 1}},
        {"model": "first", "from": "little", "system": "new", "parameters": {"seed": 2}},
        {"model": "second", "from": "first", "parameters": {"top_k": 3}},
    ):
        assert little.post("/api/create", json=body).status_code == 200

    shown = little.post("/api/show", json={"model": "second"}).json()

    assert shown["system"] == "new"
    assert shown["details"]["parent_model"] == "little:latest"
    assert {"seed 2", "top_k 3"} <= {" ".join(line.split()) for line in shown["parameters"].splitlines()}


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"from": "little", "quantize": "q4_0"}, 400, "quantize"),
        ({"from": "little", "adapters": {"a": "sha256:0"}}, 400, "adapters"),
        ({"files": {"a": "sha256:0"}}, 400, "files"),
        ({"modelfile": "FROM little\nADAPTER x"}, 400, "ADAPTER"),
        ({"modelfile": "FROM little\n#" + "x" * 2**20}, 400, "modelfile has 1,048,589 characters"),
        ({"from": "nothing"}, 404, "there are: "),
        ({}, 400, "from"),
        ({"from": "little", "model": "little", "system": "x"}, 400, "weights of its own"),
        ({"from": "little", "model": "../x"}, 400, "not a model name"),
        ({"from": "little", "parameters": {"mirostat": 1}}, 400, "mirostat"),
        ({"from": "little", "parameters": {"temperature": "hot"}}, 400, "temperature"),
        ({"from": "little", "template": "{{ range .Messages }}{{ end }}"}, 400, "range .Messages"),
        ({"from": "little", "messages": [{"role": "wizard", "content": "x"}]}, 400, "role"),
        ({"from": "tiny", "system": "x"}, 400, "outside the model folder"),
    ],
)
def test_what_cannot_be_made_is_refused_with_a_reason(little, body, status, named):
    response = little.post("/api/create", json={"model": "x", **body})

    assert (response.status_code, named in response.json()["error"]) == (status, True), response.text
    assert "x:latest" not in [each["name"] for each in little.get("/api/tags").json()["models"]]


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ("{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}", "takes longer than 2 s"),
        ("{% set n.a = n.a + ['x' * (10 ** 7 + i)] %}", "needs more than 512 MB"),
    ],
)
def test_a_template_that_takes_too_much_is_refused_and_stops_nobody(little, work, reason):
    source = (
        "{% set n = namespace(a=[], b=[]) %}{% for i in range(60) %}" + work + "{% endfor %}{{ n.a == n.b }}{{ messages }}"
    )
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(little.post, "/api/create", json={"model": "x", "from": "little", "template": source})
        while not made.done():
            assert little.get("/health/live", timeout=5).status_code == 200

    assert made.result().status_code == 400
    assert made.result().json() == {"error": f"the chat template {reason}"}


def test_the_lines_of_a_stream_end_with_success(little):
    response = little.post("/api/create", json={"model": "lines", "from": "little"})

    assert response.headers["content-type"].startswith("application/x-ndjson")
    assert json.loads(response.text.splitlines()[-1]) == {"status": "success"}


# Modelfiles

TEXT = '''# a comment
FROM small

system """You are a pirate.
Say "arr"."""
PARAMETER num_predict 8
Parameter temperature 0.5
PARAMETER use_mmap false
PARAMETER stop "</s> "
PARAMETER stop <|x|>
TEMPLATE """{{ .Prompt }}
# no comment
"""
MESSAGE user Hello there
MESSAGE ASSISTANT """Arr
arr"""
LICENSE MIT
LICENSE "another"'''


def test_a_modelfile_is_read():
    assert parse_modelfile(TEXT) == Modelfile(
        source="small",
        system='You are a pirate.\nSay "arr".',
        template="{{ .Prompt }}\n# no comment\n",
        license=["MIT", "another"],
        parameters={"num_predict": 8, "temperature": 0.5, "use_mmap": False, "stop": ["</s> ", "<|x|>"]},
        messages=[{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Arr\narr"}],
    )


@pytest.mark.parametrize(
    ("text", "named"),
    [("FROM a\nADAPTER ./b", "'ADAPTER'"), ("hello", "'hello'"), ('SYSTEM """a', 'SYSTEM with """')],
)
def test_what_is_not_supported_is_refused_by_name(text, named):
    with pytest.raises(RequestError, match=named):
        parse_modelfile(text)


def test_what_is_written_can_be_read_again():
    parameters = {"stop": ["\n", 'a "b"'], "temperature": 0.5}
    overlay = Overlay(system="a\nb", messages=({"role": "user", "content": "x\ny"},), license="MIT")

    found = parse_modelfile(write_modelfile("small", "{{ .Prompt }}\n", parameters, overlay))

    assert (found.source, found.template, found.parameters) == ("small", "{{ .Prompt }}\n", parameters)
    assert (found.system, found.messages, found.license) == ("a\nb", [dict(overlay.messages[0])], ["MIT"])


def test_each_stop_string_has_a_line():
    assert [line.split() for line in write_parameters({"seed": 1, "stop": ["a", "\n"]}).splitlines()] == [
        ["seed", "1"],
        ["stop", '"a"'],
        ["stop", '"\\n"'],
    ]
