"""A tiny random model with a tokenizer and a chat template, for tests of what a user imports."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from transformers import PreTrainedTokenizerFast

import engine_kit
import text_kit

SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 64, "block_size": 16, "max_num_seqs": 8, "quiet": True, "num_threads": 1}


@cache
def tiny_model() -> str:
    """Directory of a random Llama checkpoint whose vocabulary of 320 is byte-level BPE; eos ids 2 and 3."""
    where = mkdtemp(prefix="tiny-text-")
    shutil.copytree(engine_kit.tiny_checkpoint("llama"), where, dirs_exist_ok=True)
    source = text_kit.byte_level(engine_kit.VOCAB)
    made = PreTrainedTokenizerFast(tokenizer_object=source.backend, bos_token="<|im_start|>", eos_token="<|im_end|>")
    made.chat_template = text_kit.CHATML
    made.save_pretrained(where)
    generation = {"eos_token_id": [2, 3], "temperature": 0.5, "top_p": 0.9}
    (Path(where) / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return where
