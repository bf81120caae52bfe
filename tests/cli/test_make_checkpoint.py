"""``deepinfer make-checkpoint`` as it is called; what it writes is tested beside the loaders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer.cli.app import main

TINY = Path(__file__).resolve().parents[1] / "data" / "deepseek_v41" / "tiny.json"


def test_it_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "made"
    assert main(["make-checkpoint", "--config", str(TINY), "--seed", "5", "--shard-gb", "0.004", str(made), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    shards = list(made.glob("model-*.safetensors"))
    assert report == {"directory": str(made), "tensors": 1019, "bytes": report["bytes"], "shards": len(shards), "seed": 5}
    assert len(shards) > 2 and 0 < sum(file.stat().st_size for file in shards) - report["bytes"] < 200_000  # headers
    assert json.loads((made / "config.json").read_text()) == json.loads(TINY.read_text())
    assert main(["make-checkpoint", "--config", str(TINY), "--plain", str(tmp_path / "plain")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'plain'}: 629 tensors, 0.07 GB in 1 file, seed 0\n"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--config", "absent.json", "made"), "absent.json: not readable"),
        (("--config", "llama.json", "made"), "load_format='dummy'"),
        (("--config", str(TINY), "."), "not an empty directory"),
        (("--config", str(TINY), "llama.json"), "not an empty directory"),
        (("--config", str(TINY), "--shard-gb", "0", "made"), "--shard-gb"),
        (("--config", str(TINY), "--shard-gb", "nan", "made"), "--shard-gb nan"),
        (("--config", str(TINY), "--shard-gb", "inf", "made"), "--shard-gb inf"),
        (("--config", str(TINY)), "DIR"),
        (("made",), "--config"),
    ],
)
def test_a_mistake_takes_one_line(
    argv: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("llama.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert main(["make-checkpoint", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1 and says in captured.err
    assert [file.name for file in tmp_path.iterdir()] == ["llama.json"]
