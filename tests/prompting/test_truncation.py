"""Which messages of a chat that is too long are left out: here a token is a word."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from bough.prompting import truncation
from bough.prompting.truncation import STRIDE
from bough.types import Message

LIMIT = 100


def count(messages: Sequence[Message]) -> int:
    return sum(len(message["content"].split()) for message in messages)


class Words:
    """Measures in words, and notes how many it has counted."""

    num_counted = 0

    def estimate(self, message: Message) -> int:
        return count([message])

    def count(self, messages: Sequence[Message]) -> int:
        self.num_counted += count(messages)
        return count(messages)

    def cut(self, text: str, num_tokens: int, at_most: int) -> str:
        return " ".join(text.split()[num_tokens:][-at_most:])


def shorten(messages: Sequence[Message], limit: int, measure: Words | None = None) -> list[Message]:
    return truncation.shorten(messages, limit, measure or Words())


def turn(number: int, role: str = "user") -> Message:
    return {"role": role, "content": " ".join([f"{role}{number}"] * 5)}


def chat(turns: int) -> list[Message]:
    """A system message, then so many questions with answers, then a question."""
    said = [turn(number, role) for number in range(turns) for role in ("user", "assistant")]
    return [{"role": "system", "content": "be brief"}, *said, turn(turns)]


def test_a_chat_that_fits_stays_as_it_is() -> None:
    assert shorten(chat(3), LIMIT) == chat(3)


def test_the_oldest_turns_go_the_system_message_and_the_question_stay() -> None:
    kept = shorten(chat(30), LIMIT)

    assert count(kept) <= LIMIT
    assert kept[0] == chat(30)[0] and kept[-1] == turn(30)
    assert kept[1]["role"] == "user", "a chat goes on with a question, not with an answer to one that is gone"
    assert kept[1:] == chat(30)[-len(kept) + 1 :]


def test_a_growing_chat_keeps_its_beginning_for_many_turns() -> None:
    beginnings = [shorten(chat(turns), LIMIT)[1]["content"] for turns in range(10, 60)]

    changes = sum(one != other for one, other in itertools.pairwise(beginnings))
    assert changes <= 50 * 10 // (LIMIT // STRIDE) + 1
    assert changes > 5, "it does move on"


def test_a_question_that_is_too_long_by_itself_loses_its_beginning() -> None:
    long = {"role": "user", "content": " ".join(f"w{number}" for number in range(300))}

    kept = shorten([*chat(3)[:-1], long], LIMIT)

    assert count(kept) <= LIMIT
    assert kept[0]["role"] == "system" and kept[-1]["content"].endswith("w298 w299")


def test_results_of_tools_are_not_left_without_the_question_they_belong_to() -> None:
    messages = [*chat(12)[:-1], turn(12), turn(12, "assistant"), turn(12, "tool")]

    kept = shorten(messages, LIMIT)

    assert [message["role"] for message in kept[-3:]] == ["user", "assistant", "tool"]


def test_system_messages_on_the_way_stay() -> None:
    messages = chat(30)
    messages.insert(5, {"role": "system", "content": "now in French"})

    kept = shorten(messages, LIMIT)

    assert [message["content"] for message in kept[:2]] == ["be brief", "now in French"]


def test_the_work_depends_on_the_context_and_not_on_the_length_of_the_chat() -> None:
    counted = []
    for turns in (100, 10_000):
        measure = Words()
        shorten(chat(turns), LIMIT, measure)
        counted.append(measure.num_counted)

    assert counted[1] < 2 * counted[0] and counted[1] < 10 * LIMIT


def test_what_is_kept_is_the_longest_end_that_begins_with_a_stride() -> None:
    for turns in range(8, 40):
        kept = shorten(chat(turns), LIMIT)
        assert LIMIT - LIMIT // STRIDE - 20 < count(kept) <= LIMIT
