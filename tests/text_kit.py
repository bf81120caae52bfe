"""Small vocabularies of the kinds in use, and recorded token streams, for tests of the text side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from deepinfer.engine.request import EngineRequest, FinishReason, SequenceDelta, Timing, TokenLogprobs
from deepinfer.engine.tokenizer import Tokenizer
from deepinfer.sampling import SamplingParams

TEXT = (
    "the quick brown fox jumps over the lazy dog. stop here, please stop. Hello world! user assistant system "
    "안녕하세요 세계 반갑습니다 日本語の文章 中文文本 Привет мир naïve café 😀😃👩‍👩‍👧 𓀀𓂀 0123456789 <b>bold</b> [x] a|b "
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def byte_level(vocab_size: int = 602) -> Tokenizer:
    """Byte-level BPE as GPT-2 and its heirs have it: three special tokens, one that only looks like markup."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=list(CONTROL), show_progress=False
    )
    backend.train_from_iterator([TEXT] * 4, trainer)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("</think>", special=False, normalized=False)])
    return Tokenizer(
        backend, special_tokens={"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}, chat_template=CHATML, name="byte-level"
    )


@cache
def byte_fallback() -> Tokenizer:
    """BPE over characters with 256 byte tokens for all others, as SentencePiece models have it; the first space is dropped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    words = ("▁the", "▁quick", "▁stop", "▁", "th", "▁th", "he", "st", "op", "▁st", "ll")
    for word in [*words, *"abcdefghijklmnopqrstuvwxyz.,!안녕é"]:
        vocab.setdefault(word, len(vocab))
    merges = [("▁", "th"), ("t", "h"), ("▁th", "e"), ("h", "e"), ("s", "t"), ("o", "p"), ("▁", "st"), ("l", "l")]
    merges = [m for m in merges if all(p in vocab for p in m) and "".join(m) in vocab]
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}, name="byte-fallback")


@cache
def unigram() -> Tokenizer:
    """A unigram vocabulary whose own pieces spell the control tokens: the hardest case for plain encoding."""
    pieces = [("<unk>", 0.0), ("</s>", -1.0), ("▁", -2.0), *((c, -5.0) for c in "abcdefghijklmnopqrstuvwxyz</>"), ("▁the", -3.0)]
    backend = Backend(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "</s>")])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>", "unk_token": "<unk>"}, name="unigram")


@cache
def word_pieces() -> Tokenizer:
    """A vocabulary whose decoder puts spaces between tokens, so that text is no concatenation of tokens."""
    vocab = {t: i for i, t in enumerate(["[UNK]", "[CLS]", "[SEP]", "hello", "world", "##s", "un", "##do", "##ing", "."])}
    backend = Backend(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return Tokenizer(backend, special_tokens={"unk_token": "[UNK]", "eos_token": "[SEP]"}, name="word-pieces")


def spelled(text: str) -> list[int]:
    """Ids of a text, one byte-level token for every byte."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    found = [byte_level().backend.token_to_id(c) for piece, _ in pieces for c in piece]
    assert None not in found and len(found) == len(text.encode())
    return [i for i in found if i is not None]


def request(
    params: SamplingParams, *, name: str = "r", prompt: Sequence[int] = (5,), eos: tuple[int, ...] = (2,), stream: bool = True
) -> EngineRequest:
    """A request as the text side makes it."""
    return EngineRequest(
        name, list(prompt), params, max_new=params.max_tokens or 1000, eos_ids=eos, seeds=params.seeds(1), stream=stream, arrival=1.0
    )


def recorded(
    ids: Sequence[int],
    cuts: Iterable[int] = (),
    *,
    name: str = "r",
    index: int = 0,
    finish: FinishReason = "length",
    logprobs: bool = False,
) -> list[SequenceDelta]:
    """A token stream as an engine would tell it, cut before the given places; the last delta has the finish reason."""
    edges = [0, *sorted({c for c in cuts if 0 < c < len(ids)}), len(ids)]
    deltas = []
    for a, b in pairwise(edges):
        made = [TokenLogprobs(np.array([i, 9], np.int32), np.array([-0.5, -1.0], np.float32), 1) for i in ids[a:b]] if logprobs else None
        timing = Timing(1.0, 2.0, 3.0, 4.0 + b)
        last = b == len(ids)
        deltas.append(SequenceDelta(name, index, list(ids[a:b]), finish if last else None, logprobs=made, cached_tokens=3, timing=timing))
    return deltas
