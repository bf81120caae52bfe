"""A served KV store over mounted directories, stripes, and a real S3 service."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from cli.running import run
from cli.test_kvstore import put_chain, read_chain, scrape
from cli.test_surface import assert_one_line
from deepinfer import _core
from kvstore_kit import (
    ACCESS,
    EACH,
    SECRET,
    Valkey,
    chain,
    content,
    hex_of,
    key,
    needs_valkey,
    needs_weed,
    seaweedfs,
    served,
    valkey,
)


def test_objects_in_a_mounted_directory(tmp_path: Path) -> None:
    media = ("media.kind=objects", f"media.directory={tmp_path / 'mount'}")
    for _ in range(2):
        with served(tmp_path / "kv", *media) as server:
            tier = _core.KvTier(server.address)
            if not tier.check(chain(8))[0]:
                put_chain(tier, 8)
            read_chain(tier, 8)
            assert server.end() == 0
    assert len(list((tmp_path / "mount").iterdir())) >= 1


def test_stripes_over_twelve_directories_lose_any_two_and_are_repaired(tmp_path: Path) -> None:
    domains = [tmp_path / f"d{at}" for at in range(12)]
    settings = tmp_path / "kv.toml"
    listed = ", ".join(f'"{domain}"' for domain in domains)
    settings.write_text(f'[media]\nkind = "striped"\ndomains = [{listed}]\nrepair_every = "200ms"\n')
    with served(tmp_path / "kv", settings=settings) as server:
        put_chain(_core.KvTier(server.address), 12)
        assert server.end() == 0
    for lost in (domains[2], domains[7]):
        shutil.rmtree(lost)
    with served(tmp_path / "kv", settings=settings) as server:
        tier = _core.KvTier(server.address)
        read_chain(tier, 12)
        end = time.monotonic() + 60
        while scrape(server)["deepinfer_kvstore_repair_backlog"] > 0 or not list(domains[2].glob("*.seg")):
            assert time.monotonic() < end
            time.sleep(0.1)
        # Made again: two others may be lost now.
        whole = {path.name for path in domains[0].iterdir()}
        assert all({path.name for path in domain.iterdir()} == whole for domain in domains)
        damaged = next(iter(domains[0].glob("*.seg")))
        damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
        scrub = run("kvstore", "scrub", "--address", server.address, "--json")
        report = json.loads(scrub.stdout)
        assert report["shards_damaged"] == 1 and report["backlog"] == 0 and scrub.returncode == 1
        again = run("kvstore", "scrub", "--address", server.address, "--json")
        assert json.loads(again.stdout)["shards_damaged"] == 0 and again.returncode == 0
        read_chain(tier, 12)
        assert server.end() == 0


@needs_weed
def test_two_tenants_with_one_prompt_share_nothing_through_s3(tmp_path: Path) -> None:
    """The same tokens under two salts: no hit, no shared object; each finds its own again after a restart of the server."""
    tokens = list(range(512))
    keys = {name: _core.kv_keys(tokens, block_tokens=128, model="m", salt=name.encode()) for name in ("one", "two")}
    assert not set(hex_of(keys["one"])) & set(hex_of(keys["two"]))
    data = b"".join(content(number) for number in range(4))
    with seaweedfs(tmp_path / "weed", "tenants") as endpoint:
        settings = tmp_path / "kv.toml"
        settings.write_text(f'[media]\nkind = "objects"\ns3 = {{ endpoint = "{endpoint}", bucket = "tenants", timeout = "20s" }}\n')
        env = {"DEEPINFER_KVSTORE_S3_ACCESS_KEY": ACCESS, "DEEPINFER_KVSTORE_S3_SECRET_KEY": SECRET}
        with served(tmp_path / "kv", settings=settings, env=env) as server:
            one, two = (_core.KvTier(server.address, tenant=name) for name in ("one", "two"))
            end = time.monotonic() + 60
            while (put := one.put("block", keys["one"], b"", [EACH] * 4, data)) == b"ffff":  # until the service has volumes
                assert time.monotonic() < end
                time.sleep(0.2)
            assert put == b"ssss"
            # The other tenant's own keys are not there, and the first one's are not shown to it.
            into = bytearray(4 * EACH)
            assert two.check(keys["two"], 4) == (0, [], 0) and two.check(keys["one"], 4) == (0, [], 0)
            assert two.get("block", keys["one"], into, EACH) == b"\0\0\0\0" and not any(into)
            assert two.put("block", keys["two"], b"", [EACH] * 4, data) == b"ssss"
            stats = json.loads(run("kvstore", "stats", "--address", server.address, "--json").stdout)
            assert stats["blocks"] == 8 and stats["counts"]["exists"] == 0
            assert {tenant["name"]: tenant["bytes"] for tenant in stats["tenants"]} == {"one": 4 * EACH, "two": 4 * EACH}
            assert server.end() == 0
        with served(tmp_path / "kv", settings=settings, env=env) as server:
            for name in ("one", "two"):
                tier = _core.KvTier(server.address, tenant=name)
                assert tier.check(keys[name])[0] == 4
                assert tier.get("block", keys[name], into, EACH) == b"\1\1\1\1" and into == data
            assert _core.KvTier(server.address, tenant="three").check(keys["one"])[0] == 0
            assert server.end() == 0


@needs_weed
@needs_valkey
def test_servers_over_one_bucket_find_each_others_objects_while_valkey_lives(tmp_path: Path) -> None:
    def eventually(is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < end
            time.sleep(0.05)

    with seaweedfs(tmp_path / "weed", "shared") as endpoint, valkey("--requirepass", "hush hush") as directory:
        settings = tmp_path / "kv.toml"
        settings.write_text(
            f'[media]\nkind = "objects"\ns3 = {{ endpoint = "{endpoint}", bucket = "shared", timeout = "20s" }}\n'
            f'[directory]\nservers = ["{directory.url}"]\ntimeout = "450ms"\nretry = "200ms"\n'
        )
        env = {
            "DEEPINFER_KVSTORE_S3_ACCESS_KEY": ACCESS,
            "DEEPINFER_KVSTORE_S3_SECRET_KEY": SECRET,
            "DEEPINFER_KVSTORE_DIRECTORY_PASSWORD": "hush hush",
        }
        with served(tmp_path / "a", settings=settings, env=env) as a, served(tmp_path / "b", settings=settings, env=env) as b:
            assert a.about["directory"] is True and b.about["directory"] is True
            one, two = _core.KvTier(a.address, tenant="t"), _core.KvTier(b.address, tenant="t")
            data = b"".join(content(number) for number in range(1, 9))
            eventually(lambda: one.put("block", chain(8), b"", [EACH] * 8, data) == b"s" * 8)  # once the service has volumes
            eventually(lambda: two.check(chain(8))[0] == 8)
            read_chain(two, 8)
            assert two.put("block", chain(2, 9), chain(8), [EACH] * 2, content(9) + content(10)) == b"ss"
            eventually(lambda: one.check(chain(10))[0] == 10)
            read_chain(one, 10)
            assert _core.KvTier(b.address, tenant="other").check(chain(8))[0] == 0
            found = scrape(b)
            assert found['deepinfer_kvstore_hits_total{tier="elsewhere",class="chat"}'] == 8
            assert found["deepinfer_kvstore_directory_up"] == 1 and found['deepinfer_kvstore_directory_total{what="told"}'] == 2
            # It hangs, then dies: misses of what the other wrote, in time, and nothing else.
            into = bytearray(EACH)
            directory.process.send_signal(signal.SIGSTOP)
            for end in (lambda: None, directory.kill):
                end()
                begin = time.monotonic()
                assert two.check(chain(10))[0] == 0 and two.get("block", key(1), into, EACH) == b"\0"
                assert two.get("block", key(9), into, EACH) == b"\1" and into == content(9)
                assert one.check(chain(10))[0] == 8
                assert time.monotonic() - begin < 5
            assert one.put("block", key(20), b"", [EACH], content(20)) == b"s"
            eventually(lambda: scrape(b)["deepinfer_kvstore_directory_up"] == 0)
            # Back, and empty: all is told again.
            again = Valkey.start(directory.port, "--requirepass", "hush hush")
            try:
                eventually(lambda: two.check(chain(10))[0] == 10 and two.check(key(20))[0] == 1)
                read_chain(two, 10)
            finally:
                again.kill()
            assert a.end() == 0 and b.end() == 0
    # A store that cannot be told of others serves all the same; a setting that makes no sense is one line.
    with served(tmp_path / "c", f"media.directory={tmp_path / 'm'}", "media.kind=objects", f"directory.servers={directory.url}") as c:
        assert c.about["directory"] is False
        put_chain(_core.KvTier(c.address), 4)
        read_chain(_core.KvTier(c.address), 4)
        assert c.end() == 0
    objects = ("--set", "media.kind=objects", "--set", f"media.directory={tmp_path}")
    assert_one_line(run("kvstore", "serve", "--set", "directory.servers=http://x", *objects), "directory.servers[0]")
    assert_one_line(run("kvstore", "serve", "--set", f"directory.servers={directory.url}"), "media.kind")


def test_a_quota_holds_one_tenant_and_no_other(tmp_path: Path) -> None:
    with served(tmp_path / "kv", f"quotas=small={4 * EACH}") as server:
        small, large = (_core.KvTier(server.address, tenant=name) for name in ("small", "large"))
        for number in range(1, 11):
            assert small.put("block", key(number), b"", [EACH], content(number)) == b"s"
            assert large.put("block", key(number + 100), b"", [EACH], content(number)) == b"s"
        into = bytearray(EACH)
        kept = [small.get("block", key(number), into, EACH) for number in range(1, 11)]
        assert kept.count(b"\1") == 4
        assert all(large.get("block", key(number + 100), into, EACH) == b"\1" for number in range(1, 11))
        assert scrape(server)['deepinfer_kvstore_evictions_total{reason="quota"}'] == 6
        assert server.end() == 0
