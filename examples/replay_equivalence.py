"""What it costs in accuracy to leave decoder rows of a prompt out, and to rebuild windows behind a prefix hit.

    python examples/replay_equivalence.py                     # random weights, a small configuration
    python examples/replay_equivalence.py --model DIR --length 2000 --keep 134 512 2541

First table: the decoder sees the prompt's last `keep` tokens only. `mask` computes every row and hides the older ones, `compact` does
not compute them; the two are the same bits, and equal to a whole prefill from n (W - 1) + 1 tokens on (n decoder layers, windows of
W). Second table: a prompt behind a cached prefix, under both hit policies. An error is the largest change of a log-probability among
the 20 likeliest first tokens of the answer, over all prompts, in nats.
"""

import argparse
import json
import math
import random
import tempfile
from pathlib import Path
from typing import Any

from deepinfer import LLM, SamplingParams
from deepinfer.models.deepseek_v41.topology import read_topology

SMALL = Path(__file__).resolve().parent.parent / "tests" / "data" / "deepseek_v41" / "tiny.json"
FIRST = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True, detokenize=False)
BAR = 40
TAIL = 4  # tokens behind the shared beginning

Answers = list[dict[int, float]]
"""For each prompt the log-probabilities of the likeliest first tokens."""


def ask(llm: LLM, prompts: list[list[int]]) -> Answers:
    """First tokens of the answers."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], FIRST, use_tqdm=False)
    answers = []
    for output in outputs:
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        answers.append({token: found.logprob for token, found in logprobs[0].items()})
    return answers


def error(answers: Answers, whole: Answers) -> float:
    """Largest change; a token that fell out of the likeliest counts as far as the last one that stayed in."""
    worst = 0.0
    for now, then in zip(answers, whole, strict=True):
        least = min(now.values())
        worst = max(worst, *(abs(now.get(token, least) - value) for token, value in then.items()))
    return worst


def bar(value: float, largest: float) -> str:
    """Length on a logarithmic scale over six decades; exact results have none."""
    if value == 0:
        return "exact"
    return "█" * max(1, round(BAR * (1 + math.log10(value / largest) / 6)))


def prefills(options: dict[str, Any], prompts: list[list[int]], keeps: list[int], bound: int) -> None:
    """First table."""
    with LLM(**options, enable_prefix_caching=False) as llm:
        whole = ask(llm, prompts)
    rows = []
    for keep in keeps:
        found = []
        for mode in ("mask", "compact"):
            with LLM(**options, enable_prefix_caching=False, yoco_prefill_truncation=mode, yoco_prefill_keep_tokens=keep) as llm:
                found.append(ask(llm, prompts))
        rows.append((keep, error(found[0], whole), error(found[1], whole), found[0] == found[1]))
    largest = max((row[1] for row in rows), default=0.0) or 1.0
    print(f"\n{'keep':>6}  {'mask':>9}  {'compact':>9}  same bits")
    for keep, masked, compact, same in rows:
        mark = "  ← bound" if keep == bound else ""
        print(f"{keep:>6}  {masked:>9.2e}  {compact:>9.2e}  {'yes' if same else 'NO':<9}  {bar(masked, largest)}{mark}")


def hits(options: dict[str, Any], prompts: list[list[int]]) -> None:
    """Second table: each prompt after one that shares all but its last tokens."""
    with LLM(**options, enable_prefix_caching=False) as llm:
        whole = ask(llm, prompts)
    print(f"\n{'policy':<8}{'snapshots':<11}{'hit':>6}{'again':>7}  {'error':>9}")
    for policy in ("exact", "replay"):
        for snapshots in (None, 0.0):
            with LLM(**options, hit_policy=policy, state_snapshot_gib=snapshots) as llm:
                ask(llm, [[*ids[:-TAIL], *ids[:TAIL]] for ids in prompts])
                before = llm.metrics().totals
                answers = ask(llm, prompts)
                after = llm.metrics().totals
            hit, again = (after[name] - before[name] for name in ("hit_tokens", "rerun_tokens"))
            kept = "kept" if snapshots is None else "off"
            print(f"{policy:<8}{kept:<11}{hit // len(prompts):>6}{again // len(prompts):>7}  {error(answers, whole):>9.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint of this family; by default random weights of a small configuration")
    parser.add_argument("--length", type=int, default=260, help="tokens of a prompt (default: 260)")
    parser.add_argument("--prompts", type=int, default=4, help="prompts (default: 4)")
    parser.add_argument("--keep", type=int, nargs="+", help="tokens to keep (default: from the fewest to beyond the exact bound)")
    arguments = parser.parse_args()
    config = json.loads(((arguments.model / "config.json") if arguments.model else SMALL).read_text())
    topology = read_topology(config)
    bound = topology.exact_decoder_tokens
    keeps = arguments.keep or sorted({topology.least_keep + (bound - topology.least_keep) * step // 4 for step in range(5)} | {bound + 20})
    draw = random.Random(0)
    usable = topology.vocab - 8  # the last ids have meanings of their own
    prompts = [[draw.randrange(3, usable) for _ in range(arguments.length)] for _ in range(arguments.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options: dict[str, Any] = {"model": str(arguments.model or folder), "dtype": "float32", "quiet": True}
        options |= {} if arguments.model else {"load_format": "dummy", "max_model_len": arguments.length + 8, "num_kv_blocks": 64}
        layers = len(topology.layers) - topology.encoder_layers
        print(
            f"{layers} decoder layers, windows of {topology.attention.window}: exact from {bound} tokens on; prompts of {arguments.length}"
        )
        prefills(options, prompts, keeps, bound)
        hits(options, prompts)


if __name__ == "__main__":
    main()
