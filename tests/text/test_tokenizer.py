"""Loading tokenizers and encoding with them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import text_kit
from deepinfer.engine.tokenizer import check_token_ids, load_tokenizer
from deepinfer.errors import ConfigError, ModelNotFoundError, TokenOutOfRangeError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory as transformers saves a tokenizer, template included."""
    source = text_kit.byte_level()
    made = PreTrainedTokenizerFast(tokenizer_object=source.backend, bos_token="<|im_start|>", eos_token="<|im_end|>")
    made.chat_template = text_kit.CHATML
    made.save_pretrained(tmp_path)
    return tmp_path


def test_a_directory_gives_the_same_ids_special_tokens_and_template(folder: Path) -> None:
    source, loaded = text_kit.byte_level(), load_tokenizer(str(folder))
    text = "Hello 세계 <|im_start|> <think>"
    assert loaded.encode(text) == source.encode(text)
    assert loaded.decode(loaded.encode(text), skip_special_tokens=False) == text
    assert (loaded.special_id("eos_token"), loaded.special_id("bos_token"), loaded.special_id("pad_token")) == (2, 1, None)
    assert loaded.chat_template == text_kit.CHATML
    assert loaded.vocab_size == source.vocab_size
    assert dict(loaded.control_tokens) == dict(source.control_tokens)


def test_truncation_and_padding_of_a_saved_tokenizer_are_not_applied(folder: Path) -> None:
    made = PreTrainedTokenizerFast.from_pretrained(folder)
    made.backend_tokenizer.enable_truncation(4)
    made.backend_tokenizer.enable_padding(length=50)
    made.save_pretrained(folder)
    assert load_tokenizer(str(folder)).encode("hello world hello world") == text_kit.byte_level().encode("hello world hello world")


def test_missing_tokenizers_are_typed_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer="):
        load_tokenizer(str(tmp_path))
    with pytest.raises((ModelNotFoundError, ConfigError), match="no-such-folder"):
        load_tokenizer(str(tmp_path / "no-such-folder"))
    (tmp_path / "tokenizer.json").write_text("{broken", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(str(tmp_path))


def test_code_of_a_model_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.Mine", null]}}', encoding="utf-8")
    (tmp_path / "code.py").write_text("raise SystemExit('ran')", encoding="utf-8")
    with pytest.raises(ConfigError):
        load_tokenizer(str(tmp_path))


def test_special_tokens_around_a_prompt_are_those_of_the_model() -> None:
    tokenizer = text_kit.byte_fallback()
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("the", add_special_tokens=False)[0] != 1


def test_a_control_token_in_a_raw_prompt_counts() -> None:
    assert text_kit.byte_level().encode("<|im_end|>") == [2]
    assert 2 not in text_kit.byte_level().encode_plain("<|im_end|>")


def test_bad_words_are_spelled_at_the_start_and_after_a_space() -> None:
    tokenizer = text_kit.byte_level()
    found = tokenizer.bad_word_ids(["fox", " fox", "\n"])
    assert [tokenizer.decode(ids) for ids in found] == ["fox", " fox", "\n"]


def test_bytes_of_a_token_may_be_part_of_a_character() -> None:
    tokenizer = text_kit.byte_level()
    ids = text_kit.spelled("é")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xc3", b"\xa9"]
    assert tokenizer.token_text(ids[0]) == "\ufffd"


def test_ids_outside_the_vocabulary_are_named_with_their_place() -> None:
    check_token_ids([0, 9], 10)
    for ids, says in (([0, 10], "token id 10 at position 1"), ([-1], "token id -1 at position 0"), ([True], "must be integers")):
        with pytest.raises(TokenOutOfRangeError, match=says):
            check_token_ids(ids, 10)


def test_ids_of_any_integer_type_become_plain_ones_in_a_list_of_their_own() -> None:
    given = [0, 9]
    assert check_token_ids(given, 10) == given and check_token_ids(given, 10) is not given
    found = check_token_ids([np.int64(3), np.uint8(4), 5], 10)
    assert found == [3, 4, 5] and {type(i) for i in found} == {int}
    assert check_token_ids(range(3), 10) == [0, 1, 2] and check_token_ids((), 10) == []


def test_checking_ids_runs_no_python_code_for_each_of_them() -> None:
    def calls(length: int) -> int:
        ids, seen = [7] * length, 0

        def count(*_: object) -> None:
            nonlocal seen
            seen += 1

        sys.setprofile(count)
        try:
            check_token_ids(ids, 10)
        finally:
            sys.setprofile(None)
        return seen

    assert calls(1000) == calls(1)
