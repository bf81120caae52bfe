"""Two engines under random requests, aborts, broken pulls and offers, forged and replayed records; in the end nothing is held."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import replace
from typing import Any

import pytest

import engine_kit
from deepinfer.engine.engine import Engine
from deepinfer.engine.roles.transport import CoreTransport
from deepinfer.errors import DeepInferError
from deepinfer.kvcache.handover import Handover
from deepinfer.sampling import SamplingParams
from engine_kit import make_engine, random_prompts, request, same_bits, tiny_checkpoint
from roles_kit import SETTINGS, Pair

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
KINDS = (
    GREEDY,
    GREEDY.clone(max_tokens=1),
    GREEDY.clone(ignore_eos=False),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=24, presence_penalty=0.5, frequency_penalty=0.3, logprobs=2),
    SamplingParams(temperature=1.2, max_tokens=10, min_tokens=6, repetition_penalty=1.3, logit_bias={5: 3.0}, stop_token_ids=[11, 12]),
)
PROMPTS = random_prompts((3, 16, 33, 64, 90, 150), seed=3)
PROMPTS += [PROMPTS[5][:100] + p for p in random_prompts((9, 40), seed=4)]
LOOP = random_prompts((7,), seed=5)[0]
PROMPTS.append(LOOP * 12)  # what drafts are found in


def make(number: int, name: str) -> Any:
    """One of all the requests there are: every prompt with every kind."""
    params = KINDS[number % len(KINDS)]
    eos = tuple(range(3, 40)) if number % 3 == 0 else (2,)  # often the first token already
    prompt = PROMPTS[number // len(KINDS)]
    return request(name, prompt, params, seeds=(number,), stream=number % 2 == 0, eos_ids=eos)


class Wire(Pair):
    """A pair over the core's transfer whose records and calls a test may spoil."""

    def __init__(self, monkeypatch: Any, device: str, kind: str, rng: random.Random, **settings: Any) -> None:
        self.rng, self.spoil, self.old = rng, 0.0, list[bytes]()
        self.forged = 0
        self.hurt: set[str] = set()  # whose ticket somebody else has used: whoever holds a ticket can end the offer
        super().__init__(monkeypatch, device, Engine, **settings)
        ends = []
        for engine in (self.prompt, self.completion):
            role = engine._role
            end = CoreTransport(kind, engine._layout.canonical, b"t" * 32, "127.0.0.1:0", 32)
            ends.append(end)
            role._transport.close()
            role._transport = end
        self.wires = ends

    def pass_on(self, request_id: str) -> None:
        record = self.records[request_id]
        if self.rng.random() < self.spoil:
            self.forge(record)
        self.old.append(record)
        super().pass_on(request_id)

    def forge(self, record: bytes) -> None:
        """Takes over what is not on offer, or not like this: refused or ended, never run on with foreign KV."""
        self.forged += 1
        name = f"forged {self.forged}"
        made = Handover.from_bytes(record)
        self.hurt.add(made.request_id)
        how = self.rng.randrange(6)
        if how == 0:
            bad = bytearray(record)
            bad[self.rng.randrange(len(bad))] ^= 1 << self.rng.randrange(8)
            spoilt = bytes(bad)
        elif how == 1:
            spoilt = record[: self.rng.randrange(len(record))]
        elif how == 2:  # one request under another's ticket
            other = Handover.from_bytes(self.rng.choice(self.old)) if self.old else made
            self.hurt.add(other.request_id)
            spoilt = replace(made, request_id=name, ticket=other.ticket).to_bytes()
        elif how == 3:
            ticket = bytearray(made.ticket)
            ticket[self.rng.randrange(len(ticket))] ^= 1
            spoilt = replace(made, request_id=name, ticket=bytes(ticket)).to_bytes()
        elif how == 4:
            spoilt = replace(made, request_id=name, produced=[*made.produced[:-1], (made.produced[-1] + 1) % 300 + 3]).to_bytes()
        else:
            spoilt = replace(made, request_id=name, max_new=0 if self.rng.random() < 0.5 else 10_000).to_bytes()
        with contextlib.suppress(DeepInferError):
            self.completion.take_over(spoilt)

    def close(self) -> None:
        super().close()
        for end in self.wires:
            end.close()


