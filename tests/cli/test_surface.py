"""The command line without a model: help, start-up time, exit codes of mistakes that need nothing loaded."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.running import COMMAND, environment, run
from deepinfer.cli.app import COMMANDS
from deepinfer.cli.bench import KINDS
from deepinfer.cli.kernels import KINDS as KERNELS
from deepinfer.cli.kvstore import KINDS as KVSTORE

EVERY = [(c,) for c in COMMANDS] + [("bench", k) for k in KINDS] + [("kvstore", k) for k in KVSTORE]
EVERY += [("kernels", k) for k in KERNELS]


def assert_one_line(result: subprocess.CompletedProcess[bytes], says: str, code: int = 2) -> None:
    """One line on stderr that says what to change, nothing on stdout, and the exit code."""
    lines = result.stderr.decode().splitlines()
    assert result.returncode == code, lines
    assert len(lines) == 1 and lines[0].startswith("deepinfer: error: ") and says in lines[0], lines
    assert result.stdout == b""


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from deepinfer.cli import main; code = main(['--help']); "
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules); sys.exit(f'imported {heavy}' if heavy else code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    for name in COMMANDS:
        assert re.search(rf"^ +{name}\s", result.stdout.decode(), re.MULTILINE)


@pytest.mark.parametrize("command", EVERY, ids=" ".join)
def test_every_command_explains_itself_with_an_example(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    from deepinfer.cli.app import main

    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"deepinfer {' '.join(command)}" in text.splitlines()[0]
    if command != ("bench", "scheduler"):  # its own file says what it prints
        assert "examples:\n  " in text
    if command not in (("chat",), ("serve",), ("bench",), ("kvstore",), ("kernels",)):
        assert "--json" in text
    assert "exit codes:" in text


def test_the_installed_command_is_this_one() -> None:
    script = Path(sys.executable).with_name("deepinfer")
    if not script.exists():
        pytest.skip("the package is on the path, not installed: no deepinfer command beside this python")
    result = subprocess.run([str(script), "--version"], capture_output=True, timeout=60, check=False)
    assert result.returncode == 0 and result.stdout.startswith(b"deepinfer ")


@pytest.mark.parametrize(("argv", "code"), [(("--version",), 0), (("kernels", "--help"), 0), (("frobnicate",), 2)])
def test_the_package_run_as_a_module_is_the_command(argv: tuple[str, ...], code: int) -> None:
    command = [sys.executable, "-m", "deepinfer", *argv]
    result, wanted = subprocess.run(command, capture_output=True, env=environment(), timeout=60, check=False), run(*argv)
    assert (result.returncode, result.stdout, result.stderr) == (code, wanted.stdout, wanted.stderr)
    assert wanted.returncode == code and (result.stdout or result.stderr)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "COMMAND"),
        (("frobnicate",), "frobnicate"),
        (("generate", "hello"), "--model"),
        (("generate", "--model", "m", "--max-tokens", "many", "hello"), "--max-tokens"),
        (("generate", "--model", "m", ""), "prompt is empty"),
        (("generate", "--model", "m", "-"), "prompt is empty"),
        (("generate", "--model", "m", "--max-tokens", "0", "hello"), "max_tokens"),
        (("generate", "--model", "m", "--temperature", "-1", "hello"), "temperature"),
        (("generate", "--model", "m", "--min-tokens", "9", "--max-tokens", "4", "hello"), "min_tokens (9) is above max_tokens (4)"),
        (("generate", "--model", "m", "-n", "2", "hello"), "-n"),
        (("generate", "--model", "m", "--n", "2", "--temperature", "0", "hello"), "raise the temperature"),
        (("generate", "--model", "m", "--raw", "--system", "s", "hello"), "--raw"),
        (("generate", "--model", "m", "--logprobs", "2", "hello"), "--json"),
        (("generate", "--model", "m", "--logit-bias", "x", "hello"), "ID=VALUE"),
        (("generate", "--model", "m", "--num-kv-blocks", "4", "--gpu-memory-utilization", "0.5", "hello"), "give one of them"),
        (("chat", "--model", "m", "--top-p", "0"), "top_p"),
        (("bench", "throughput", "--model", "m", "--num-prompts", "0"), "--num-prompts"),
        (("kernels", "build", "--shape", "tiny"), "use one of smollm2-135m"),
        (("kernels", "check", "--arch", "sm_80"), "use sm_90a"),
        (("kernels", "build", "--shape", "llama-8b", "--jobs", "0"), "--jobs 0 must be at least 1"),
        (("kernels", "list", "--model", "missing"), "missing"),
        (("kernels", "list", "--kv-cache-dtype", "fp8"), "--kv-cache-dtype goes with --model; a named shape is whole"),
        (("kernels", "build", "--dtype", "float16", "--block-size", "16"), "--dtype and --block-size go with --model"),
        (("kernels", "check", "--shape", "llama-8b", "--block-size", "16"), "--block-size goes with --model"),
        (("bench", "scheduler", "--num-seqs", "99999999999"), "above 65536"),
        (("bench", "throughput", "--model", "m", "--input-len", "4", "--shared-prefix-len", "5"), "--shared-prefix-len"),
        (("bench", "throughput", "--model", "m", "--shared-share", "1.5"), "--shared-share"),
        (("bench", "throughput", "--model", "m", "--request-rate", "0"), "--request-rate"),
        (("bench", "throughput", "--model", "m", "--request-rate", "nan"), "--request-rate"),
        (("batch", "--model", "m", "missing.jsonl", "out.jsonl"), "missing.jsonl"),
        (("batch", "--model", "m", ".", "out.jsonl"), "directory"),
        (("batch", "--model", "m", "--json", "-", "-"), "--json"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, tuple) else None,
)
def test_a_mistake_takes_one_line(argv: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_one_line(run(*argv), says)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_that_is_not_utf8_is_refused() -> None:
    assert_one_line(run("generate", "--model", "m", "-", stdin=b"caf\xe9"), "not UTF-8")


def test_batch_input_and_output_must_differ(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"{}\n")
    assert_one_line(run("batch", "--model", "m", str(path), str(path)), "both input and output")
    assert path.read_bytes() == b"{}\n"


def test_doctor_names_this_machine_and_every_switch() -> None:
    result = run("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.returncode == 0, report["problems"]
    assert report["problems"] == [] and report["core"]["error"] is None
    assert report["cpu"]["usable_cores"] > 0 and report["memory"]["total"] > 2**28
    assert report["libraries"]["torch"] and report["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    from deepinfer.engine.environ import SWITCHES

    switches = {s["name"]: s for s in report["switches"]}
    assert set(switches) == {s.name for s in SWITCHES}
    assert set(report["numerics"]) == {"CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"}
    assert switches["DEEPINFER_QUIET"]["value"] is True and switches["DEEPINFER_QUIET"]["set"] is True
    for part in report["optional"]:
        assert part["present"] or part["install"].startswith("pip install ")


def test_doctor_shows_what_a_person_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.cli import doctor
    from deepinfer.cli.app import main

    monkeypatch.delenv("DEEPINFER_NUM_THREADS", raising=False)
    absent = doctor.Part("no-such-part", "no_such_part", "tests", "pip install no-such-part")
    monkeypatch.setattr(doctor, "OPTIONAL_PARTS", (absent,))
    assert main(["doctor", "--env"]) == 0
    text = capsys.readouterr().out
    assert "no-such-part       tests: missing; get it with: pip install no-such-part" in text
    assert "a variable of its own, too: deepinfer kvstore serve --print-settings" in text
    assert "DEEPINFER_NUM_THREADS=unset" in text and "--no-batch-invariant" in text
    assert main(["doctor"]) == 0
    assert "DEEPINFER_NUM_THREADS" not in capsys.readouterr().out


def test_doctor_tells_how_every_extra_for_users_is_installed() -> None:
    """Those of the package's own tests and comparisons apart."""
    from deepinfer.cli import doctor

    extras = set(importlib.metadata.metadata("deepinfer").get_all("Provides-Extra") or ())
    if not extras:
        pytest.skip("the package is on the path, not installed")
    told = {name for part in doctor.OPTIONAL_PARTS for name in re.findall(r"deepinfer\[(\w+)\]", part.how)}
    assert told == extras - {"test", "lint", "oracle", "demo"}
    assert doctor._is_there("importlib.metadata") and not doctor._is_there("no_such_package.module")


