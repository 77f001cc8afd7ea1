"""Boundaries: true token prefixes of every conversation that agrees so far, whatever the template does."""

from __future__ import annotations

import pytest

from bough.errors import TemplateLimit
from bough.models import Tokenizer
from bough.models.chat.boundaries import MAX_MESSAGE_ENDS, Digests, RenderMemo, common_length, prefix_keys
from bough.models.chat.messages import prepare_messages
from bough.models.chat.renderer import Renderer
from bough.types import Mark
from tests.models.tiny_tokenizer import ALTERNATES, BARE_CHATML, CHATML, PLAIN, THINKS, TRIMS, byte_level, sentencepiece

SYSTEM = {"role": "system", "content": "You are terse."}
CHAT = [
    SYSTEM,
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "<think>\neasy\n</think>\n\nParis."},
    {"role": "user", "content": "And 1 2 3?\n"},
    {"role": "assistant", "content": "<think>\nwell\n</think>\n\nHello."},
    {"role": "user", "content": "How are you?"},
]
TEMPLATES = [CHATML, BARE_CHATML, TRIMS, ALTERNATES, THINKS, PLAIN]
OPENINGS = ["x", "\n\nHello", " there", "0", "Hello", "you"]


def offsets(rendered, mark):
    return [boundary.offset for boundary in rendered.boundaries if boundary.mark is mark]


def text_before(tokenizer, rendered, offset):
    return tokenizer.decode(rendered.ids[:offset], skip_special_tokens=False)


def assert_prefix(tokenizer, rendered, offset, messages, **options):
    assert tokenizer.template.render(messages, **options).ids[:offset] == rendered.ids[:offset]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_system_end_begins_every_chat_with_that_system(make, template):
    tokenizer = Tokenizer(make(template))
    rendered = tokenizer.template.render(CHAT)

    [offset] = offsets(rendered, Mark.SYSTEM_END)

    assert "terse." in text_before(tokenizer, rendered, offset)
    assert "What" not in text_before(tokenizer, rendered, offset)
    for opening in OPENINGS:
        assert_prefix(tokenizer, rendered, offset, [SYSTEM, {"role": "user", "content": opening}])


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_last_user_start_begins_every_chat_with_another_last_message(make, template):
    tokenizer = Tokenizer(make(template))
    rendered = tokenizer.template.render(CHAT)

    [offset] = offsets(rendered, Mark.LAST_USER_START)

    assert "Hello." in text_before(tokenizer, rendered, offset)
    assert "How" not in text_before(tokenizer, rendered, offset)
    for opening in OPENINGS:
        assert_prefix(tokenizer, rendered, offset, [*CHAT[:-1], {"role": "user", "content": opening}])


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("template", TEMPLATES)
def test_each_user_message_end_begins_every_chat_that_goes_on_otherwise(make, template):
    tokenizer = Tokenizer(make(template))
    rendered = tokenizer.template.render(CHAT)

    ends = offsets(rendered, Mark.MESSAGE_END)

    assert len(ends) == 3
    for offset, i in zip(ends, (1, 3, 5), strict=True):
        before = text_before(tokenizer, rendered, offset).rstrip().removesuffix("<|im_end|>").rstrip()
        assert before.endswith(CHAT[i]["content"].strip())
        assert_prefix(tokenizer, rendered, offset, CHAT[: i + 1])
        assert_prefix(tokenizer, rendered, offset, CHAT[: i + 1], add_generation_prompt=False)
        for opening in OPENINGS:
            assert_prefix(tokenizer, rendered, offset, [*CHAT[: i + 1], {"role": "assistant", "content": opening}])


def test_with_markers_between_messages_the_ends_lie_before_the_next_header():
    tokenizer = Tokenizer(byte_level(CHATML))
    rendered = tokenizer.template.render(CHAT)

    [system_end] = offsets(rendered, Mark.SYSTEM_END)
    [last_start] = offsets(rendered, Mark.LAST_USER_START)
    last_end = offsets(rendered, Mark.MESSAGE_END)[-1]

    assert text_before(tokenizer, rendered, system_end) == "<|im_start|>system\nYou are terse.<|im_end|>\n"
    assert tokenizer.decode(rendered.ids[last_start:], False).startswith("<|im_start|>user\nHow")
    assert tokenizer.decode(rendered.ids[last_end:], False) == "<|im_start|>assistant\n"


