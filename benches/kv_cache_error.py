"""What KV in 8 bits costs in quality: perplexity of a text and distance of distributions, with whole KV and in 8 bits.

    python benches/kv_cache_error.py --model smollm2 --text tests/data/ppl/alice.txt [--device cuda] [--samples 4] [--length 1024]

A sample is a run of the text's tokens, all of them spread evenly over it, each computed in one forward. Perplexity is `exp` of the mean
of minus the log-probability of every token but a sample's first. `divergence` is the mean over positions of the Kullback-Leibler divergence
of the distributions in nats, `changed` the mean distance of a token's log-probabilities, `same_top` the share of positions at which the
likeliest next token is the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepinfer import LLM
from deepinfer.cli import machine


def distributions(llm: LLM, ids: list[int]) -> torch.Tensor:
    """Log-probabilities float32 ``[tokens - 1, vocab]`` of what follows each token but the last."""
    return torch.from_numpy(llm.logits(ids))[:-1].log_softmax(-1)


def compare(llms: dict[str, LLM], ids: list[int]) -> dict[str, Any]:
    """One sample."""
    after = torch.tensor(ids[1:])[:, None]
    whole, short = (distributions(llms[form], ids) for form in ("auto", "fp8"))
    of_tokens = {form: found.gather(1, after)[:, 0].double() for form, found in (("auto", whole), ("fp8", short))}
    return {
        **{form: of_tokens[form].numpy() for form in of_tokens},
        "divergence": (whole.exp() * (whole - short)).sum(-1).double().numpy(),
        "same_top": (whole.argmax(-1) == short.argmax(-1)).numpy(),
    }


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description="Quality of KV in 8 bits.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, default=Path("tests/data/ppl/alice.txt"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    args = parser.parse_args()
    settings: dict[str, Any] = {"model": args.model, "device": args.device, "dtype": args.dtype, "max_num_seqs": 1, "num_kv_blocks": 64}
    settings |= {"max_model_len": min(args.length + 1, 4096), "quiet": True}
    llms = {form: LLM(kv_cache_dtype=form, **settings) for form in ("auto", "fp8")}
    ids = llms["auto"].get_tokenizer().encode(args.text.read_text())
    if args.samples * args.length > len(ids):
        parser.error(f"{args.samples} samples of {args.length} tokens are more than the text's {len(ids)}")
    starts = [len(ids) * n // args.samples for n in range(args.samples)]
    found = [compare(llms, ids[at : at + args.length]) for at in starts]
    every = {name: np.concatenate([sample[name] for sample in found]) for name in found[0]}
    print(
        json.dumps(
            {
                "machine": machine.cpu()["model"] if args.device == "cpu" else torch.cuda.get_device_name(),
                "model": args.model,
                "dtype": str(llms["auto"].engine.run.dtype).removeprefix("torch."),  # type: ignore[union-attr]
                "tokens": len(every["auto"]),
                "ppl": {form: [round(float(np.exp(-sample[form].mean())), 4) for sample in found] for form in llms},
                "ppl_of_all": {form: round(float(np.exp(-every[form].mean())), 4) for form in llms},
                "divergence": round(float(every["divergence"].mean()), 6),
                "changed": round(float(np.abs(every["auto"] - every["fp8"]).mean()), 5),
                "same_top": round(float(every["same_top"].mean()), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
