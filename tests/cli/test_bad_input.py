"""Mistakes that show only with a model at hand: one line on stderr that says what to change, exit code 2, no traceback.

They go through ``main`` in this process, so that torch is imported once for all of them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from cli.running import COMMAND, TIMEOUT, environment, needs_smollm2, smollm2_file
from deepinfer.cli.app import main

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": 320,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_config(folder: Path, **changes: object) -> str:
    """A checkpoint folder that holds a configuration only."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return str(folder)


def fails_with_one_line(capfd: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs a command that must end with 2 and one error line; gives that line."""
    code = main(list(argv))
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert code == 2, (code, err)
    assert len(lines) == 1 and lines[0].startswith("deepinfer: error: "), lines
    assert out == ""
    return lines[0]


def test_an_unknown_model_is_named(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = fails_with_one_line(capfd, "generate", "--model", "no-such-model-anywhere", "hello")
    assert "no-such-model-anywhere" in line


def test_an_unregistered_architecture_names_the_registry_and_the_nearest(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_config(tmp_path / "m", architectures=["LlamaForCausalML"])
    line = fails_with_one_line(capfd, "generate", "--model", model, "--load-format", "dummy", "hello")
    assert "LlamaForCausalML" in line and "register_model" in line and "LlamaForCausalLM" in line


def test_a_folder_without_weights_says_so(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = fails_with_one_line(capfd, "generate", "--model", write_config(tmp_path / "m"), "hello")
    assert "safetensors" in line


def test_code_of_a_checkpoint_is_refused_with_the_reason(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = fails_with_one_line(capfd, "generate", "--model", write_config(tmp_path / "m"), "--trust-remote-code", "hello")
    assert "refused" in line


def test_a_pool_that_holds_nothing_names_the_setting(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = write_config(tmp_path / "m")
    pool = ("--num-kv-blocks", "1", "--block-size", "16")
    line = fails_with_one_line(capfd, "bench", "latency", "--model", model, "--load-format", "dummy", "--device", "cpu", *pool)
    assert "num_kv_blocks" in line


@needs_smollm2
def test_a_truncated_gguf_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    whole = smollm2_file()
    for size in (20, 1_000_000, 40_000_000):
        cut = tmp_path / f"cut{size}.gguf"
        with whole.open("rb") as source:
            cut.write_bytes(source.read(size))
        line = fails_with_one_line(capfd, "generate", "--model", str(cut), "hello")
        assert cut.name in line


@needs_smollm2
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--max-model-len", "64", "word " * 100), "64"),
        (("--max-model-len", "64", "--num-kv-blocks", "1", "--block-size", "16", "hello"), "num_kv_blocks"),
        (("--stop-token-id", "999999", "hello"), "999999"),
        (("--logit-bias", "999999=1", "hello"), "999999"),
    ],
    ids=("prompt longer than the model", "pool too small", "stop id out of the vocabulary", "bias out of the vocabulary"),
)
def test_a_request_the_model_cannot_serve(capfd: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str) -> None:
    assert says in fails_with_one_line(capfd, "generate", "--model", "smollm2", "--device", "cpu", "--raw", *argv)


@pytest.mark.parametrize(("closed", "code"), [("<&-", 2), (">&-", 0), ("<&- >&- 2>&-", 2)])
def test_streams_that_the_caller_closed_are_empty(closed: str, code: int) -> None:
    argv = ("generate", "--model", "no-such-model", "-") if code else ("doctor", "--json")
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, *argv], env=environment(), timeout=TIMEOUT, check=False, capture_output=True
    )
    assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr
