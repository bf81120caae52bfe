"""Random requests for a small DeepSeek-V4.1, and random arrangements in which each must give the bits that it gives alone.

A ``Case`` is what is asked, a function of a seed: prompts with common beginnings, images, several answers, stops, log-probabilities,
grammars, aborts. ``Case.plays`` are arrangements of it: cache forms, truncation, chunks, pools that are too small, swaps, hits, snapshots,
drafts of which some are right, failed steps. All engines share one model, so only one may have work at a time.

Not exact, and hence only checked for leaks and errors: hits under ``replay``, and hits with a truncated prefill that keeps fewer tokens
than the exact bound (a snapshot then knows more than the truncated prompt would).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

import differential_kit as kit
from deepinfer import LLM, RequestOutput, SamplingParams
from deepinfer.models import load_model, resolve_model
from deepinfer.models.base import Drafts
from deepinfer.models.deepseek_v41.forward import DeepseekV41Model
from deepinfer.models.deepseek_v41.make_checkpoint import make_checkpoint
from deepinfer.worker.sync_guard import allow_device_sync
from deepseek_v41.weights_kit import config

MAX_LEN = 128
IMAGE, EOS = 2046, 1
NARROW: dict[str, Any] = {
    # Every kind of layer once: Engram, Full with pairs, Reuse, the decoder's source with candidates, Reindex; one draft stage.
    "num_hidden_layers": 5, "compress_ratios": [0, 2, 2, 1, 1, 0], "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3, "engram_layer_ids": [1], "engram_num_embeddings": [6126], "num_nextn_predict_layers": 1,
    "dspark_target_layer_ids": [3, 4], "sliding_window": 8,
}  # fmt: skip
BOUND = 2 * 7 + 1  # two decoder layers, windows of 8
LEAST_KEEP = 8 + 6
STOPS = ["a", "ab"]


@cache
def checkpoint() -> str:
    """Directory of a random checkpoint in the released form."""
    where = Path(mkdtemp(prefix="v41-sweep-")) / "model"
    make_checkpoint(config("tiny", **NARROW), where, seed=3)
    return str(where)


@cache
def model(dtype: str, device: str) -> DeepseekV41Model:
    """The model that all engines share; each sets it up anew."""
    loaded = load_model(resolve_model(checkpoint()), getattr(torch, dtype), torch.device(device))
    assert isinstance(loaded, DeepseekV41Model)
    return loaded


@contextmanager
def engine(dtype: str, device: str, **settings: Any) -> Iterator[LLM]:
    """An ``LLM`` with the shared model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepinfer.engine.assembly.load_model", lambda *_: model(dtype, device))
        with LLM(checkpoint(), device=device, dtype=dtype, quiet=True, num_threads=1, max_model_len=MAX_LEN, **settings) as llm:
            yield llm


def picture(rng: random.Random) -> Any:
    """An image of whole patches, 4 to 14 tokens."""
    size = rng.choice(((42, 42), (56, 70), (98, 56), (42, 126)))
    return np.random.RandomState(rng.randrange(2)).randint(0, 256, (*size, 3)).astype(np.uint8)


def some(position: int) -> int:
    """How many drafts behind a position are right: every number, in no order."""
    return position * 7 % 6


@contextmanager
def told(target: DeepseekV41Model, streams: list[list[int]], right: Callable[[int], int]) -> Iterator[None]:
    """Random weights draft nothing that is right: known continuations take the place of what the stages made."""
    draft = target.draft

    def given(batch: Any, hidden: Any, new: Any, kv: Any, draw: Any, count: int) -> Drafts:
        made = draft(batch, hidden, new, kv, draw, count)
        with allow_device_sync():
            rows = made.ids.tolist()
            for row, token, at in zip(rows, new.token.tolist(), new.position.tolist(), strict=True):
                known = next((s for s in streams if at < len(s) and s[at] == token), ())
                ahead = known[at + 1 : at + 1 + min(right(at), count)]
                row[: len(ahead)] = ahead
            return Drafts(torch.tensor(rows, device=made.ids.device), made.confidence)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "draft", given)
        yield


