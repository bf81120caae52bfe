"""guidellm against a real server: every request of a small load is answered, and counts are the server's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

import api_kit
import programs_kit as kit
from server_kit import serving

pytestmark = [kit.needs_clients, pytest.mark.nightly]


def test_guidellm_counts_what_the_server_counts(tmp_path: Path) -> None:
    if subprocess.run([kit.PYTHON, "-c", "import guidellm"], capture_output=True, cwd=kit.ROOT).returncode:
        pytest.skip("needs guidellm in the environment of DEEPINFER_TEST_CLIENTS: pip install 'guidellm>=0.8,<0.9'")
    with serving(None, "--served-model-name", "tiny") as server:
        kit.run(
            *("-m", "guidellm", "run", "--backend", f"kind=openai_http,target={server.url},model=tiny"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"),
            *("--tokenizer", f"kind=huggingface_auto,model={api_kit.tiny_model()}"),
            *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"),
            *("--output", f"kind=json,path={tmp_path / 'out.json'}", "--disable-progress"),
            home=tmp_path,
        )
        (benchmark,) = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
        assert benchmark["metrics"]["request_totals"] == {"successful": 4, "errored": 0, "incomplete": 0, "total": 4}
        for request in benchmark["requests"]["successful"]:
            assert request["output_tokens"] == 8 and request["output"]
            assert 0 < request["time_to_first_token_ms"] < 1000 * request["request_latency"]
            body = {**json.loads(request["request_args"])["body"], "stream": False, "stream_options": None}
            said = server.post("/v1/chat/completions", body).json()["usage"]
            assert (request["prompt_tokens"], request["output_tokens"]) == (said["prompt_tokens"], said["completion_tokens"])