def test_doctor_tells_of_variables_that_disagree_and_of_the_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer.cli import doctor
    from deepinfer.cli.app import main

    for name in ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert doctor.collect()["devices_disagree"] is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "1")
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "problem: CUDA_VISIBLE_DEVICES='' and ASCEND_RT_VISIBLE_DEVICES='1' name different devices" in told
    report = doctor.collect()
    report["torch"] |= {"gpus": [], "error": None}
    assert "none visible: " in (shown := doctor.render(report, every_switch=False)) and "Models run on the CPU (--device cpu" in shown


def test_doctor_tells_of_a_workspace_that_an_engine_will_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.cli import doctor

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.delenv("CUBLASLT_WORKSPACE_SIZE", raising=False)
    report = {"numerics": doctor._numerics(), "torch": {"gpus": [{}]}}
    assert report["numerics"]["CUBLAS_WORKSPACE_CONFIG"] == {"value": ":4096:8", "batch_invariant": ":0:0"}
    _, said = doctor._batch_lines(report)
    assert said.strip() == "CUBLAS_WORKSPACE_CONFIG=:4096:8 counts only with that; else an engine sets :0:0"
    assert len(doctor._batch_lines({**report, "torch": {"gpus": []}})) == 1


def test_doctor_fails_when_something_needed_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.cli import doctor
    from deepinfer.cli.app import main

    monkeypatch.setattr(doctor, "_LIBRARIES", (*doctor._LIBRARIES, "surely-not-installed"))
    assert main(["doctor"]) == 1
    assert "problem: missing libraries: pip install surely-not-installed" in capsys.readouterr().out


def test_ctrl_c_and_a_closed_pipe_have_their_own_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer.cli import app, doctor

    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert app.main(["doctor"]) == 130
    with subprocess.Popen([*COMMAND, "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # before it writes: it is still starting
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


def test_a_fault_of_ours_shows_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from deepinfer.cli import app, doctor

    def broken(args: object) -> int:
        raise ZeroDivisionError("surprise")

    monkeypatch.setattr(doctor, "run", broken)
    assert app.main(["doctor"]) == 1
    assert "ZeroDivisionError: surprise" in capsys.readouterr().err
