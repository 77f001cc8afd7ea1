"""The tree as people see it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from bough.cache.admin.stats import salt_stats, stats
from bough.cache.admin.view import RECENT_S, Viewer, look_up, take_records, view_tree
from bough.cache.steps import run_at_once
from bough.cache.tree.state import Tier
from bough.tokens import pack
from tests.fake_disk import FakeDisk
from tests.fakes import MODELS
from tests.scenarios.world import World


class Decoder:
    """Writes ids as numbers, and counts the tokens that it was given."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def __call__(self, ids: Sequence[int]) -> str:
        self.num_tokens += len(ids)
        return " ".join(map(str, ids))


def test_taking_a_view_decodes_nothing_and_reading_it_does() -> None:
    world, decoder = World(MODELS["full"], 2), Decoder()
    world.run([1, 2, 3, 4])

    tree = view_tree(world.cache, world.cache.clock.now(), decoder)
    taken = decoder.num_tokens
    (node,) = tree.as_dict()[""]

    assert taken == 0
    assert (node["text"], node["token_ids"], node["children"]) == ("1 2 3 4", (1, 2, 3, 4), [])
    assert "token_ids" not in tree.as_dict(has_ids=False)[""][0]


def test_a_view_stays_as_it_was_when_the_tree_goes_on() -> None:
    world = World(MODELS["full"], 2)
    world.run([1, 2, 3, 4])

    tree = view_tree(world.cache, world.cache.clock.now(), Decoder())
    world.run([1, 2, 7, 8])
    world.cache.upkeep.clear()

    assert [node.text for node in tree.nodes] == ["1 2 3 4"]


def count_steps(world: World) -> int:
    """How many nodes have to be recorded for a view now."""
    return sum(1 for _ in take_records(world.cache, world.cache.clock.now))


def test_a_view_costs_what_has_changed_since_the_last_one() -> None:
    world = World(MODELS["full"], 2)
    for first in range(50):
        world.run([first, 2, 3, 4])
    assert count_steps(world) <= 50  # the checks of this world have recorded some

    world.run([7, 2, 3, 4, 5])
    world.run([60, 1])

    assert count_steps(world) <= 3
    assert count_steps(world) == 0


def test_a_view_is_of_the_moment_at_which_it_is_finished() -> None:
    world = World(MODELS["full"], 2)
    world.run([1, 2, 3, 4])
    world.run([1, 2, 7, 8])
    trie = world.cache.forest.find("")
    for node in trie.walk():
        trie.memory.note(node)

    steps = take_records(world.cache, world.cache.clock.now)
    next(steps)
    world.cache.upkeep.clear()
    world.run([5, 6])
    view = Viewer(Decoder()).view(run_at_once(lambda: steps))

    assert [node.text for node in view.nodes] == ["5 6"]


def test_json_is_what_the_plain_data_is_and_siblings_are_in_the_order_of_their_coming() -> None:
    world = World(MODELS["full+recurrent"], 2)
    for prompt in ([1, 2, 3, 4, 5, 6], [1, 2, 9, 9], [8, 8], [1, 2, 3, 4, 7], [3, 3]):
        world.run(prompt, salt="a salt")
    world.run([4, 4])
    tree = view_tree(world.cache, world.cache.clock.now(), Decoder())

    for has_ids in (False, True):
        plain = json.loads(json.dumps(tree.as_dict(has_ids=has_ids)))
        assert json.loads(tree.to_json(has_ids=has_ids)) == plain
    starts = [node.token_ids[0] for node in tree.roots["a salt"]]
    assert starts == [node.first_token for node in world.cache.forest.find("a salt").root.children.values()] == [1, 8, 3]


def test_looking_again_decodes_only_what_has_changed() -> None:
    world, decoder = World(MODELS["full"], 2), Decoder()
    viewer = Viewer(decoder)
    for first in range(20):
        world.run([first, 2, 3, 4])

    def look() -> int:
        before = decoder.num_tokens
        viewer.view(run_at_once(lambda: take_records(world.cache, world.cache.clock.now))).to_json(has_ids=False)
        return decoder.num_tokens - before

    assert look() == 80
    world.run([30, 31])
    assert look() == 2


def test_the_json_of_a_root_that_has_not_changed_is_used_again_for_a_moment() -> None:
    world, viewer = World(MODELS["full"], 2), Viewer(Decoder())
    world.run([1, 2, 3], salt="still")

    def look(now: float) -> dict[str, list[dict[str, Any]]]:
        found = run_at_once(lambda: take_records(world.cache, lambda: now))
        return json.loads(viewer.view(found).to_json())  # type: ignore[no-any-return]

    now = world.cache.clock.now() + 100
    first = look(now)
    world.run([4, 5], salt="other")
    soon, later = look(now + RECENT_S / 2), look(now + 2 * RECENT_S)
    assert soon["still"] == first["still"] and "other" not in first and soon["other"]
    assert later["still"][0]["idle_s"] > first["still"][0]["idle_s"]
    world.run([1, 2, 3, 4], salt="still")
    assert look(now + 2 * RECENT_S)["still"] != later["still"]


