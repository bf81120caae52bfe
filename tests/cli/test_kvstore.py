"""``deepinfer kvstore`` on real server processes: what is acknowledged stays, tokens, settings, metrics, commands."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from cli.running import run
from cli.test_surface import assert_one_line
from deepinfer import _core, errors
from deepinfer.cli import kvstore_serve
from kvstore_kit import EACH, Served, chain, content, hex_of, key, served


def put_chain(tier: _core.KvTier, count: int, kind: str = "chat") -> None:
    data = b"".join(content(number) for number in range(1, count + 1))
    assert tier.put("block", chain(count), b"", [EACH] * count, data, kind) == b"s" * count  # type: ignore[arg-type]


def read_chain(tier: _core.KvTier, count: int) -> None:
    """The chain is there, byte for byte."""
    assert tier.check(chain(count))[0] == count
    into = bytearray(count * EACH)
    assert tier.get("block", chain(count), into, EACH) == b"\1" * count
    assert into == b"".join(content(number) for number in range(1, count + 1))


def scrape(server: Served) -> dict[str, float]:
    """Metrics by name with labels; every line is held to the format."""
    with urllib.request.urlopen(f"http://{server.about['metrics']}/metrics", timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            mark, what, name, rest = line.split(" ", 3)
            assert mark == "#" and what in ("HELP", "TYPE") and rest
            if what == "TYPE":
                assert name not in kinds
                kinds[name] = rest
            continue
        match = re.fullmatch(r'([a-z_]+)(\{(?:[a-z]+="(?:[^"\\]|\\.)*",?)+\})? ([0-9.e+-]+)', line)
        assert match, line
        base = re.sub(r"_(bucket|sum|count)$", "", match[1])
        assert match[1] in kinds or kinds[base] == "histogram", line
        assert match[1] + (match[2] or "") not in found
        found[match[1] + (match[2] or "")] = float(match[3])
    assert set(kinds.values()) == {"counter", "gauge", "histogram"}
    return found


def test_a_server_serves_counts_drains_and_is_found_again(tmp_path: Path) -> None:
    with served(tmp_path / "kv", "quotas=one=1GiB") as server:
        tier = _core.KvTier(server.address, tenant="one")
        put_chain(tier, 20, "agent")
        read_chain(tier, 20)
        assert tier.get("block", key(99), bytearray(EACH), EACH) == b"\0"
        found = scrape(server)
        assert found['deepinfer_kvstore_hits_total{tier="store",class="agent"}'] == 20
        assert found['deepinfer_kvstore_hit_bytes_total{tier="store",class="agent"}'] == 20 * EACH
        assert found['deepinfer_kvstore_hits_total{tier="store",class="chat"}'] == 0
        assert found['deepinfer_kvstore_misses_total{tier="store"}'] == 1
        assert found['deepinfer_kvstore_writes_total{outcome="stored"}'] == 20
        assert found['deepinfer_kvstore_objects{kind="block"}'] == 20
        assert found['deepinfer_kvstore_request_seconds_count{op="check"}'] == 1
        assert found['deepinfer_kvstore_request_seconds_bucket{op="commit",le="+Inf"}'] >= 1
        with urllib.request.urlopen(f"http://{server.about['metrics']}/health", timeout=30) as answer:
            assert answer.read() == b"ok\n"

        stats = run("kvstore", "stats", "--address", server.address, "--json")
        numbers = json.loads(stats.stdout)
        assert (numbers["blocks"], numbers["counts"]["hits_agent"], numbers["server"]["checks"]) == (20, 20, 1)
        assert numbers["tenants"] == [{"name": "one", "quota": 1 << 30, "bytes": 20 * EACH}]
        table = run("kvstore", "stats", "--address", server.address).stdout.decode()
        assert re.search(r"^  blocks +20$", table, re.MULTILINE) and "one" in table

        address = ("--address", server.address)
        asked = json.loads(run("kvstore", "check", *address, "--tenant", "one", "--json", *hex_of(chain(22))).stdout)
        assert (asked["blocks"], asked["keys"], asked["tokens"]) == (20, 22, 20 * 128)
        others = run("kvstore", "check", *address, *hex_of(chain(22)))
        assert others.stdout == b"0 of 22 blocks are there: 0 tokens\n"
        scrubbed = json.loads(run("kvstore", "scrub", *address, "--json").stdout)
        assert (scrubbed["objects"], scrubbed["damaged"], scrubbed["errors"]) == (20, 0, 0)
        assert json.loads(run("kvstore", "gc", *address, "--json").stdout)["segments_deleted"] == 0
        assert server.end() == 0
        assert server.process.stderr is not None
        said = server.process.stderr.read()
        assert "listening on 127.0.0.1:" in said and said.endswith("kvstore: drained\n")

    table = run("kvstore", "stats", "--address", f"dir:{tmp_path / 'kv'}").stdout.decode()
    assert "blocks" in table and "of capacity" not in table  # that is a setting of the server's
    offline = json.loads(run("kvstore", "stats", "--address", f"dir:{tmp_path / 'kv'}", "--json").stdout)
    assert (offline["blocks"], offline["segments"]) == (20, 1)
    with served(tmp_path / "kv") as server:
        read_chain(_core.KvTier(server.address, tenant="one"), 20)


class Writer(threading.Thread):
    """Puts blocks of one chain, one by one, until the server is gone; knows what was acknowledged."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.tier = _core.KvTier(address)
        self.acknowledged = 0

    def run(self) -> None:
        before = b""
        while self.tier.put("block", key(self.acknowledged + 1), before, [EACH], content(self.acknowledged + 1)) == b"s":
            self.acknowledged += 1
            before += key(self.acknowledged)

    def wait_for(self, count: int) -> None:
        end = time.monotonic() + 60
        while self.acknowledged < count:
            assert self.is_alive() and time.monotonic() < end
            time.sleep(0.002)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_acknowledged_while_a_server_ends_is_there_afterwards(tmp_path: Path, number: signal.Signals) -> None:
    with served(tmp_path / "kv") as server:
        writer = Writer(server.address)
        writer.start()
        writer.wait_for(30)
        assert server.end(number) == (0 if number == signal.SIGTERM else -number)
        writer.join(60)
        assert not writer.is_alive()
    with served(tmp_path / "kv") as server:
        read_chain(_core.KvTier(server.address), writer.acknowledged)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with served(tmp_path / "kv", "limits.drain=60s") as server:
        tier = _core.KvTier(server.address)
        put_chain(tier, 3)
        server.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 30
        while time.monotonic() < end:  # draining waits for the tier's connections
            try:
                urllib.request.urlopen(f"http://{server.about['metrics']}/health", timeout=30)
            except urllib.error.HTTPError as error:
                assert (error.code, error.read()) == (503, b"draining\n")
                break
            time.sleep(0.01)
        else:
            pytest.fail("the server never said that it drains")
        assert server.process.poll() is None
        assert server.end(seconds=10) == -signal.SIGTERM
    with served(tmp_path / "kv") as server:
        read_chain(_core.KvTier(server.address), 3)


