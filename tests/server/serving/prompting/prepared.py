"""The request that a server makes of an ask."""

from __future__ import annotations

from typing import Any

from bough.generate.request import Request
from bough.server.serving.ask import Ask
from bough.server.serving.prompting.prompt import ModelFacts, encode_ask, make_request


def prepare_request(ask: Ask, model: ModelFacts, **options: Any) -> Request:
    return make_request(ask, model, encode_ask(ask, model, **options).encoded)
