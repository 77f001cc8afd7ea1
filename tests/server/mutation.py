"""Bodies that no client should send, made of those that clients do send: the same seed gives the same ones."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

CHAT: dict[str, Any] = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
OPTIONS: dict[str, Any] = {"num_predict": 3, "temperature": 0.5, "top_k": 5, "seed": 1, "stop": ["x"], "num_ctx": 100}

BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/api/chat"): {
        "model": "tiny",
        **CHAT,
        "options": OPTIONS,
        "format": "json",
        "keep_alive": "5m",
        "think": False,
    },
    ("POST", "/api/generate"): {
        "model": "tiny",
        "prompt": "Hello",
        "system": "Be brief.",
        "options": OPTIONS,
        "context": [5, 6],
    },
    ("POST", "/api/show"): {"model": "tiny", "verbose": True},
    ("POST", "/api/copy"): {"source": "tiny", "destination": "tiny-copy"},
    ("DELETE", "/api/delete"): {"model": "tiny-copy"},
    ("POST", "/api/embed"): {
        "model": "tiny",
        "input": ["Hello", "there"],
        "truncate": True,
        "dimensions": 2,
        "options": OPTIONS,
        "keep_alive": "5m",
    },
    ("POST", "/api/embeddings"): {"model": "tiny", "prompt": "Hello", "options": OPTIONS},
    ("POST", "/api/create"): {"model": "made", "from": "tiny"},
    ("POST", "/v1/chat/completions"): {
        "model": "tiny",
        **CHAT,
        "max_tokens": 3,
        "n": 2,
        "stop": ["x"],
        "tools": [TOOL],
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    },
    ("POST", "/v1/completions"): {
        "model": "tiny",
        "prompt": "Hello",
        "max_tokens": 3,
        "logprobs": 2,
        "echo": True,
        "logit_bias": {"5": -100},
        "stream": True,
    },
    ("POST", "/v1/embeddings"): {
        "model": "tiny",
        "input": [[5, 6], [7]],
        "encoding_format": "base64",
        "dimensions": 2,
        "user": "me",
    },
    ("POST", "/v1/rerank"): {
        "model": "tiny",
        "query": "Hello",
        "documents": ["there", {"text": "Hello"}],
        "top_n": 1,
        "return_documents": True,
    },
    ("POST", "/v1/responses"): {
        "model": "tiny",
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        "instructions": "Be brief.",
        "max_output_tokens": 3,
        "text": {"format": {"type": "json_object"}},
    },
    ("POST", "/v1/messages"): {
        "model": "tiny",
        "max_tokens": 3,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        "stop_sequences": ["x"],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "stream": True,
    },
    ("POST", "/v1/messages/count_tokens"): {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]},
    ("POST", "/api/cache/explain"): {"model": "tiny", **CHAT, "tools": [TOOL]},
    ("POST", "/api/cache/warm"): {"model": "tiny", "prompt": "Hello", "system": "Be brief."},
    ("POST", "/api/cache/keep"): {"model": "tiny", **CHAT},
    ("POST", "/api/cache/unkeep"): {"model": "tiny", "prompt": "Hello", "raw": True},
    ("POST", "/api/cache/nodes/keep"): {"model": "tiny", "root": "", "node": 1, "kept": True},
    ("POST", "/api/cache/nodes/evict"): {"model": "tiny", "root": "", "node": 1},
    ("POST", "/api/cache/export"): {},
    ("POST", "/api/run"): {
        "model": "tiny",
        **CHAT,
        "params": {"temperature": 0.5, "max_tokens": 2, "stop": ["x"]},
        "choice": 1,
    },
    ("POST", "/api/run/load"): {"model": "tiny"},
    ("POST", "/tokenize"): {"model": "tiny", "content": "Hello", "add_special": True, "with_pieces": True},
    ("POST", "/detokenize"): {"model": "tiny", "tokens": [1, 2, 3]},
    ("POST", "/api/cache/import"): {},
    ("DELETE", "/api/cache"): {},
}

_ODD: tuple[Any, ...] = (
    None,
    True,
    "",
    " ",
    "\0",
    "\ud800",
    "é\u202e🙂",
    "<|im_start|>system",
    "../../etc/passwd",
    "x" * 5000,
    0,
    -1,
    1.5,
    1e308,
    float("nan"),
    float("-inf"),
    2**31,
    -(2**63),
    10**40,
    [],
    {},
    [None],
    [[[]]],
    {"": {}},
    {"type": "object", "$ref": "#"},
    {"$ref": "#/$defs/missing"},
    {"type": "string", "pattern": "(a+)+$["},
    {"type": "image", "source": {}},
)


def mutate(body: dict[str, Any], random: Random) -> bytes:
    """The body with one to three things wrong with it, most often one, as it goes over the wire."""
    changed: Any = copy.deepcopy(body) | {"stream": random.random() < 0.5}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        changed = _change(changed, random)
    sent = json.dumps(changed).encode()
    return _damage(sent, random) if random.random() < 0.1 else sent


def _change(value: Any, random: Random) -> Any:
    """The value with another value, or none, somewhere inside it."""
    if not isinstance(value, dict | list) or not value or random.random() < 0.05:
        return _odd(random)
    key = random.choice(list(value) if isinstance(value, dict) else range(len(value)))
    what = random.random()
    if what < 0.15:
        del value[key]
    elif what < 0.25 and isinstance(value, dict):
        value[random.choice(("stream", "raw", "tools", "format", "n", "logprobs", "prompt", "stop"))] = _odd(random)
    elif what < 0.3 and isinstance(value, list):
        value *= random.randint(2, 5)
    else:
        value[key] = _change(value[key], random)
    return value


def _odd(random: Random) -> Any:
    if random.random() < 0.03:
        return _nested(random.choice((10, 70)))
    return copy.deepcopy(random.choice(_ODD))  # later changes may go inside it


def _nested(depth: int) -> Any:
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


def _damage(sent: bytes, random: Random) -> bytes:
    at = random.randrange(len(sent))
    return random.choice((sent[:at], sent[:at] + b"\xff\xfe" + sent[at:], b"[" * 100_000, b"9" * 10_000, b"", sent[at:]))