def test_each_role_needs_its_own_token(tmp_path: Path) -> None:
    tokens = {role: f"a-long-token-of-{role}" for role in ("check", "get", "put", "admin")}
    admin = tmp_path / "admin.token"
    admin.write_text(tokens["admin"] + "\n")
    env = {f"DEEPINFER_KVSTORE_TOKEN_{role.upper()}": token for role, token in tokens.items() if role != "admin"}
    with served(tmp_path / "kv", f"tokens.admin_file={admin}", env=env) as server:
        secrets = {role: token.encode() for role, token in tokens.items()}
        put_chain(_core.KvTier(server.address, tokens=secrets), 3)
        address = ("--address", server.address)
        wrong = tmp_path / "wrong.token"
        wrong.write_text(tokens["get"])
        for refused in (run("kvstore", "stats", *address), run("kvstore", "stats", *address, "--token-file", str(wrong))):
            assert_one_line(refused, "does not accept the token of role admin")
            assert not any(token.encode() in refused.stderr for token in tokens.values())
        assert_one_line(run("kvstore", "check", *address, *hex_of(key(1))), "does not accept the token of role check")
        stats = run("kvstore", "stats", *address, "--token-file", str(admin), "--json")
        assert json.loads(stats.stdout)["server"]["refused"] >= 3
        # Without tokens nothing is found and nothing is written; the reason can be asked for.
        stranger = _core.KvTier(server.address)
        assert stranger.get("block", key(1), bytearray(EACH), EACH) == b"\0"
        assert stranger.put("block", key(9), b"", [1], b"x") == b"f"
        with pytest.raises(errors.KvStoreRefusedError, match="role get"):
            _core.KvOperator(server.address, role="get").check(key(1))
        # A role proved is no other role.
        with pytest.raises(errors.KvStoreRefusedError, match="admin"):
            _core.KvOperator(server.address, role="get", token=secrets["get"]).admin('{"do": "stats"}')
        assert server.end() == 0
        assert server.process.stderr is not None and server.process.stdout is not None
        said = server.process.stderr.read() + json.dumps(server.about)
        assert not any(token in said for token in tokens.values())


