"""Every file in examples/ runs as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.running import environment, needs_smollm2

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def output_of(name: str) -> str:
    """What an example prints."""
    command = [sys.executable, str(EXAMPLES / name)]
    result = subprocess.run(command, capture_output=True, env=environment(), timeout=180, check=False, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_is_run_here() -> None:
    known = {"generate.py", "stream_chat.py", "serve_async.py", "own_model.py", "prefill_decode_pair.py"}
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
