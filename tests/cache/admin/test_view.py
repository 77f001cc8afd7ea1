"""The tree as people see it."""

from __future__ import annotations

from collections.abc import Sequence

from bough.cache.admin.view import explain, view_tree
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

    tree = view_tree(world.cache.forest, world.cache.clock.now(), decoder)
    taken = decoder.num_tokens
    (node,) = tree.as_dict()[""]

    assert taken == 0
    assert (node["text"], node["token_ids"], node["children"]) == ("1 2 3 4", (1, 2, 3, 4), [])
    assert "token_ids" not in tree.as_dict(has_ids=False)[""][0]


def test_a_view_stays_as_it_was_when_the_tree_goes_on() -> None:
    world = World(MODELS["full"], 2)
    world.run([1, 2, 3, 4])

    tree = view_tree(world.cache.forest, world.cache.clock.now(), Decoder())
    world.run([1, 2, 7, 8])
    world.cache.clear()

    assert [node.text for node in tree.nodes] == ["1 2 3 4"]


def test_an_explanation_shows_a_few_of_many_branches() -> None:
    world, decoder = World(MODELS["full"], 2), Decoder()
    for token in range(60):
        world.run([1, 2, token])

    found = explain(world.cache, [1, 2, 63], "", decoder)

    assert found.matched_tokens == 2
    assert len(found.tree_goes_on) == 16
    assert decoder.num_tokens < 60