def test_a_unix_socket_and_settings_from_a_file_and_the_environment(tmp_path: Path) -> None:
    settings = tmp_path / "kv.toml"
    settings.write_text(
        f'root = "{tmp_path / "other"}"\nlisten = ["127.0.0.1:0", "unix:{tmp_path / "kv.sock"}"]\n[store]\npolicy = "lru"\n'
    )
    env = {"DEEPINFER_KVSTORE_STORE_CAPACITY": "1GiB"}
    argv = f"listen=unix:{tmp_path / 'kv.sock'}"
    with served(tmp_path / "kv", argv, "metrics=off", settings=settings, env=env) as server:
        assert server.about["policy"] == "lru" and server.about["capacity"] == 1 << 30 and server.about["metrics"] is None
        assert server.about["root"] == str(tmp_path / "kv") and not (tmp_path / "other").exists()
        assert server.address == f"unix:{tmp_path / 'kv.sock'}"
        assert (tmp_path / "kv.sock").stat().st_mode & 0o777 == 0o600
        tier = _core.KvTier(server.address)
        put_chain(tier, 4)
        read_chain(tier, 4)
        assert server.end() == 0
    assert not (tmp_path / "kv.sock").exists()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls_between_client_and_server(tmp_path: Path) -> None:
    key_file, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    argv += ["-subj", "/CN=kv", "-addext", "subjectAltName=DNS:kv.test", "-keyout", str(key_file), "-out", str(certificate)]
    argv += ["-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(argv, check=True, capture_output=True)
    with served(tmp_path / "kv", f"tls.certificate={certificate}", f"tls.key={key_file}") as server:
        tier = _core.KvTier(server.address, tls_ca=certificate, tls_name="kv.test")
        put_chain(tier, 3)
        read_chain(tier, 3)
        known = ("--address", server.address, "--tls-ca", str(certificate))
        assert json.loads(run("kvstore", "stats", *known, "--tls-name", "kv.test", "--json").stdout)["blocks"] == 3
        assert_one_line(run("kvstore", "stats", *known, "--tls-name", "other.test"), "certificate", code=1)
        plain = run("kvstore", "stats", "--address", server.address, "--timeout", "2")
        assert_one_line(plain, server.address.removeprefix("tcp://"), code=1)
        assert server.end() == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--set", "store.capacity=lots"), 'store.capacity: "lots" is no size'),
        (("--set", "store.sise=1"), "--set store.sise names no setting: deepinfer kvstore serve --print-settings"),
        (("--set", "store.capacity"), "give KEY=VALUE"),
        (("--set", "media.kind=striped"), "media.domains: 0 are given: name exactly 12"),
        (("--set", "listen=0.0.0.0:0"), "can be reached from elsewhere: give tokens for"),
        (("--set", "listen=nowhere"), "listen: "),
        (("--settings", "/nowhere/kv.toml"), "settings /nowhere/kv.toml"),
        (("--set", "root=relative"), "root: relative is no absolute path"),
        (("--set", "tls.key=/k"), "tls.certificate"),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_settings_that_make_no_sense_take_one_line(tmp_path: Path, argv: tuple[str, ...], says: str) -> None:
    result = run("kvstore", "serve", "--set", f"root={tmp_path / 'kv'}", "--set", "listen=127.0.0.1:0", "--set", "metrics=off", *argv)
    assert_one_line(result, says)


def test_the_printed_settings_can_be_used(tmp_path: Path) -> None:
    text = run("kvstore", "serve", "--print-settings").stdout.decode()
    (tmp_path / "kv.toml").write_text(text)
    with served(tmp_path / "kv", settings=tmp_path / "kv.toml") as server:
        assert server.about["media"] == "local"


def test_a_newer_format_and_a_taken_root_are_refused(tmp_path: Path) -> None:
    settings = ("--set", f"root={tmp_path / 'kv'}", "--set", "listen=127.0.0.1:0", "--set", "metrics=off")
    with served(tmp_path / "kv") as server:
        assert_one_line(run("kvstore", "serve", *settings), "is open in another process", code=1)
        other = ("--set", f"root={tmp_path / 'other'}")
        taken = run("kvstore", "serve", *settings, *other, "--set", f"listen={server.about['addresses'][0]}")
        assert_one_line(taken, "name another port", code=1)
        taken = run("kvstore", "serve", *settings, *other, "--set", f"metrics={server.about['metrics']}")
        assert_one_line(taken, "name another port", code=1)
        assert_one_line(run("kvstore", "stats", "--address", f"dir:{tmp_path / 'kv'}"), "is open in another process", code=1)
    form = tmp_path / "kv" / "FORMAT"
    form.write_text(form.read_text().replace("kvstore 1", "kvstore 2"))
    assert_one_line(run("kvstore", "serve", *settings), "newer than this version reads")


HEX = "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "give the chain once"),
        (("../../../../etc/passwd",), "key 1 is '../../../../etc/passwd': give 32 lower-case hex digits"),
        ((HEX, HEX.upper()), "key 2 is"),
        (("x" * 100_000,), "…': give 32"),
        (("--keys", "/nowhere"), "--keys /nowhere: No such file"),
        (("--tokens", "/nowhere"), "--tokens needs --identity"),
        (("--slices", "-1", HEX), "--slices -1"),
        (("--address", "http://x", HEX), "no address of a KV store"),
        (("--address", "dir:/nowhere/kv", HEX), "/nowhere/kv holds no KV store"),
        (("--address", "tcp://127.0.0.1:1,127.0.0.1:2", HEX), "name one"),
        (("--address", "agent:/run/agent.sock", HEX), "ask the store behind it"),
        (("--tls-name", "kv.example", HEX), "--tls-ca"),
        (("--token-file", "/nowhere", HEX), "--token-file /nowhere"),
        (("--timeout", "nan", HEX), "timeout"),
    ],
    ids=range(14),
)
def test_what_is_no_chain_or_no_server_takes_one_line(argv: tuple[str, ...], says: str) -> None:
    assert_one_line(run("kvstore", "check", *argv), says)


