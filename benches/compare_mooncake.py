"""Mooncake Store beside DeepInfer's KV store on one machine: put and get of objects of 1 MiB over TCP on the loopback address.

``python benches/compare_mooncake.py [--objects 256] [--rounds 5] [--home DIR] [--json]``, where ``python`` has DeepInfer. Mooncake is
installed into an environment of its own (``--home``, kept between runs): PyPI ``mooncake-transfer-engine-non-cuda``, which needs
Debian's ``libibverbs1``.

Durability is stated, and equal on both sides: none. Mooncake Store keeps objects in the memory of its clients; DeepInfer's server is
given a directory in memory (``/dev/shm``), so that its fdatasync has nothing to wait for. Both sides talk to another process over TCP,
one client, one object a call. What DeepInfer does with a real disk is another question: ``deepinfer kvstore bench``.

Counted: GiB/s over all objects of a round, medians of the rounds, which take turns; every object that is read is compared. DeepInfer's is
``_core.KvTier`` from Python into one buffer, Mooncake's its Python client's ``put_from`` and ``get_into`` with a registered one.

Exit code 2 with one line when Mooncake cannot be installed or started: skipped, not failed.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

PACKAGE = "mooncake-transfer-engine-non-cuda"
SIZE = 1 << 20


class Skipped(Exception):
    """Why there is nothing to compare with."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objects", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--home", type=Path, default=Path(tempfile.gettempdir()) / f"deepinfer-mooncake-{os.getuid()}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        return mooncake_worker(json.loads(args.worker))
    try:
        report = compare(args)
    except Skipped as why:
        print(f"comparison with Mooncake skipped: {' '.join(str(why).split())}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report))
    else:
        about = f"{args.objects} objects of 1 MiB, one a call, TCP on loopback, no durability on either side"
        print(f"{report['machine']}, load {report['load']:.1f}; {about}")
        for what in ("put", "get"):
            row = report[what]
            print(f"  {what}  DeepInfer {row['deepinfer']:6.2f} GiB/s   Mooncake {row['mooncake']:6.2f} GiB/s   ratio {row['ratio']:.2f}")
    return 0


def compare(args: argparse.Namespace) -> dict[str, Any]:
    python = installed(args.home)
    memory = Path("/dev/shm")
    room = (args.rounds + 2) * args.objects * SIZE  # for all rounds: nothing is evicted on either side
    if shutil.disk_usage(memory).free < 2 * room:
        raise Skipped("/dev/shm has too little room")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory)))
        ours = stack.enter_context(deepinfer_side(folder, args.objects, room))
        theirs = stack.enter_context(mooncake_side(python, args.objects, args.home, room))
        rates: dict[str, list[tuple[float, float]]] = {"put": [], "get": []}
        for number in range(args.rounds + 1):
            for what in ("put", "get"):
                sides = (ours, theirs) if number % 2 else (theirs, ours)
                times = {side: side(what, number) for side in sides}
                if number:  # the first round only warms
                    rates[what].append((times[ours], times[theirs]))
    report: dict[str, Any] = {"machine": machine(), "load": os.getloadavg()[0], "objects": args.objects, "bytes": SIZE}
    report["rounds"] = args.rounds
    for what, pairs in rates.items():
        report[what] = {
            "deepinfer": statistics.median(ours for ours, _ in pairs),
            "mooncake": statistics.median(theirs for _, theirs in pairs),
            "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
        }
    return report


def machine() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.partition(':')[2].strip()}, {os.cpu_count()} cores"
    return platform.machine()


def installed(home: Path) -> Path:
    """The interpreter of an environment that has Mooncake."""
    if ctypes.util.find_library("ibverbs") is None:
        raise Skipped("libibverbs is missing: apt-get install libibverbs1")
    python = home / "bin" / "python"
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, capture_output=True)
        probe = subprocess.run(
            [python, "-c", "from mooncake.store import MooncakeDistributedStore"], capture_output=True, text=True, check=False
        )
        if probe.returncode:
            subprocess.run([python, "-m", "pip", "install", "--quiet", PACKAGE], check=True, capture_output=True, timeout=600)
            probe = subprocess.run(
                [python, "-c", "from mooncake.store import MooncakeDistributedStore"], capture_output=True, text=True, check=False
            )
    except (OSError, subprocess.SubprocessError) as error:
        raise Skipped(f"{PACKAGE} could not be installed: {error}") from None
    if probe.returncode:
        raise Skipped(f"{PACKAGE} cannot be imported: {probe.stderr[-300:]}")
    return python


