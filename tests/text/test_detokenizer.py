"""Text that arrives in pieces is the text that would have arrived at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import text_kit
from deepinfer.engine.detokenizer import REPLACEMENT, Detokenizer
from deepinfer.engine.tokenizer import Tokenizer

VOCABULARIES = {"byte-level": text_kit.byte_level, "byte-fallback": text_kit.byte_fallback}
SCRIPTS = st.sampled_from("abc .,the stop안녕하세요日本語ПриветñéàÿĀǝאب\u0e01\u0301😀👩‍🚀𓀀\U0010ffff\n\t\x00\x7f\u2581 ")
TEXTS = st.lists(st.one_of(SCRIPTS, st.characters(codec="utf-8")), max_size=40).map("".join)
CUTS = st.lists(st.integers(0, 200), max_size=12)


def pieces_of(tokenizer: Tokenizer, ids: list[int], cuts: list[int], **options: bool) -> list[str]:
    d = Detokenizer(tokenizer.table, **options)
    edges = [0, *sorted(c for c in cuts if c < len(ids)), len(ids)]
    return [*(d.feed(ids[a:b]) for a, b in pairwise(edges)), d.flush()]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@settings(max_examples=300, deadline=None)
@given(text=TEXTS, cuts=CUTS)
def test_streamed_pieces_of_multibyte_text_join_to_the_one_shot_decode(vocabulary: str, text: str, cuts: list[int]) -> None:
    tokenizer = VOCABULARIES[vocabulary]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids, cuts)
    assert "".join(pieces) == tokenizer.backend.decode(ids, skip_special_tokens=True)
    if REPLACEMENT not in text and vocabulary == "byte-level":
        assert not any(REPLACEMENT in piece for piece in pieces)
        assert "".join(pieces) == text


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 700), max_size=40), cuts=CUTS, skip=st.booleans())
def test_any_ids_of_a_byte_level_vocabulary_join_to_the_one_shot_decode(ids: list[int], cuts: list[int], skip: bool) -> None:
    tokenizer = text_kit.byte_level()
    assert "".join(pieces_of(tokenizer, ids, cuts, skip_special_tokens=skip)) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 320), max_size=40), cuts=CUTS)
def test_any_ids_of_a_byte_fallback_vocabulary_do_not_depend_on_the_cuts(ids: list[int], cuts: list[int]) -> None:
    tokenizer = text_kit.byte_fallback()
    joined = "".join(pieces_of(tokenizer, ids, cuts))
    assert joined == tokenizer.decode(ids)
    whole = tokenizer.backend.decode(ids, skip_special_tokens=True)
    if REPLACEMENT not in whole:  # else the library marks all bytes of a run, and a stream has given its whole characters out
        assert joined == whole


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 40), max_size=20), cuts=CUTS, skip=st.booleans())
def test_any_ids_of_a_word_mark_vocabulary_join_to_the_one_shot_decode(ids: list[int], cuts: list[int], skip: bool) -> None:
    tokenizer = text_kit.unigram()
    assert "".join(pieces_of(tokenizer, ids, cuts, skip_special_tokens=skip)) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 9), max_size=12), cuts=CUTS, skip=st.booleans())
def test_a_vocabulary_that_puts_spaces_between_tokens_joins_to_the_one_shot_decode(ids: list[int], cuts: list[int], skip: bool) -> None:
    tokenizer = text_kit.word_pieces()
    assert tokenizer.table.scheme is None
    assert "".join(pieces_of(tokenizer, ids, cuts, skip_special_tokens=skip)) == tokenizer.backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("character", ["é", "한", "😀", "𓀀"])
def test_a_character_split_over_tokens_is_never_emitted_half(character: str) -> None:
    ids = text_kit.spelled(character)
    d = Detokenizer(text_kit.byte_level().table)
    assert [d.feed([i]) for i in ids] == [""] * (len(ids) - 1) + [character]
    assert d.flush() == ""


def test_korean_through_byte_tokens_comes_out_whole() -> None:
    tokenizer = text_kit.byte_fallback()
    ids = [tokenizer.backend.token_to_id(f"<0x{b:02X}>") for b in "세계".encode()]
    d = Detokenizer(tokenizer.table)
    assert [d.feed([i]) for i in ids] == ["", "", "세", "", "", "계"]


def test_an_unfinished_character_shows_at_the_flush() -> None:
    d = Detokenizer(text_kit.byte_level().table)
    assert d.feed(text_kit.spelled("a😀")[:-1]) == "a"
    assert d.flush() == REPLACEMENT


def test_the_space_at_the_start_is_dropped_only_where_nothing_stands_before() -> None:
    tokenizer = text_kit.byte_fallback()
    ids = tokenizer.encode("the quick", add_special_tokens=False)
    assert Detokenizer(tokenizer.table).feed(ids) == "the quick"
    assert Detokenizer(tokenizer.table, prompt_ids=[1]).feed(ids) == "the quick"  # a special token is no text
    assert Detokenizer(tokenizer.table, prompt_ids=[1, ids[0]]).feed(ids) == " the quick"


def test_special_tokens_are_shown_on_request() -> None:
    tokenizer = text_kit.byte_level()
    ids = [1, *text_kit.spelled("hi"), 2]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    tokenizer = text_kit.word_pieces()
    ids = [3, 2, 2, 4]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello [SEP] [SEP] world"
    assert tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False) == "hello [SEP][SEP] world"


def test_ids_without_a_token_add_nothing() -> None:
    tokenizer = text_kit.byte_level()
    assert tokenizer.decode([*text_kit.spelled("a"), 10_000, *text_kit.spelled("b")]) == "ab"