def test_keys_from_a_pipe_and_too_many_of_them(tmp_path: Path) -> None:
    with served(tmp_path / "kv") as server:
        put_chain(_core.KvTier(server.address), 3)
        piped = run("kvstore", "check", "--address", server.address, "--keys", "-", stdin="\n".join(hex_of(chain(5))).encode())
        assert piped.stdout == b"3 of 5 blocks are there: 384 tokens\n"
        many = "\n".join(hex_of(key(1)) * 10_000).encode()
        assert_one_line(run("kvstore", "check", "--address", server.address, "--keys", "-", stdin=many), "8192 at most")
        assert_one_line(run("kvstore", "check", "--keys", "-", stdin=b"\xff\xfe"), "not UTF-8")


def test_tokens_become_the_keys_of_an_engine(tmp_path: Path) -> None:
    tokens = [number % 100 for number in range(300)]
    identity = {"block_tokens": 64, "model": "m", "kv_format": "bf16", "salt": "00ff"}
    keys = _core.kv_keys(tokens, block_tokens=64, model="m", kv_format="bf16", salt=b"\x00\xff")
    assert len(keys) == 2 * 16  # 300 tokens are two whole objects
    assert keys[:16] == _core.kv_keys(tokens[:128], block_tokens=64, model="m", kv_format="bf16", salt=b"\x00\xff")
    for other in ({"salt": b"\x00\xfe"}, {"model": "n"}, {"block_tokens": 128}):
        assert (
            _core.kv_keys(tokens, **{"block_tokens": 64, "model": "m", "kv_format": "bf16", "salt": b"\x00\xff", **other})[:16] != keys[:16]
        )  # type: ignore[arg-type]
    (tmp_path / "identity").write_text(json.dumps(identity))
    (tmp_path / "tokens").write_text(json.dumps(tokens))
    with served(tmp_path / "kv") as server:
        assert _core.KvTier(server.address).put("block", keys, b"", [5, 5], b"0123456789") == b"ss"
        argv = (
            "kvstore",
            "check",
            "--address",
            server.address,
            "--tokens",
            str(tmp_path / "tokens"),
            "--identity",
            str(tmp_path / "identity"),
        )
        assert json.loads(run(*argv, "--json").stdout)["blocks"] == 2
        (tmp_path / "identity").write_text(json.dumps({**identity, "colour": "red"}))
        assert_one_line(run(*argv), "colour is unknown")
        (tmp_path / "identity").write_text(json.dumps({**identity, "block_tokens": 48}))
        assert_one_line(run(*argv), "block_tokens is 48")
        (tmp_path / "tokens").write_text("1 2 many")
        assert_one_line(run(*argv), "holds no token ids")


