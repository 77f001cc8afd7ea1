"""The memo of renderings: keys that tell chats apart, hashes of beginnings, and a bound."""

from __future__ import annotations

from bough.models.chat.memo import Digests, RenderMemo, prefix_keys


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
