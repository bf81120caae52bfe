"""Who waits for which compilation, and what is kept of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import grammar_kit
from deepinfer import StructuredOutputs
from deepinfer.errors import EngineDeadError, GrammarBusyError, GrammarError
from deepinfer.structured.cache import GrammarCache
from deepinfer.structured.compiler import Compiled

HARD = StructuredOutputs(**grammar_kit.ENDLESS)


def test_many_at_once_compile_one_thing_once() -> None:
    with grammar_kit.service(2) as service, ThreadPoolExecutor(16) as threads:
        wanted = [StructuredOutputs(choice=[f"word {i % 3}"]) for i in range(48)]
        made = list(threads.map(service.compile, wanted))
        stats = service.stats()
        assert stats["compiles"] == stats["cache_misses"] == 3
        assert stats["cache_hits"] + stats["joined"] == 45
        assert len({p.grammar.key for p in made}) == 3
        assert [p.grammar.key for p in made] == [p.grammar.key for p in made[:3]] * 16
        assert stats["compile_seconds_count"] == stats["compile_seconds_le_+Inf"] == 3 and stats["compile_seconds_sum"] > 0
        again = service.compile_all(wanted)
        assert again == made and service.stats()["compiles"] == 3


def test_options_and_vocabulary_are_part_of_the_key() -> None:
    with grammar_kit.service() as service:
        schema = {"type": "object"}
        forms = [
            StructuredOutputs(json=schema),
            StructuredOutputs(json=schema, any_whitespace=False),
            StructuredOutputs(json=schema, max_whitespace=3),
            StructuredOutputs(json=schema, any_order=True),
            StructuredOutputs(choice=['{"type":"object"}']),
        ]
        assert len({service.compile(form).grammar.key for form in forms}) == 5
        strict = StructuredOutputs(json=schema, strict=True)
        assert service.compile(strict).grammar.key == service.compile(forms[0]).grammar.key, "what is held to is the same"


def test_the_cache_keeps_to_its_limit() -> None:
    cache = GrammarCache(100)
    for i in range(20):
        cache.put(str(i), Compiled(bytes(30)))
        assert cache.size <= 100
        cache.get("17")
    assert len(cache) == 3 and cache.get("17") is not None and cache.get("16") is None and cache.evicted == 17
    cache.put("large", Compiled(bytes(101)))
    assert cache.get("large") is None and len(cache) == 3
    cache.put("17", Compiled(bytes(90)))
    assert cache.size == 90 and len(cache) == 1
    cache.clear()
    assert (len(cache), cache.size) == (0, 0)


def test_a_small_cache_compiles_again_and_an_off_one_always() -> None:
    one, other = StructuredOutputs(regex="[a-f]{4}"), StructuredOutputs(regex="[g-m]{4}")
    with grammar_kit.service() as service:
        size = len(service.compile(one).grammar.data)
    with grammar_kit.service(cache_bytes=size + size // 2) as service:
        for form in (one, one, other, one):
            service.compile(form)
        stats = service.stats()
        assert (stats["compiles"], stats["cache_hits"], stats["cache_evicted"], stats["cache_entries"]) == (3, 1, 2, 1)
        assert stats["cache_bytes"] <= size + size // 2
    with grammar_kit.service(cache_bytes=0) as service:
        assert service.compile(one) == service.compile(one)
        assert (service.stats()["compiles"], service.stats()["cache_entries"]) == (2, 0)


def test_an_event_loop_is_not_blocked_and_a_cancelled_wait_ends_its_compilation() -> None:
    async def main() -> None:
        with grammar_kit.service(1, 60.0) as service:
            await service.acompile(StructuredOutputs(regex="a"))  # everything is up
            first, second = (asyncio.create_task(service.acompile(HARD)) for _ in range(2))
            longest, before = 0.0, time.monotonic()
            for _ in range(40):
                await asyncio.sleep(0.01)
                longest, before = max(longest, time.monotonic() - before), time.monotonic()
            assert longest < 1.0, longest
            first.cancel()
            await asyncio.sleep(0.1)
            assert service.stats()["cancelled"] == 0, "the other one still waits"
            second.cancel()
            assert all(isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(first, second, return_exceptions=True))
            assert (await service.acompile(StructuredOutputs(regex="b"))).grammar.data
            stats = service.stats()
            assert (stats["cancelled"], stats["joined"], stats["workers_killed"], stats["compiles"]) == (1, 1, 1, 2)
            assert not service._pending

    asyncio.run(main())


def test_who_waits_for_a_process_too_long_is_told_that_others_keep_them_busy() -> None:
    async def main() -> None:
        with grammar_kit.service(1, 60.0, patience=0.5) as service:
            service.compile(StructuredOutputs(regex="a"))  # the process is up
            hard = asyncio.create_task(service.acompile(HARD))
            while service.stats()["cache_misses"] < 2:
                await asyncio.sleep(0.01)
            before = service.stats()["starved"]
            start = time.monotonic()
            good = StructuredOutputs(regex="b")
            with pytest.raises(GrammarBusyError, match=r"busy for 0\.5 s; try again"):
                await service.acompile(good)
            assert 0.5 <= time.monotonic() - start < 10 and service.stats()["starved"] == before + 1
            await asyncio.sleep(0.5)
            assert not hard.done(), "a compilation that has begun has a limit of its own"
            hard.cancel()
            assert isinstance((await asyncio.gather(hard, return_exceptions=True))[0], asyncio.CancelledError)
            for _ in range(60):  # another process starts, though nobody waits for it all the time
                with contextlib.suppress(GrammarBusyError):
                    assert grammar_kit.accepts(await service.acompile(good), "b"), "it is not remembered as a bad one"
                    return
            raise AssertionError("the process did not come back")

    asyncio.run(main())


def test_a_wait_that_is_cancelled_as_it_begins_leaves_no_compilation() -> None:
    async def main() -> None:
        with grammar_kit.service(1, 60.0) as service:
            await service.acompile(StructuredOutputs(regex="a"))
            for _ in range(3):
                waiting = asyncio.create_task(service.acompile(HARD))
                await asyncio.sleep(0)
                waiting.cancel()
                assert isinstance((await asyncio.gather(waiting, return_exceptions=True))[0], asyncio.CancelledError)
            end = time.monotonic() + 20
            while service._pending or not service.stats()["cancelled"]:
                assert time.monotonic() < end, service._pending
                await asyncio.sleep(0.01)
            assert grammar_kit.accepts(await service.acompile(StructuredOutputs(regex="b")), "b")

    asyncio.run(main())


def test_what_fails_is_told_to_everybody_and_not_kept() -> None:
    with grammar_kit.service() as service, ThreadPoolExecutor(4) as threads:
        bad = StructuredOutputs(grammar="root ::= missing")
        for _ in range(2):
            errors = [f.exception(60) for f in [threads.submit(service.compile, bad) for _ in range(4)]]
            assert all(isinstance(e, GrammarError) and "missing" in str(e) for e in errors)
        assert service.stats()["cache_entries"] == 0 and service.stats()["failures"] >= 2
        good, wrong, absurd = service.compile_all([StructuredOutputs(regex=r) for r in ("a", "(a", "a" * 5000)])
        assert not isinstance(good, GrammarError)
        assert isinstance(wrong, GrammarError) and "not closed" in str(wrong)
        assert isinstance(absurd, GrammarError) and "4096" in str(absurd)


def test_closing_tells_those_who_wait() -> None:
    with grammar_kit.service(1, 60.0) as service:
        found: list[BaseException] = []

        def wait() -> None:
            try:
                service.compile(HARD)
            except BaseException as e:
                found.append(e)

        thread = threading.Thread(target=wait)
        thread.start()
        end = time.monotonic() + 30
        while not service.worker_pids() and time.monotonic() < end:
            time.sleep(0.02)
        service.close()
        thread.join(30)
        assert not thread.is_alive() and isinstance(found[0], GrammarError)
        with pytest.raises(EngineDeadError, match="closed"):
            service.compile(StructuredOutputs(regex="a"))