def _job(rng: random.Random, i: int, common: list[int], texts: list[list[int]], crowd: bool) -> kit.Job:
    lengths = (1, 2, 15, 16, 17, 33, 47, 64, 90, MAX_LEN - 1, rng.randint(1, 100))
    length = rng.choice(lengths[: 5 if crowd else None])
    shared = common[: rng.choice((0, 20, len(common)))]
    ids = (shared + rng.choice(texts) * length)[:length]
    images = []
    if rng.random() < 0.35:
        images = [picture(rng) for _ in range(rng.choice((1, 1, 2)))]
        ids = ids[: MAX_LEN - 40]
        for image in range(len(images)):
            at = rng.choice((0, len(ids) // 2, len(ids))) if image == 0 else len(ids)
            ids[at:at] = [IMAGE]
            ids += [50] if image + 1 < len(images) else []
    values: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.0, 0.8, 1.2)),
        "max_tokens": rng.choice((30, 40, 50) if crowd else (1, 1, 2, 5, 12, 24)),
        "seed": rng.randrange(1 << 40),
        "n": 1,
        "ignore_eos": rng.random() < 0.7,
        "logprobs": rng.choice((None, 0, 2)),
        "priority": rng.choice((0, 0, 1, -2)),
    }
    if values["temperature"]:
        values |= {"n": rng.choice((1, 1, 2, 3)), "top_p": rng.choice((1.0, 0.8)), "top_k": rng.choice((0, 5))}
    if rng.random() < 0.3:
        values["repetition_penalty"] = 1.4
    if rng.random() < 0.3:  # short loops, so that prompt lookup finds something
        values["logit_bias"] = {rng.choice(rng.choice(texts)): 9.0, 45: 7.0}
    if rng.random() < 0.25:
        values |= {"stop": STOPS, "include_stop_str_in_output": rng.random() < 0.5}
    if rng.random() < 0.25:
        values["stop_token_ids"] = list(range(40, 60))
    if rng.random() < 0.25:
        values["min_tokens"] = min(values["max_tokens"], 1 if len(ids) > MAX_LEN - 3 else 3)
    if rng.random() < 0.2:
        values["prompt_logprobs"] = rng.choice((0, 2))
    if rng.random() < 0.15:
        values["cache_salt"] = "other"
    grammar = partial(kit.Walk, rng.randrange(20), rng.choice((None, 6)), (EOS,)) if rng.random() < 0.2 else None
    gone = rng.choice((0, 1, 2, 3, 6)) if rng.random() < 0.2 else None
    mode, after = rng.choice(("final", "cumulative")), rng.choice((0, 0, 1) if crowd else (0, 0, 0, 1, 3, 9))
    return kit.Job(f"r{i}", ids, SamplingParams(**values), grammar, mode, after, gone, images)


@dataclass
class Play(kit.Play):
    """One arrangement. ``exact``: every request gives the bits that it gives alone, with ``keep`` tokens left whole (None = all)."""

    keep: int | None = None
    exact: bool = True
    right: Callable[[int], int] = some


