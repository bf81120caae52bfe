"""What tenants use, counted by several processes as if they were one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepinfer.server.errors import ApiError
from deepinfer.server.keys import Keys
from deepinfer.server.ledger import Ledger
from deepinfer.server.settings import ServerSettings
from deepinfer.server.tenants import Tenant

COUNT = """
import sys
from deepinfer.server.ledger import Ledger
ledger = Ledger(int(sys.argv[1]))
for i in range(400):
    with ledger.entry(f"tenant {i % 2}") as entry:
        entry[0] += 1
        entry[3] -= 0.5
"""
HOLD = """
import sys, time
from deepinfer.server.ledger import Ledger
with Ledger(int(sys.argv[1])).entry("a") as entry:
    print("in", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def file() -> Iterator[int]:
    with tempfile.TemporaryFile(buffering=0) as made:
        yield made.fileno()


def start(program: str, file: int) -> subprocess.Popen[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, "-c", program, str(file)], pass_fds=[file], stdout=subprocess.PIPE, text=True, env=env)


def test_no_count_of_several_processes_is_lost(file: int) -> None:
    several = [start(COUNT, file) for _ in range(4)]
    assert [process.wait(60) for process in several] == [0] * 4
    for name in ("tenant 0", "tenant 1"):
        with Ledger(file).entry(name) as entry:
            assert entry == [800.0, 0.0, 0.0, -400.0]


def test_a_process_that_stands_still_half_way_holds_nobody_up(file: int) -> None:
    process = start(HOLD, file)
    try:
        assert process.stdout is not None and process.stdout.readline() == "in\n"
        began = time.monotonic()
        with Ledger(file).entry("a") as entry:
            entry[0] = 1
        assert 0.04 < time.monotonic() - began < 1
    finally:
        process.kill()
        process.wait(10)
    began = time.monotonic()
    with Ledger(file).entry("a") as entry:
        assert entry[0] == 1
    assert time.monotonic() - began < 0.04, "its end lets go of the file"


def test_tenants_of_one_name_share_what_they_use(file: int) -> None:
    one, other, alone = (
        Tenant("t", requests_per_minute=3, tokens_per_minute=1000, ledger=ledger) for ledger in (Ledger(file), Ledger(os.dup(file)), None)
    )
    assert one.pay(100)["x-ratelimit-remaining-requests"] == "2"
    said = other.pay(50)
    assert (said["x-ratelimit-remaining-requests"], said["x-ratelimit-remaining-tokens"]) == ("1", "850")
    one.pay_answer(400)
    assert 450 <= int(other.pay(0)["x-ratelimit-remaining-tokens"]) <= 460
    for tenant in (one, other):
        with pytest.raises(ApiError, match="the limit of 3 requests a minute is reached"):
            tenant.pay(0)
    assert (one.usage.rejected, other.usage.rejected) == (1, 1), "use is reported by each for itself"
    assert alone.pay(0)["x-ratelimit-remaining-requests"] == "2"
    Tenant("u", requests_per_minute=3, ledger=Ledger(file)).pay(0)


def test_a_new_limit_keeps_what_was_used_whoever_hears_of_it_first(file: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepinfer.server.keys._EVERY", 0.0)
    path = tmp_path / "keys.yaml"
    path.write_text("tenants: [{name: t, keys: [k], requests_per_minute: 4}]", encoding="utf-8")
    settings = ServerSettings(api_key_file=str(path))
    one, other = Keys(settings, Ledger(file)), Keys(settings, Ledger(file))

    def left(keys: Keys) -> int:
        tenant = keys.find("k")
        assert tenant is not None
        return int(tenant.pay(0)["x-ratelimit-remaining-requests"])

    assert (left(one), left(other)) == (3, 2)
    path.write_text("tenants: [{name: t, keys: [k], requests_per_minute: 10}]", encoding="utf-8")
    assert (left(one), left(other), left(one)) == (7, 6, 5)
