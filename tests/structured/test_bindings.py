"""Importing xgrammar in parts: nothing needless comes along, and nobody else notices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ALONE = """
import sys
from deepinfer.structured import bindings
b = bindings.load()
assert bindings.load() is b
assert "TVM_FFI_DISABLE_TORCH_C_DLPACK" not in __import__("os").environ
import grammar_kit
from deepinfer.structured.compiler import Compiler
from deepinfer.structured.matcher import SHELF, ReadyGrammar
made = Compiler(grammar_kit.vocabulary()).compile("json_schema", '{"type": "string", "maxLength": 3}', {})
SHELF.learn(grammar_kit.vocabulary())
at = ReadyGrammar("k", grammar_kit.vocabulary().fingerprint, made.data)()
assert at.accept(34) and at.accept(97)
"""
LIGHT = """
assert not {"torch", "transformers", "xgrammar"} & set(sys.modules), "something needless has been imported"
"""
BESIDE = """
import torch, xgrammar
info = xgrammar.TokenizerInfo([b"a", b"b", b""], vocab_size=3, stop_token_ids=[2])
compiled = xgrammar.GrammarCompiler(info).compile_regex("a+")
matcher, mask = xgrammar.GrammarMatcher(compiled), xgrammar.allocate_token_bitmask(1, 3)
assert matcher.fill_next_token_bitmask(mask) and int(mask[0, 0]) & 7 == 1 and matcher.accept_token(0)
assert isinstance(xgrammar.CompiledGrammar.deserialize_json(compiled.serialize_json(), info), xgrammar.CompiledGrammar)
"""


@pytest.mark.parametrize("code", [ALONE + LIGHT + BESIDE, BESIDE + ALONE], ids=["before", "after"])
def test_both_ways_to_import_it_stand_each_other(code: str) -> None:
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=120)
    assert done.returncode == 0, done.stderr
