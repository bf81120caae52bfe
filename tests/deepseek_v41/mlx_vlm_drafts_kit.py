"""mlx-vlm's draft stages for DeepSeek-V4 with the reference's weights, fed one verified position at a time."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import torch

from deepseek_v41.mlx_vlm_kit import outside, to_torch
from deepseek_v41.v4 import V4Plan


class Drafter:
    """The stages; ``step`` takes the taps of the position that was verified last."""

    def __init__(self, fields: Mapping[str, Any], plan: V4Plan, weights: Mapping[str, torch.Tensor]) -> None:
        package = "speculative.drafters.deepseek_v4_dspark"
        text = outside("models.deepseek_v4.config").ModelConfig.from_dict({**fields, "compress_ratios": [0] * len(plan.ratios)})
        config = outside(f"{package}.config").DeepseekV4DsparkConfig(
            text_config=text,
            n_mtp_layers=plan.drafts.stages,
            target_layer_ids=list(plan.drafts.taps),
            mask_token_id=plan.drafts.noise_token,
            markov_rank=plan.drafts.markov_rank,
            block_size=plan.drafts.block + 1,
        )
        self.model, self._block = outside(f"{package}.deepseek_v4_dspark").DeepseekV4DsparkDraftModel(config), plan.drafts.block
        given = {name: mx.array(value.numpy()) for name, value in weights.items() if name.startswith("mtp.")}
        named = self.model.sanitize(given)
        for ours, theirs in (("embed", "markov_w1"), ("head", "markov_w2")):
            named[f"markov_head.{theirs}.weight"] = named.pop(f"markov_head.{ours}.weight")
        self.model.load_weights([(name.replace(".decoder.", "."), value) for name, value in named.items()], strict=True)
        embedding, head = nn.Embedding(plan.vocab, plan.hidden), nn.Linear(plan.hidden, plan.vocab, bias=False)
        embedding.weight, head.weight = mx.array(weights["embed.weight"].numpy()), mx.array(weights["head.weight"].numpy())
        self._cache = self.model.reset(SimpleNamespace(embed_tokens=embedding, lm_head=head))
        self._noise = plan.drafts.noise_token

    def step(self, taps: torch.Tensor, anchor: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy drafts ``[n]`` and their logits without the Markov part ``[n, vocab]``, for ``taps`` ``[taps, d]``."""
        ids = mx.array([[anchor] + [self._noise] * (self._block - 1)])
        base = self.model._logits(self.model._hidden(ids, mx.array(taps.flatten().numpy())[None, None], self._cache))
        drafts = self.model.markov_head.sample_block(base, first_prev_tokens=mx.array([anchor]), sampler=lambda x: mx.argmax(x, axis=-1))
        return to_torch(drafts).long(), to_torch(base)