@dataclass
class Case:
    """What is asked; see the module's note. ``dtype``: of the run."""

    seed: int
    dtype: str
    jobs: list[kit.Job]
    crowd: bool
    _alone: dict[int | None, dict[str, list[RequestOutput]]] = field(default_factory=dict)

    @classmethod
    def of(cls, seed: int, dtype: str) -> Case:
        rng = random.Random(seed)
        common = [rng.randrange(60, 2000) for _ in range(70)]
        texts = [[rng.randrange(60, 2000) for _ in range(rng.randint(1, 30))] for _ in range(3)]
        crowd = seed % 3 == 0  # begin small and grow: a small pool cannot keep them
        return cls(seed, dtype, [_job(rng, i, common, texts, crowd) for i in range(5 if crowd else rng.randint(3, 6))], crowd)

    def plays(self, count: int) -> Iterator[Play]:
        rng = random.Random(-1 - self.seed)
        for _ in range(count):
            yield self._play(rng)

    def _play(self, rng: random.Random) -> Play:
        block, seqs = (16, 5) if self.crowd else (rng.choice((16, 16, 16, 32, 64)), rng.choice((1, 2, 4, 6)))
        settings: dict[str, Any] = {
            "block_size": block,
            "num_kv_blocks": -(-MAX_LEN // block) + (1 if self.crowd else rng.choice((1, 1, 2, 30))),
            "max_num_seqs": seqs,
            "max_num_batched_tokens": seqs + rng.choice((0, 5, 17, 40, 40, 200)),
            "kv_cache_dtype": rng.choice(("packed", "bfloat16", "float32")),
            "zero_overhead": rng.random() < 0.75,
            "enable_prefix_caching": rng.random() < 0.7,
            "state_snapshot_gib": rng.choice((None, 0, 0, 0.0004)),
            "hit_policy": rng.choice(("exact", "exact", "exact", "replay")),
            "swap_space_gib": rng.choice((0, 0.002, 0.01)),
        }
        truncation, keep = rng.choice(("off", "off", "mask", "compact")), rng.choice((LEAST_KEEP, BOUND, 40))
        if truncation != "off":
            settings |= {"yoco_prefill_truncation": truncation, "yoco_prefill_keep_tokens": keep}
        drafts = rng.choice((None, "ngram", "dspark", "dspark"))
        if drafts is not None:
            settings |= {"speculative": drafts, "num_draft_tokens": rng.choice((1, 2, 5)), "draft_budget": rng.choice((None, 3, 64))}
            if drafts == "ngram":
                settings["ngram_min"] = 1
        approximate = truncation != "off" and keep < BOUND
        hits = settings["enable_prefix_caching"]
        return Play(
            self.seed,
            settings,
            rng.choice((None, (1e15, 1.0), (1.0, 1e15))),
            [_untruncated(job) for job in self.jobs] if truncation != "off" else self.jobs,
            rng.choice((0, 0, 0, 9)),
            fault_at=rng.choice(("forward", "forward", "end_step", "draft") if drafts == "dspark" else ("forward", "end_step")),
            keep=keep if approximate else None,
            exact=not (hits and (approximate or settings["hit_policy"] == "replay")),
            right=rng.choice((some, lambda _: 0, lambda _: 5)),
        )

    def alone(self, keep: int | None, device: str) -> dict[str, list[RequestOutput]]:
        """Each answer of each job by itself, one step at a time, nothing but the model."""
        if keep not in self._alone:
            truncation = {} if keep is None else {"yoco_prefill_truncation": "mask", "yoco_prefill_keep_tokens": keep}
            plain = {"block_size": 16, "num_kv_blocks": 12, "max_num_seqs": 1, "zero_overhead": False, "enable_prefix_caching": False}
            jobs = self.jobs if keep is None else [_untruncated(job) for job in self.jobs]
            with engine(self.dtype, device, swap_space_gib=0, kv_cache_dtype="float32", **plain, **truncation) as llm:
                self._alone[keep] = {job.name: kit.alone(llm, job) for job in jobs if keep is None or _whole(llm, job)}
        return self._alone[keep]

    def check(self, play: Play, device: str) -> dict[str, int]:
        """Performs it; raises AssertionError with what is not as it should be. Gives what was reached."""
        want = self.alone(play.keep, device)
        streams = [[*(o.prompt_token_ids or ()), *o.outputs[0].token_ids] for outputs in want.values() for o in outputs]
        with engine(self.dtype, device, **play.settings) as llm, told(model(self.dtype, device), streams, play.right):
            found = kit.perform(llm, play, limit=3000)
            wrong = kit.leftovers(llm)
            done = {**llm.engine.core_stats(), "failed": llm.engine.counters.failed_steps}
        for job in play.jobs:
            error = play.refused.get(job.name)
            if error is not None and not job.images:
                wrong.append(f"{job.name}: refused with {error}")
            if play.exact and error is None and job.name not in want:
                wrong.append(f"{job.name}: taken, and refused alone")
        if play.exact:
            played = [job for job in play.jobs if job.name not in play.refused]
            wrong += kit.differences(kit.Play(play.seed, {}, None, played), found, want)
        else:
            wrong += [
                f"{name}: {answer.error}"
                for name, output in found.items()
                for answer in output.outputs
                if answer.error is not None and kit.FAULT not in answer.error and not _ended_by_grammar(answer.error)
            ]
            missing = [j.name for j in play.jobs if j.name not in found and j.name not in play.refused and j.gone_after is None]
            wrong += [f"{name}: nothing came" for name in missing]
        assert not wrong, f"seed {play.seed}, {self.dtype}, {play.settings}, fault {play.fault_every} {play.fault_at}: {wrong}"
        return done


def _ended_by_grammar(error: str) -> bool:
    return "grammar" in error


def _untruncated(job: kit.Job) -> kit.Job:
    """The same without what a truncated prefill refuses."""
    params = job.params.clone(prompt_logprobs=None)
    return kit.Job(job.name, job.prompt, params, job.grammar, job.mode, job.after, job.gone_after, job.images)


def _whole(llm: LLM, job: kit.Job) -> bool:
    """Whether a truncated prefill takes it: images are kept whole or left out whole."""
    request, _ = kit.prepared(llm, job, job.params, job.name)
    first = len(request.prompt_ids) - llm.engine.options.keep_tokens
    return not any(span.start < first < span.end for span in request.images)
