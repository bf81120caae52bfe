"""Images, compose, units: whatever of them can be checked without building an image is."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepinfer.cli import serve
from deepinfer.cli.app import build_parser

ROOT = Path(__file__).resolve().parent.parent
PACKAGING = ROOT / "packaging"
COMPOSE = yaml.safe_load((PACKAGING / "compose.yaml").read_text(encoding="utf-8"))
STEPS = re.findall(r"^([A-Z]+) ((?:.*\\\n)*.*)$", (PACKAGING / "Containerfile").read_text(encoding="utf-8"), re.MULTILINE)
STAGES = [rest.split()[-1] for step, rest in STEPS if step == "FROM"]


def test_every_stage_of_the_image_is_there_and_so_is_what_it_copies() -> None:
    assert STAGES == ["wheel", "base", "cpu", "cuda"]
    known: set[str] = set()
    for step, rest in STEPS:
        if step == "FROM":
            source, _, name = rest.split()
            assert "/" in source or ":" in source or source in known, "an image with a tag, or an earlier stage"
            known.add(name)
        elif step == "COPY":
            source = rest.split()[-2]
            if rest.startswith("--from="):
                assert rest.split()[0].removeprefix("--from=") in known
            else:
                assert (ROOT / source).exists(), source
    users = [rest for step, rest in STEPS if step == "USER"]
    assert users == ["deepinfer", "deepinfer"], "no variant runs as root"


def test_images_are_installed_by_the_lines_that_tests_are() -> None:
    """`make test` makes an empty environment and fills it by packaging/install.sh; so does an image, by nothing else."""
    runs = " ".join(rest for step, rest in STEPS if step == "RUN")
    assert "pip" not in runs and runs.count("install-deepinfer /dist/deepinfer-*.whl") == 2
    script = (ROOT / "scripts" / "test.sh").read_text(encoding="utf-8")
    assert 'packaging/install.sh "$wheel" "$home/venv" test' in script and "install the wheel" in script
    assert re.findall(r'pip install.*"\$wheel', script) == []


def test_the_install_script_says_what_it_lacks(tmp_path: Path) -> None:
    for arguments in ([], [str(tmp_path / "none.whl")]):
        made = subprocess.run([PACKAGING / "install.sh", *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert made.returncode == 2 and made.stdout == "" and made.stderr.count("\n") == 1 and "make wheel" in made.stderr


def test_compose_mounts_what_is_there_and_listens_on_this_machine_only() -> None:
    services: dict[str, Any] = COMPOSE["services"]
    assert set(services) == {"deepinfer", "prometheus", "grafana"}
    for name, service in services.items():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), name
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert (PACKAGING / source).is_file() if source.startswith(".") else source in COMPOSE["volumes"], volume
    build = services["deepinfer"]["build"]
    assert (PACKAGING / build["context"] / build["dockerfile"]).samefile(PACKAGING / "Containerfile")
    assert build["target"] == "${VARIANT:-cpu}" and {"cpu", "cuda"} <= set(STAGES)
    gpu = yaml.safe_load((PACKAGING / "compose.gpu.yaml").read_text(encoding="utf-8"))
    assert gpu["services"].keys() <= services.keys()
    (scrape,) = yaml.safe_load((PACKAGING / "prometheus.yaml").read_text(encoding="utf-8"))["scrape_configs"]
    assert scrape["static_configs"][0]["targets"] == ["deepinfer:8000"] and scrape["metrics_path"] == "/metrics"


def compose() -> list[str] | None:
    """A program that reads compose files."""
    for command in (["docker", "compose"], ["docker-compose"], ["podman-compose"]):
        if shutil.which(command[0]) and not subprocess.run([*command, "version"], capture_output=True, check=False).returncode:
            return command
    return None


@pytest.mark.skipif(compose() is None, reason="no docker compose, docker-compose or podman-compose")
def test_compose_reads_its_file() -> None:
    files = ["-f", str(PACKAGING / "compose.yaml"), "-f", str(PACKAGING / "compose.gpu.yaml")]
    subprocess.run([*(compose() or ()), *files, "config"], check=True, capture_output=True, timeout=60)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool")
def test_prometheus_reads_its_file() -> None:
    subprocess.run(["promtool", "check", "config", str(PACKAGING / "prometheus.yaml")], check=True, capture_output=True, timeout=60)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_the_unit_is_one(tmp_path: Path) -> None:
    unit = (PACKAGING / "deepinfer.service").read_text(encoding="utf-8")
    assert "/opt/deepinfer/bin/deepinfer serve --config /etc/deepinfer/serve.yaml" in unit
    (tmp_path / "deepinfer.service").write_text(unit.replace("/opt/deepinfer/bin/deepinfer", "/bin/true"), encoding="utf-8")
    made = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "deepinfer.service")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (made.returncode, made.stderr) == (0, ""), made.stderr


def test_the_unit_waits_longer_than_a_server_drains() -> None:
    """So does compose."""
    args = build_parser().parse_args(["serve", "--config", str(PACKAGING / "serve.yaml")])
    serve._read_config(args)
    settings = serve.server_settings(args)
    assert args.model == "smollm2" and settings.host == "127.0.0.1" and settings.log_format == "json"
    unit = (PACKAGING / "deepinfer.service").read_text(encoding="utf-8")
    stop = int(re.search(r"TimeoutStopSec=(\d+)", unit)[1])  # type: ignore[index]
    assert min(stop, int(COMPOSE["services"]["deepinfer"]["stop_grace_period"].removesuffix("s"))) >= settings.drain_timeout + 10