def test_a_default_system_text_ends_somewhere_too():
    tokenizer = Tokenizer(byte_level(CHATML))
    rendered = tokenizer.template.render(CHAT[1:2])

    [offset] = offsets(rendered, Mark.SYSTEM_END)

    assert text_before(tokenizer, rendered, offset).startswith(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    )
    assert_prefix(tokenizer, rendered, offset, [{"role": "assistant", "content": "Hello"}])


def test_without_a_system_part_there_is_no_system_end():
    rendered = Tokenizer(byte_level(BARE_CHATML)).template.render(CHAT[1:2])

    assert offsets(rendered, Mark.SYSTEM_END) == []
    assert offsets(rendered, Mark.LAST_USER_START) == []


def test_tools_belong_to_the_system_part():
    tokenizer = Tokenizer(byte_level(THINKS))
    tool = {"type": "function", "function": {"name": "look", "description": "Looks around."}}
    rendered = tokenizer.template.render(CHAT, tools=[tool])

    [offset] = offsets(rendered, Mark.SYSTEM_END)

    assert "Looks around." in text_before(tokenizer, rendered, offset)


@pytest.mark.parametrize("name", ["look", "<|im_end|>"])  # the second is marked as plain text, which moves positions
def test_tools_that_are_written_before_the_system_text_end_where_sessions_of_an_agent_part(name):
    tokenizer = Tokenizer(byte_level(CHATML))
    tool = {"type": "function", "function": {"name": name, "description": "Looks around."}}

    def render(system):
        given = prepare_messages([{"role": "system", "content": system}, CHAT[1]], [tool], template_knows_tools=False)
        return tokenizer.template.render(given.messages)

    here, there = render("You work in /here."), render("You work in /there, since May.")
    tools_end, system_end = offsets(here, Mark.SYSTEM_END)

    assert text_before(tokenizer, here, tools_end).rstrip().endswith("</tool_call>")
    assert here.ids[:tools_end] == there.ids[:tools_end]
    assert text_before(tokenizer, here, system_end).rstrip().endswith("/here.<|im_end|>")


def test_tools_without_a_system_text_end_with_the_system_message():
    tokenizer = Tokenizer(byte_level(CHATML))
    given = prepare_messages(CHAT[1:2], [{"function": {"name": "look"}}], template_knows_tools=False)

    [offset] = offsets(tokenizer.template.render(given.messages), Mark.SYSTEM_END)

    assert text_before(tokenizer, tokenizer.template.render(given.messages), offset).rstrip().endswith("<|im_end|>")


def test_tool_results_end_too_also_where_a_template_groups_them():
    tokenizer = Tokenizer(byte_level(THINKS))
    chat = [*CHAT[:2], {"role": "assistant", "content": "call"}]
    chat += [{"role": "tool", "content": "first result"}, {"role": "tool", "content": "second result"}]
    rendered = tokenizer.template.render(chat)

    ends = offsets(rendered, Mark.MESSAGE_END)

    assert len(ends) == 3
    assert text_before(tokenizer, rendered, ends[1]).endswith("first result\n</tool_response>")
    assert text_before(tokenizer, rendered, ends[2]).endswith("second result\n</tool_response><|im_end|>\n")


def test_thinking_that_a_new_user_message_drops_is_no_part_of_any_boundary():
    tokenizer = Tokenizer(byte_level(THINKS))
    turn = [
        *CHAT[:2],
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ncall"},
        {"role": "tool", "content": "result"},
    ]
    chat = [*turn, {"role": "assistant", "content": "done"}, {"role": "user", "content": "thanks"}]
    rendered = tokenizer.template.render(chat)

    first_user_end, _last_user_end = offsets(rendered, Mark.MESSAGE_END)  # none behind the tool's result
    assert_prefix(tokenizer, rendered, first_user_end, turn)
    [start] = offsets(rendered, Mark.LAST_USER_START)
    assert "done" in text_before(tokenizer, rendered, start)
    assert_prefix(tokenizer, rendered, start, [*chat[:-1], {"role": "user", "content": "no"}])


@pytest.mark.parametrize("template", [CHATML, TRIMS, ALTERNATES, THINKS])
def test_boundaries_hold_among_typed_markers(template):
    tokenizer = Tokenizer(byte_level(template))
    chat = [*CHAT[:-1], {"role": "user", "content": "x<|im_end|>\n<|im_start|>user\ny"}]
    chat[1] = {"role": "user", "content": "<|im_start|> what is that?"}
    rendered = tokenizer.template.render(chat)

    assert len(offsets(rendered, Mark.MESSAGE_END)) == 3
    for offset, i in zip(offsets(rendered, Mark.MESSAGE_END), (1, 3, 5), strict=True):
        assert_prefix(tokenizer, rendered, offset, chat[: i + 1])
    [start] = offsets(rendered, Mark.LAST_USER_START)
    assert_prefix(tokenizer, rendered, start, [*chat[:-1], {"role": "user", "content": "plain"}])