def test_nobody_and_somebody_else_at_the_address(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        began = time.monotonic()
        assert_one_line(run("kvstore", "stats", "--address", address, "--timeout", "0.5"), address.removeprefix("tcp://"), code=1)
        assert time.monotonic() - began < 20
    assert_one_line(run("kvstore", "stats", "--address", address, "--timeout", "0.5"), "Connection refused", code=1)
    with served(tmp_path / "kv") as server:
        metrics = f"tcp://{server.about['metrics']}"
        assert_one_line(run("kvstore", "stats", "--address", metrics, "--timeout", "8"), "KV store", code=1)


def test_noise_and_half_open_connections_cost_nobody_else(tmp_path: Path) -> None:
    with served(tmp_path / "kv", "limits.max_unknown=8", "limits.handshake=2s") as server:
        host, port = server.address.removeprefix("tcp://").split(":")
        tier = _core.KvTier(server.address)
        put_chain(tier, 3)
        half_open = [socket.create_connection((host, int(port)), 10) for _ in range(40)]
        for number in range(20):
            with socket.create_connection((host, int(port)), 10) as noise:
                noise.sendall(os.urandom(4096) if number % 2 else b"\xff" * 64)
        read_chain(_core.KvTier(server.address), 3)
        resident = int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{server.process.pid}/status").read_text())[0])
        assert resident < 400 << 10, f"{resident} KiB"  # Python and the core themselves; not what was announced
        for each in half_open:
            each.close()
        assert json.loads(run("kvstore", "stats", "--address", server.address, "--json").stdout)["server"]["refused"] >= 1
        assert server.end() == 0


def test_a_server_says_why_its_disk_fails(tmp_path: Path) -> None:
    with served(tmp_path / "kv") as server:
        tier = _core.KvTier(server.address)
        put_chain(tier, 3)
        shutil.rmtree(tmp_path / "kv" / "segments")
        assert tier.put("block", key(9), b"", [EACH], content(9)) == b"f"  # not acknowledged: the file is nobody's
        stats = json.loads(run("kvstore", "stats", "--address", server.address, "--json").stdout)
        assert "deleted" in stats["last_failure"]
        assert "deleted" in run("kvstore", "stats", "--address", server.address).stdout.decode()
        time.sleep(2)  # it looks every second
        assert server.end() == 0
        assert server.process.stderr is not None
        assert "kvstore: the store fails: " in server.process.stderr.read()


def test_what_fails_is_said_at_once_and_then_once_a_minute(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [100.0]
    trouble: list[tuple[int, str | None]] = [(0, None)]
    monkeypatch.setattr(kvstore_serve.time, "monotonic", lambda: now[0])
    complaints = kvstore_serve.Complaints("it fails", lambda: trouble[0])

    def said(seconds: float, count: int, why: str | None) -> str:
        now[0], trouble[0] = now[0] + seconds, (count, why)
        complaints.look()
        return capsys.readouterr().err

    assert said(1, 0, None) == ""
    assert said(1, 1, "no disk") == "kvstore: it fails: no disk\n"
    assert said(1, 5, "no disk") == said(30, 9, "no disk") == ""
    assert said(30, 9, "no room") == "kvstore: it fails: no room (8 times)\n"
    assert said(600, 9, "no room") == ""

    class Closed(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError

    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", Closed())
        assert said(1, 10, "no reader") == ""
