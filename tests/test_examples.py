"""Every file in examples/ runs as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.running import environment, needs_smollm2

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def output_of(name: str, seconds: float = 180) -> str:
    """What an example prints."""
    command = [sys.executable, str(EXAMPLES / name)]
    result = subprocess.run(command, capture_output=True, env=environment(), timeout=seconds, check=False, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_is_run_here() -> None:
    known = {"generate.py", "stream_chat.py", "serve_async.py", "own_model.py", "prefill_decode_pair.py", "replay_equivalence.py"}
    assert {p.name for p in EXAMPLES.glob("*.py")} == known


def test_a_model_of_ones_own() -> None:
    assert output_of("own_model.py").count(",") == 7  # eight ids


@needs_smollm2
@pytest.mark.nightly
def test_several_callers_of_one_engine() -> None:
    text = output_of("serve_async.py")
    assert "ann: 'The capital of France is Paris.'" in text and "bob: " in text and "cat: " in text


@needs_smollm2
@pytest.mark.nightly
def test_a_prompt_process_and_a_completion_process() -> None:
    text = output_of("prefill_decode_pair.py")
    assert "What is the capital of France? 'The capital of France is Paris.'" in text and "about the sea." in text


@needs_smollm2
@pytest.mark.nightly
def test_prompts_at_once_and_seeded_draws() -> None:
    assert "same draw alone and in a batch: True" in output_of("generate.py")


@needs_smollm2
@pytest.mark.nightly
def test_a_streamed_chat() -> None:
    assert output_of("stream_chat.py") == "The capital of France is Paris.\n"


@pytest.mark.nightly
def test_what_leaving_rows_out_costs() -> None:
    """The columns are errors; the exact policy and the bound have none, fewer tokens have."""
    lines = [line.split() for line in output_of("replay_equivalence.py", 600).splitlines()]
    kept = {int(words[0]): words[1:] for words in lines if len(words) > 3 and words[3] in ("yes", "NO")}
    assert all(words[2] == "yes" and words[0] == words[1] for words in kept.values())
    assert [float(words[0]) == 0 for _, words in sorted(kept.items())] == [False] * 4 + [True] * 2 and 76 in kept
    hits = {(words[0], words[1]): words[2:] for words in lines if words and words[0] in ("exact", "replay")}
    assert {key: int(words[0]) for key, words in hits.items()} == dict.fromkeys(hits, 256) and len(hits) == 4
    assert [float(hits[key][2]) for key in (("exact", "kept"), ("exact", "off"), ("replay", "kept"))] == [0, 0, 0]
    assert float(hits["replay", "off"][2]) > 0
