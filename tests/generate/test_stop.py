"""Stop strings: found wherever the text is cut, and never let out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bough.generate.stop import StopFinder


def feed(stops: list[str], *pieces: str) -> tuple[list[str], str | None]:
    """What each piece let out, then the flush; and the stop string that was found."""
    finder = StopFinder(stops)
    emitted = [*(finder.add(piece) for piece in pieces), finder.flush()]
    return emitted, finder.found


def search(stops: list[str], text: str) -> tuple[str, str | None]:
    """By brute force: the text before the first match, and the longest match there."""
    for start in range(len(text)):
        matches = [stop for stop in stops if text.startswith(stop, start)]
        if matches:
            return text[:start], max(matches, key=len)
    return text, None


def test_a_stop_string_inside_a_piece_ends_the_text_before_it():
    assert feed(["\nUser:"], "Hello.\nUser: What") == (["Hello.", ""], "\nUser:")


def test_a_stop_string_across_three_pieces_is_found():
    assert feed(["<end>"], "Hi <", "en", "d> more", "and more") == (["Hi ", "", "", "", ""], "<end>")


def test_a_stop_string_at_the_very_end_is_found():
    assert feed(["stop"], "please stop") == (["please ", ""], "stop")


def test_text_that_almost_matches_is_let_out_as_soon_as_it_cannot_match():
    assert feed(["<end>"], "a <en", "g> b") == (["a ", "<eng> b", ""], None)


def test_text_that_almost_matches_at_the_end_is_let_out_by_the_flush():
    assert feed(["<end>"], "a <end") == (["a ", "<end"], None)


def test_without_stop_strings_all_text_passes_at_once():
    assert feed([], "abc", "def") == (["abc", "def", ""], None)


def test_a_match_that_starts_earlier_wins_over_one_that_ends_earlier():
    assert feed(["bc", "abcd"], "xabc", "d") == (["x", "", ""], "abcd")
    assert feed(["bc", "abcd"], "xabc", "e") == (["x", "a", ""], "bc")


def test_of_matches_that_start_together_the_longest_wins():
    assert feed(["ab", "abc"], "xab", "c") == (["x", "", ""], "abc")
    assert feed(["ab", "abc"], "xab", "d") == (["x", "", ""], "ab")


def test_a_complete_stop_string_that_waits_for_a_longer_one_is_found_by_the_flush():
    assert feed(["ab", "abc"], "xab") == (["x", ""], "ab")
    assert feed(["bc", "abcd"], "xabc") == (["x", "a"], "bc")


def test_a_stop_string_is_found_as_soon_as_no_other_could_win():
    finder = StopFinder(["stop", "stoppage"])
    finder.add("stop")
    assert finder.found is None
    finder.add("!")
    assert finder.found == "stop"


def test_a_stop_string_that_repeats_itself_is_found_where_it_first_starts():
    assert feed(["aab"], "a", "a", "a", "b") == (["", "", "a", "", ""], "aab")


STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
PIECES = st.lists(st.text("abc", max_size=6), max_size=10)


@given(STOPS, PIECES)
def test_any_pieces_give_what_a_search_of_the_whole_text_gives(stops: list[str], pieces: list[str]):
    emitted, found = feed(stops, *pieces)

    assert ("".join(emitted), found) == search(stops, "".join(pieces))


@given(STOPS, PIECES)
def test_nothing_is_held_back_that_cannot_become_a_stop_string(stops: list[str], pieces: list[str]):
    finder = StopFinder(stops)
    emitted = "".join(map(finder.add, pieces))
    held = "".join(pieces).removeprefix(emitted)

    if finder.found is None and held:
        assert any(stop.startswith(held) or held.startswith(stop) for stop in stops)
        assert len(held) < max(map(len, stops))


class Counted(str):
    """A text that counts how often one of its characters was looked at."""

    num_looks = 0

    def __getitem__(self, at):
        self.num_looks += 1
        return super().__getitem__(at)


def test_long_stop_strings_cost_no_more_than_the_text():
    stop = Counted("a" * 20_000 + "b")
    finder = StopFinder([stop])

    emitted = sum(len(finder.add("aaaa")) for _ in range(25_000))

    assert emitted == 100_000 - 20_000
    assert 100_000 <= stop.num_looks <= 5 * (100_000 + 20_000)
