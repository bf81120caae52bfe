"""The match that ends first, and no character held back without need."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from deepinfer.engine.stop_strings import StopMatcher, StopStrings

WORDS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, int] | None:
    """By trying all: smallest end, then the longest."""
    found = [(end, -len(s)) for end in range(1, len(text) + 1) for s in stops if text[:end].endswith(s)]
    return (min(found)[0] + min(found)[1], min(found)[0]) if found else None


def longest_prefix_at_the_end(text: str, stops: list[str]) -> int:
    return max((n for s in stops for n in range(len(s)) if text.endswith(s[:n])), default=0)


@given(text=st.text("abc", max_size=20), stops=WORDS, cuts=st.lists(st.integers(0, 20), max_size=5))
def test_the_match_equals_a_search_by_hand_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    edges = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    found = None
    for a, b in pairwise(edges):
        found = matcher.feed(text[a:b])
        if found is not None:
            break
        assert matcher.held == longest_prefix_at_the_end(text[:b], stops)
    assert (found and (found.start, found.end)) == first_match(text, stops)
    if found is not None:
        assert text[found.start : found.end] == found.stop


def test_passed_over_matches_do_not_hide_a_later_one() -> None:
    matcher = StopMatcher(StopStrings(["ab"]))
    assert matcher.feed("xab", ignore=True) is None
    assert matcher.held == 0
    found = matcher.feed("ab")
    assert found is not None and (found.start, found.end) == (3, 5)


def test_a_longer_stop_goes_on_after_a_shorter_one_was_passed_over() -> None:
    matcher = StopMatcher(StopStrings(["ab", "abab"]))
    assert matcher.feed("ab", ignore=True) is None
    assert matcher.held == 2
    found = matcher.feed("ab")
    assert found is not None and found.stop == "abab"
