"""Every hook is called once for its event, whatever becomes of the step or the sequence."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from deepinfer.engine.config import EngineConfig
from deepinfer.engine.engine import Engine
from deepinfer.engine.hooks import Admission
from deepinfer.sampling import SamplingParams
from engine_kit import collect, generate, random_prompts, request, tiny_checkpoint

P = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


class Recorder(Engine):
    """An engine that notes its hooks, and beside each planned step what its ring slot says."""

    def init_pd_split(self) -> None:
        self.calls: Counter[str] = Counter(["init_pd_split"])
        self.admitted: list[tuple[int, int, int]] = []
        self.planned: list[tuple[int, int, int]] = []
        self.broken: str | None = None

    def post_schedule(self, slot: int) -> None:
        self.calls["post_schedule"] += 1
        a = self._runner.ring.slots[slot].a
        for state_slot, index, generation, computed, *_ in a["admitted"].reshape(-1, 6)[: int(a["header"][11])].tolist():
            if computed:
                self.planned.append((generation << 32 | index, state_slot, computed))
        if self.broken == "post_schedule":
            self.broken = None
            raise RuntimeError("a hook broke")

    def load_state_from_store_to_prefill_cache(self, admission: Admission) -> None:
        self.calls["load"] += 1
        assert self._answers.by_handle[admission.seq].request.request_id == admission.request_id
        self.admitted.append((admission.seq, admission.state_slot, admission.tokens))
        if self.broken == "load":
            self.broken = None
            raise RuntimeError("a hook broke")


def recorder(device: str, **settings: Any) -> Recorder:
    settings = {"dtype": "float32", "quiet": True, "num_threads": 1, "block_size": 16, "num_kv_blocks": 256, **settings}
    return Recorder(EngineConfig(model=tiny_checkpoint("llama"), device=device, **settings))


def fail_next_forward(engine: Engine) -> None:
    forward = engine.model.forward

    def broken(*_: Any) -> Any:
        engine.model.forward = forward  # type: ignore[method-assign]
        raise RuntimeError("once")

    engine.model.forward = broken  # type: ignore[method-assign]


def test_hooks_are_called_once_for_each_event(device: str) -> None:
    """Hits, forks, preemption, aborts in every phase and a failed step, all at once."""
    with recorder(device, num_kv_blocks=16, max_num_seqs=6, max_num_batched_tokens=48) as engine:
        prompts = random_prompts((50, 50, 50, 20, 70))
        prompts.append(prompts[0])
        for i, prompt in enumerate(prompts):
            engine.add_request(request(f"r{i}", prompt, P))
        engine.add_request(request("forks", prompts[3], P.clone(temperature=1.0, n=3, seed=1)))
        for at in range(60):
            engine.step()
            if at in (2, 9, 30):
                engine.abort(f"r{(1, 3, 4)[at // 10 % 3]}")
            if at == 45:
                fail_next_forward(engine)
        collect(engine)
        engine.add_request(request("again", prompts[0], P))  # begins with blocks of the index
        collect(engine)
        stats = engine.core_stats()
        assert stats["preemptions"] > 0 and engine.counters.failed_steps == 1
        assert engine.calls["init_pd_split"] == 1
        assert engine.calls["post_schedule"] == stats["steps"] == engine.counters.steps + 1
        assert engine.admitted == engine.planned and len(engine.planned) == engine.calls["load"] >= 4


@pytest.mark.parametrize("hook", ["post_schedule", "load"])
def test_a_hook_that_raises_fails_that_step_only(device: str, hook: str) -> None:
    prompts = random_prompts((40, 20))
    with recorder(device) as engine:
        want = generate(engine, prompts, P)
        engine.broken = hook
        assert [a.finish for a in generate(engine, prompts[:1], P)] == ["error"]
        assert engine.last_failure is not None and "a hook broke" in str(engine.last_failure)
        assert [a.tokens for a in generate(engine, prompts, P)] == [a.tokens for a in want]