SIDES: tuple[dict[str, Any], ...] = (
    {},
    {"speculative": "ngram", "num_draft_tokens": 3},
    {"num_kv_blocks": 20},
    {"num_kv_blocks": 20, "zero_overhead": False, "speculative": "ngram"},
    {"num_kv_blocks": 20, "swap_space_gib": 0.001},
    {"enable_prefix_caching": False, "max_num_seqs": 2},
)


@pytest.fixture(scope="module")
def wanted(device: str) -> list[engine_kit.Answer]:
    """What one engine answers."""
    total = len(KINDS) * len(PROMPTS)
    with make_engine(tiny_checkpoint("llama"), device, **SETTINGS) as engine:
        for number in range(total):
            engine.add_request(make(number, f"r{number}"))
        found = engine_kit.collect(engine)
    return [found[f"r{number}", 0] for number in range(total)]


def fuzz(monkeypatch: Any, device: str, seed: int, rounds: int, wanted: list[engine_kit.Answer]) -> None:
    """``rounds`` random acts, one step of each engine after each; then everything is finished and looked at."""
    rng = random.Random(seed)
    side = SIDES[seed % len(SIDES)]
    lease = rng.choice((0.3, 30.0))
    kind = ("shm", "tcp")[seed // len(SIDES) % 2]
    pair = Wire(monkeypatch, device, kind, rng, completion=side, handover_lease=lease)
    sent: dict[str, int] = {}
    aborted: set[str] = set()
    pair.spoil = 0.3
    for number in range(rounds):
        act = rng.random()
        if act < 0.4:
            which = rng.randrange(len(wanted))
            sent[f"{number}"] = which
            pair.prompt.add_request(make(which, f"{number}"))
        elif act < 0.5 and sent:
            name = rng.choice(list(sent))
            answer = pair.answers.get(name)
            if name not in aborted and (answer is None or answer.finish is None):
                aborted.add(name)
                for engine in (pair.prompt, pair.completion):
                    engine.abort(name)
        elif act < 0.52:
            time.sleep(rng.choice((0.001, 0.02, min(lease, 0.4) + 0.05)))
        elif act < 0.55 and pair.old:
            old = Handover.from_bytes(rng.choice(pair.old))
            pair.hurt.add(old.request_id)
            with contextlib.suppress(DeepInferError):
                pair.completion.take_over(replace(old, request_id=f"forged r{number}").to_bytes())
        pair.step()
    pair.run(seconds=60)
    same = 0
    for name, which in sent.items():
        answer = pair.answers.get(name)
        if name in aborted:
            continue
        assert name not in pair.refused or name in pair.hurt, pair.refused[name]
        assert name in pair.refused or (answer is not None and answer.finish is not None), name
        if answer is None or answer.finish == "error":
            assert lease < 1 or name in pair.hurt, (name, answer)
            continue
        assert same_bits(wanted[which], answer), (seed, name, which, wanted[which], answer)
        same += 1
    assert same
    for name, answer in pair.answers.items():
        if name.startswith("forged"):
            assert answer.finish == "error" and not answer.tokens, (name, answer)
    pair.shelf.offers.clear()
    pair.check_rest()
    assert not pair.prompt._role._transport._end.counts()["offers"]
    pair.close()


@pytest.mark.parametrize("seed", [3, 7])
def test_whatever_happens_to_a_hand_over(monkeypatch: pytest.MonkeyPatch, device: str, seed: int, wanted: list[engine_kit.Answer]) -> None:
    fuzz(monkeypatch, device, seed, 80, wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(36))
def test_whatever_happens_to_many_hand_overs(
    monkeypatch: pytest.MonkeyPatch, device: str, seed: int, wanted: list[engine_kit.Answer]
) -> None:
    fuzz(monkeypatch, device, seed, 400, wanted)