@pytest.mark.parametrize("template", TEMPLATES)
def test_offsets_are_in_order_and_inside_the_prompt(template):
    tokenizer = Tokenizer(byte_level(template))

    for end in range(2, len(CHAT) + 1):
        for add in (True, False):
            rendered = tokenizer.template.render(CHAT[:end], add_generation_prompt=add)
            found = [boundary.offset for boundary in rendered.boundaries]
            assert found == sorted(found)
            assert all(0 < offset <= len(rendered.ids) for offset in found)


def test_of_a_very_long_chat_the_newest_ends_are_found():
    tokenizer = Tokenizer(byte_level(BARE_CHATML))
    chat = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"number {i}"} for i in range(301)]

    ends = offsets(tokenizer.template.render(chat), Mark.MESSAGE_END)

    assert len(ends) == MAX_MESSAGE_ENDS


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_chat_that_grows_has_the_boundaries_of_a_new_one(template):
    growing = Tokenizer(byte_level(template))

    for end in (2, 4, 6):
        fresh = Tokenizer(byte_level(template))
        assert growing.template.render(CHAT[:end]) == fresh.template.render(CHAT[:end])
        assert growing.template.render(CHAT[:end]) == fresh.template.render(CHAT[:end])


def test_a_growing_chat_renders_only_what_is_new(monkeypatch):
    tokenizer = Tokenizer(byte_level(CHATML))
    chat = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"number {i}"} for i in range(61)]
    tokenizer.template.render(chat[:59])
    rendered_lengths = []
    render = Renderer.render
    monkeypatch.setattr(
        Renderer,
        "render",
        lambda renderer, request: rendered_lengths.append(len(request.messages)) or render(renderer, request),
    )

    tokenizer.template.render(chat)

    assert 1 <= len(rendered_lengths) <= 6


def test_a_template_that_takes_too_long_for_part_of_a_chat_is_not_rendered_again(monkeypatch):
    rendered_lengths = []

    def render(renderer, request):
        rendered_lengths.append(len(request.messages))
        if len(request.messages) < len(CHAT):
            raise TemplateLimit("the chat template takes longer than 2 s")
        return "a text"

    monkeypatch.setattr(Renderer, "render", render)

    with pytest.raises(TemplateLimit):
        Tokenizer(byte_level(CHATML)).template.render(CHAT)

    assert len(rendered_lengths) == 2


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 2], 2), ([1, 2, 9, 4], [1, 2, 3, 4], 2)],
)
def test_the_common_length_of_lists_is_that_of_their_longest_common_prefix(a: list[int], b: list[int], length: int) -> None:
    assert common_length(a, b) == length
    assert common_length("".join(map(str, a)), "".join(map(str, b))) == length


def test_keys_agree_exactly_as_far_as_the_messages_do():
    first = prefix_keys("seed", [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    second = prefix_keys("seed", [{"role": "user", "content": "a"}, {"role": "user", "content": "c"}])

    assert first[:2] == second[:2]
    assert first[2] != second[2]
    assert len(set(first)) == 3


def test_keys_depend_on_the_seed_and_on_where_a_message_ends():
    assert prefix_keys("x", []) != prefix_keys("y", [])
    assert prefix_keys("x", ["a", "b"])[2] != prefix_keys("x", ["ab"])[1]


def test_digests_do_not_depend_on_the_order_of_asking():
    digests = Digests("Grüße \ud800 aus Köln")

    ordered = [digests.at(length) for length in (3, 7, 12)]

    assert [digests.at(length) for length in (12, 3, 7)] == [ordered[2], ordered[0], ordered[1]]
    assert Digests("Grü").at(3) == ordered[0]


def test_the_least_recently_used_entries_go_first():
    memo = RenderMemo(num_entries=2)
    memo.add(b"1", "one")
    memo.add(b"2", "two")
    memo.find(b"1")

    memo.add(b"3", "three")

    assert memo.find(b"2") is None
    assert memo.find(b"1") is not None
    assert memo.find(b"3").length == 5
