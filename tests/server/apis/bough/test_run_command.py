"""The body of a request of `bough run`. tests/cli/backends sends them to a server."""

from __future__ import annotations

from typing import Any

import pytest

from bough.errors import RequestError
from bough.prompting.ask import Ask
from bough.server.apis.bough.run_command import RunBody
from bough.types import SamplingParams

USER = {"role": "user", "content": "Hello"}


def read(**body: Any) -> Ask:
    return RunBody.model_validate(body).to_ask("tiny", "salt")


def test_parameters_that_are_not_given_are_left_to_the_model():
    ask = read(messages=[USER], params={"top_k": 4, "seed": 7}, choice=2)

    assert ask.params == SamplingParams(top_k=4, seed=7)
    assert "temperature" in ask.unset and "repeat_penalty" in ask.unset
    assert not ask.unset & {"top_k", "seed", "max_tokens"}
    assert (ask.model, ask.salt, ask.first_choice) == ("tiny", "salt", 2)


def test_a_long_conversation_is_refused_and_not_shortened():
    assert not read(messages=[USER]).truncates


@pytest.mark.parametrize("body", [{}, {"messages": [USER], "prompt": "Hello"}])
def test_there_are_either_messages_or_a_text(body):
    with pytest.raises(RequestError, match="give one of messages, prompt and ids"):
        read(**body)
