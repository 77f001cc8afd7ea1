"""The forest: one trie for each salt, and the holds of busy lanes."""

from __future__ import annotations

import subprocess
import sys

from bough.cache.tree.forest import Forest
from bough.cache.tree.trie import NoMemory


class SaltNames:
    """Accounts without memory, in which a salt's root id is its name in bytes."""

    def open_account(self) -> NoMemory:
        return NoMemory()

    def root_id(self, salt: str) -> bytes:
        return b"id of " + salt.encode()


def make_forest() -> Forest[NoMemory]:
    return Forest(SaltNames(), page_tokens=4)


def test_a_salt_has_one_trie_and_looking_makes_none() -> None:
    forest = make_forest()

    assert forest.find("a").root.is_leaf and forest.tries == {}
    assert forest.open("a") is forest.open("a") is forest.find("a")
    assert forest.open("b") is not forest.open("a")


def test_a_trie_from_disk_is_found_by_its_salt_without_that_being_told() -> None:
    forest = make_forest()
    trie = forest.make(b"id of a")
    trie.append(trie.root, [1, 2])

    forest.add(trie)

    assert "a" not in forest.tries and forest.find("a") is trie
    assert forest.open("a") is trie and list(forest.tries) == ["a"]


def test_the_trie_of_the_empty_salt_is_known_from_the_start() -> None:
    forest = make_forest()
    trie = forest.make(b"id of ")
    trie.append(trie.root, [1])

    forest.add(trie)
    forest.add(forest.make(b"id of b"))  # it holds nothing

    assert forest.tries == {"": trie}


def test_a_trie_goes_when_it_is_empty_and_no_lane_stands_in_it() -> None:
    forest = make_forest()
    trie = forest.open("a")
    hold = forest.add_hold(trie)

    assert not forest.remove_if_empty(trie)
    forest.remove_hold(hold)
    assert forest.remove_if_empty(trie) and forest.tries == {}


def test_rows_below_a_pin_are_held_on_its_whole_path() -> None:
    forest = make_forest()
    trie = forest.open("a")
    head = trie.append(trie.root, [1, 2, 3])
    tail, beside = trie.append(head, [4, 5, 6]), trie.append(head, [7])
    hold = forest.add_hold(trie)
    hold.move(tail, 5)
    forest.check()

    assert (forest.held_to(head), forest.held_to(tail), forest.held_to(beside)) == (3, 5, 3)
    assert forest.held_nodes(trie) == forest.held_nodes() == {head: 3, tail: 5}
    assert forest.held_nodes(forest.open("b")) == {}


def test_the_tree_can_be_imported_without_the_disk() -> None:
    code = "import sys, bough.cache.tree.forest, bough.cache.tree.plan; print('sqlite3' in sys.modules)"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "False"