def test_a_view_of_a_very_deep_tree_can_be_written_as_json() -> None:
    world = World(MODELS["full"], 2)
    trie = world.cache.forest.open("")
    node = trie.root
    for token in range(5000):
        node = trie.append(node, [token])

    text = view_tree(world.cache, 0.0, Decoder()).to_json()

    assert text.count('"children":[') == 5000 and text.endswith(5001 * "]}")


def test_a_view_shows_where_content_lies_after_it_was_loaded_into_an_inner_node() -> None:
    disk = FakeDisk(2)
    world = World(MODELS["full"], 2, disk=disk)
    for prompt in ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8]):
        world.run(prompt)
    world.cache.upkeep.flush()
    again = World(MODELS["full"], 2, disk=disk.restarted())
    count_steps(again)

    session = again.begin([1, 2, 3, 4, 5, 6, 9])

    tree = view_tree(again.cache, again.cache.clock.now(), Decoder())
    assert {node.text: node.tiers for node in tree.nodes} == {
        "1 2 3 4": {"device": 2},
        "5 6": {"device": 1},
        "7 8": {"disk": 1},
    }
    again.close(session)


def test_a_view_shows_that_a_request_has_come_to_a_node_that_was_known() -> None:
    world = World(MODELS["full"], 2)
    for prompt in ([1, 2, 3, 4], [1, 2, 7, 8]):
        world.run(prompt)
    session = world.begin([1, 2, 7])

    world.prefill(session)

    tree = view_tree(world.cache, world.cache.clock.now(), Decoder())
    assert [node.text for node in tree.nodes if node.is_in_use] == ["7 8"]
    world.close(session)


def test_figures_walk_neither_nodes_nor_tries() -> None:
    world = World(MODELS["full+recurrent"], 2)
    for salt in ("", "mine"):
        world.run([1, 2, 3, 4, 5, 6], salt=salt)
        world.run([1, 2, 3, 9], salt=salt)
    nodes = view_tree(world.cache, world.cache.clock.now(), Decoder()).roots["mine"]
    trie = world.cache.forest.find("mine")

    class Unwalkable(dict[str, object]):
        def __iter__(self) -> object:  # type: ignore[override]
            raise AssertionError("all tries were looked at")

        values = items = keys = __iter__  # type: ignore[assignment]

    world.cache.forest.tries = Unwalkable(world.cache.forest.tries)  # type: ignore[assignment]
    trie.root.children.clear()  # whoever walks the nodes finds none

    whole, part = stats(world.cache.forest, world.cache.residency), salt_stats(world.cache.forest, "mine")
    assert whole["nodes"] == 2 * part["nodes"] > 0 and whole["tokens"] == 2 * part["tokens"] > 0
    assert part["tree_bytes"] == trie.memory.num_bytes[Tier.DEVICE] > 0
    assert nodes and part["restore_points"] > 0


def test_an_explanation_shows_a_few_of_many_branches() -> None:
    world, decoder, prompt = World(MODELS["full"], 2), Decoder(), pack([1, 2, 63])
    for token in range(60):
        world.run([1, 2, token])

    found = look_up(world.cache, prompt, "").explain(prompt, decoder)

    assert found.matched_tokens == 2
    assert len(found.tree_goes_on) == 16
    assert decoder.num_tokens < 60


def test_what_was_found_of_a_prompt_is_plain_and_is_put_into_words_later() -> None:
    world, decoder = World(MODELS["full"], 2), Decoder()
    world.run([1, 2, 3, 4])
    prompt = pack([1, 2, 9])

    found = look_up(world.cache, prompt, "")
    world.cache.upkeep.clear()

    assert decoder.num_tokens == 0
    assert found.explain(prompt, decoder).tree_goes_on == ("3 4",)
    assert found.explain(prompt, decoder).prompt_goes_on == "9"


@pytest.mark.parametrize("prompt", [[1, 2, 3, 9], [1, 2, 3], [1, 2, 3, 4, 5]])
def test_a_prompt_is_kept_only_if_all_of_it_is_what_was_kept(prompt: list[int]) -> None:
    world = World(MODELS["full"], 2)
    world.run([1, 2, 3, 4], keep=True)

    assert world.cache.is_kept([1, 2, 3, 4]) and look_up(world.cache, pack([1, 2, 3, 4]), "").is_kept
    assert not world.cache.is_kept(prompt)
    assert not look_up(world.cache, pack(prompt), "").is_kept