def content(number: int, item: int) -> bytes:
    """Bytes of an object: other ones for each, quickly made."""
    return (number << 32 | item).to_bytes(8, "little") * (SIZE // 8)


@contextmanager
def deepinfer_side(folder: Path, objects: int, room: int) -> Iterator[Callable[[str, int], float]]:
    from deepinfer import _core

    settings = [
        "listen=127.0.0.1:0",
        "metrics=off",
        f"root={folder / 'kv'}",
        f"store.capacity={room}",
        f"store.slack={room}",
    ]
    argv = [sys.executable, "-m", "deepinfer.cli", "kvstore", "serve", "--json", *[part for one in settings for part in ("--set", one)]]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    try:
        tier = _core.KvTier(f"tcp://{json.loads(server.stdout.readline())['addresses'][0]}")
        into = bytearray(SIZE)

        def side(what: str, number: int) -> float:
            data = [content(number, item) for item in range(objects)]
            keys = [(number * objects + item + 1).to_bytes(16, "little") for item in range(objects)]
            spent = 0.0
            for key, each in zip(keys, data, strict=True):
                began = time.perf_counter()
                if what == "put":
                    done = tier.put("block", key, b"", [SIZE], each) == b"s"
                else:
                    done = tier.get("block", key, into, SIZE) == b"\1"
                spent += time.perf_counter() - began
                assert done and (what == "put" or into == each), f"DeepInfer: {what} of object {number} failed"
            return objects * SIZE / spent / 2**30

        yield side
    finally:
        server.terminate()
        server.wait(30)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def mooncake_side(python: Path, objects: int, home: Path, room: int) -> Iterator[Callable[[str, int], float]]:
    """A master, and two clients of their own processes: one lends its memory, the other one puts and gets over TCP."""
    master_port = free_port()
    log = open(home / "master.log", "w")  # noqa: SIM115 (as long as the process)
    argv = [str(python.parent / "mooncake_master"), f"--port={master_port}", f"--metrics_port={free_port()}"]
    processes = [subprocess.Popen(argv, stdout=log, stderr=log)]
    try:
        for role in ("lend", "ask"):
            about = {
                "role": role,
                "master": f"127.0.0.1:{master_port}",
                "name": f"127.0.0.1:{free_port()}",
                "objects": objects,
                "room": room,
            }
            out = open(home / f"{role}.log", "w")  # noqa: SIM115
            worker = [str(python), __file__, "--worker", json.dumps(about)]
            processes.append(subprocess.Popen(worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True))
            if answer(processes[-1]) != "ready":
                raise Skipped(f"Mooncake's client did not start: {(home / f'{role}.log').read_text()[-300:]}")
        asker = processes[-1]
        assert asker.stdin is not None

        def side(what: str, number: int) -> float:
            print(f"{what} {number}", file=asker.stdin, flush=True)
            said = answer(asker)
            assert said and not said.startswith("failed"), f"Mooncake: {said}"
            return objects * SIZE / float(said) / 2**30

        yield side
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()


def answer(process: subprocess.Popen[str]) -> str:
    """The next line that is an answer; Mooncake writes lines of its own."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("= "):
            return line[2:].strip()
    return ""


def mooncake_worker(about: dict[str, Any]) -> int:
    """Runs in Mooncake's environment."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    lent = about["room"] if about["role"] == "lend" else 0
    code = store.setup(about["name"], "P2PHANDSHAKE", lent, 64 << 20, "tcp", "", about["master"])
    # Its fastest calls: from and into memory that it was told of.
    memory = ctypes.create_string_buffer(SIZE)
    place = ctypes.addressof(memory)
    code = code or store.register_buffer(place, SIZE)
    print("= ready" if code == 0 else f"= failed: setup gives {code}", flush=True)
    for line in sys.stdin:
        what, number = line.split()[0], int(line.split()[1])
        spent, failed = 0.0, ""
        for item in range(about["objects"]):
            each = content(number, item)
            key = f"{number}-{item}"
            if what == "put":
                ctypes.memmove(place, each, SIZE)
            began = time.perf_counter()
            code = store.put_from(key, place, SIZE) if what == "put" else store.get_into(key, place, SIZE)
            spent += time.perf_counter() - began
            if (what == "put" and code != 0) or (what == "get" and (code != SIZE or memory.raw != each)):
                failed = f"failed: {what} of {key} gives {code}"
        print(f"= {failed or spent}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
