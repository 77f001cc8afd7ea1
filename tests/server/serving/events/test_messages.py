"""Messages found in the tokens of an edge, by the special tokens of chat templates."""

from __future__ import annotations

from array import array

import pytest
from tokenizers import AddedToken

from bough.models.tokenizer import Tokenizer
from bough.server.serving.events.messages import MOST_AT_EACH_END, EdgeMessage, MessageFinder
from tests.models.tiny_tokenizer import byte_level

MARKERS = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    hf = byte_level()
    hf.backend_tokenizer.add_special_tokens([AddedToken(each, special=True) for each in MARKERS])
    return Tokenizer(hf)


def find(tokenizer: Tokenizer, text: str) -> list[EdgeMessage]:
    return MessageFinder(tokenizer).find(array("i", tokenizer.encode(text)).tobytes())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi", [("system", "Be brief."), ("user", "Hi")]),
        ("<|start_header_id|>ipython<|end_header_id|>\n\n4", [("tool", "4")]),
        ("<|user|>What?", [("user", "What?")]),
        ("[INST] What? [/INST] That.", [("user", "What?"), ("assistant", "That.")]),
        ("<|im_start|>user\n<tool_response>\n4", [("tool", "<tool_response>\n4")]),
        ("Yes.<|im_end|>\n<|im_start|>user\nWhy?", [(None, "Yes.\n"), ("user", "Why?")]),
        ("a text of no chat", []),
    ],
)
def test_messages_are_found_by_the_special_tokens_of_templates(
    tokenizer: Tokenizer, text: str, expected: list[tuple[str | None, str]]
) -> None:
    assert [(role, words) for _, role, words in find(tokenizer, text)] == expected


def test_a_message_has_the_offset_of_its_special_token_and_no_role_where_the_edge_ends(tokenizer: Tokenizer) -> None:
    text = "before<|im_start|>user\nHi<|im_end|>\n"
    assert find(tokenizer, text + "<|im_start|>") == [
        (0, None, "before"),
        (len(tokenizer.encode("before")), "user", "Hi"),
        (len(tokenizer.encode(text)), "", ""),
    ]


def test_of_many_messages_the_first_and_the_last_are_listed(tokenizer: Tokenizer) -> None:
    found = find(tokenizer, "".join(f"<|user|>{number}" for number in range(100)))

    expected = [*range(MOST_AT_EACH_END), *range(100 - MOST_AT_EACH_END, 100)]
    assert [words for _, _, words in found] == [str(number) for number in expected]


def test_places_that_are_no_text_are_passed_over(tokenizer: Tokenizer) -> None:
    ids = [-7, *tokenizer.encode("<|user|>What?"), -9]

    assert MessageFinder(tokenizer).find(array("i", ids).tobytes())[1][:2] == (1, "user")
