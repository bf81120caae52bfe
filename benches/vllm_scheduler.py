"""vLLM's own scheduler beside DeepInfer's core on one load, in turn on one machine.

``PYTHON benches/vllm_scheduler.py [--num-seqs 256] [--steps 200]``, where ``PYTHON`` has vLLM and need not have DeepInfer; the other half
runs as ``deepinfer bench scheduler`` of the interpreter named by ``--deepinfer`` (by default the one on the PATH).

Load: sequences with prompts of 512 random tokens, the first half shared, prefix caching on, block 16 (vLLM's default) on both sides;
all of them decode, one token a step. Counted: vLLM's ``Scheduler.schedule()`` and ``update_from_output()``; DeepInfer's ``schedule`` and
``complete`` called from Python, which also fill every step buffer. Not counted: making the model's output. Medians over the steps of the
best of ``--runs`` runs.

Exit code 2 with one line when vLLM is not installed.
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT, SHARED, BLOCK, VOCAB, EOS = 512, 256, 16, 32_000, 2
WARMUP = 32
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


def scheduler_of(num_seqs: int, blocks: int, folder: str, asynchronous: bool):
    """vLLM's scheduler with one full-attention group, without a model, a tokenizer or a device."""
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    model = ModelConfig(model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=16_384)
    cache = CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.9, cache_dtype="auto", enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    limits = SchedulerConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192, num_seqs),
        max_model_len=16_384,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=asynchronous,
    )
    config = VllmConfig(model_config=model, cache_config=cache, scheduler_config=limits, device_config=DeviceConfig(device="cpu"))
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    pools = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    made = AsyncScheduler if asynchronous else Scheduler
    return made(
        vllm_config=config,
        kv_cache_config=pools,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


def time_vllm(num_seqs: int, steps: int, asynchronous: bool) -> dict[str, float]:
    """Microseconds of a steady decode step."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    new = WARMUP + steps + 16 * num_seqs
    blocks = num_seqs * (-(-(PROMPT + new) // BLOCK)) + 64
    with tempfile.TemporaryDirectory() as folder:
        scheduler = scheduler_of(num_seqs, blocks, folder, asynchronous)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    draw = random.Random(0)
    shared = [draw.randrange(10, VOCAB) for _ in range(SHARED)]
    for i in range(num_seqs):
        prompt = shared + [draw.randrange(10, VOCAB) for _ in range(PROMPT - SHARED)]
        params = SamplingParams(max_tokens=new, temperature=0.0)
        params.update_from_generation_config({}, EOS)
        scheduler.add_request(
            Request(request_id=str(i), prompt_token_ids=prompt, sampling_params=params, pooling_params=None, block_hasher=hasher)
        )

    def answer(planned):
        ids = list(planned.num_scheduled_tokens)
        # A request whose prompt goes on in the next step draws nothing.
        tokens = [[1234] if scheduler.requests[i].num_computed_tokens >= scheduler.requests[i].num_prompt_tokens else [] for i in ids]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={name: index for index, name in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    decoding = 0
    while decoding < WARMUP:
        planned = scheduler.schedule()
        done = answer(planned)
        scheduler.update_from_output(planned, done)
        decoding += len(done.req_ids) == num_seqs and planned.total_num_scheduled_tokens == num_seqs
    halves: tuple[list[int], list[int]] = ([], [])
    gc.collect()
    gc.freeze()  # as vLLM's engine core does after start
    for _ in range(steps):
        begin = time.perf_counter_ns()
        planned = scheduler.schedule()
        scheduled = time.perf_counter_ns()
        done = answer(planned)
        answered = time.perf_counter_ns()
        scheduler.update_from_output(planned, done)
        halves[0].append(scheduled - begin)
        halves[1].append(time.perf_counter_ns() - answered)
        if planned.total_num_scheduled_tokens != num_seqs:
            raise SystemExit("a step of the load was not a steady decode")
    both = sorted(a + b for a, b in zip(*halves, strict=True))
    return {
        "median": statistics.median(both) / 1e3,
        "p99": both[len(both) * 99 // 100] / 1e3,
        "schedule": statistics.median(halves[0]) / 1e3,
        "update": statistics.median(halves[1]) / 1e3,
    }


def time_deepinfer(command: list[str], num_seqs: int, runs: int) -> dict[str, float]:
    """The same load, as ``deepinfer bench scheduler`` counts it."""
    asked = [
        *command,
        "bench",
        "scheduler",
        "--json",
        "--runs",
        str(runs),
        "--num-seqs",
        str(num_seqs),
        "--block",
        str(BLOCK),
        "--case",
        "decode",
    ]
    result = subprocess.run(asked, check=True, stdout=subprocess.PIPE, text=True)
    row = next(r for r in json.loads(result.stdout)["rows"] if r["case"] == "decode" and r["num_seqs"] == num_seqs and r["block"] == BLOCK)
    return {"median": row["python_us_median"], "p99": row["python_us_p99"], "rust": row["rust_us_median"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[256], metavar="N", help="sequences that decode")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="timed steps of a run")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="runs; the best median counts")
    parser.add_argument("--async-scheduling", action="store_true", help="time vLLM's asynchronous scheduler instead")
    parser.add_argument("--deepinfer", default="deepinfer", metavar="CMD", help="command that starts DeepInfer; empty leaves it out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_TARGET_DEVICE", "empty")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
    except ImportError as e:
        print(
            f"vLLM cannot be imported ({e}): run this with a Python that has it, `pip install vllm` in an environment of its own",
            file=sys.stderr,
        )
        return 2
    rows = []
    for n in options.num_seqs:
        theirs = min((time_vllm(n, options.steps, options.async_scheduling) for _ in range(options.runs)), key=lambda r: r["median"])
        row = {"num_seqs": n, "vllm": {k: round(v, 2) for k, v in theirs.items()}}
        if options.deepinfer:
            ours = time_deepinfer(options.deepinfer.split(), n, options.runs)
            row |= {"deepinfer": ours, "ratio": round(theirs["median"] / ours["median"], 1)}
        rows.append(row)
    load = Path("/proc/loadavg").read_text(encoding="utf-8").split()[0] if Path("/proc/loadavg").exists() else None
    if options.json:
        print(json.dumps({"vllm": vllm.__version__, "asynchronous": options.async_scheduling, "block": BLOCK, "load": load, "rows": rows}))
        return 0
    for row in rows:
        them = row["vllm"]
        text = f"{row['num_seqs']} decoding, block {BLOCK}: vLLM {vllm.__version__} {them['median']:.0f} µs (p99 {them['p99']:.0f})"
        if "deepinfer" in row:
            text += f", DeepInfer {row['deepinfer']['median']:.2f} µs (p99 {row['deepinfer']['p99']:.2f}), ratio {row['ratio']:.0f}"
        print(text)
    print(f"medians of schedule + update a step, best of {options.runs} runs; load {load}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
