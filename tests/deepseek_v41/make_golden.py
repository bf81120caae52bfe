"""Writes ``tests/data/deepseek_v41/golden.npz`` from mlx-lm and mlx-vlm: `PYTHONPATH=tests python -m deepseek_v41.make_golden`.

Needs what `make oracle` installs. What is computed, from which seeds, is in ``golden``.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models import deepseek_v41 as mlx_lm

from deepseek_v41 import golden, mlx_lm_kit, mlx_vlm_drafts_kit, mlx_vlm_kit, v4_kit
from deepseek_v41.weights_kit import bell, config


def _text() -> dict[str, torch.Tensor]:
    """Logits of mlx-lm without roundings, by depth; of the whole model also fed in chunks; and its three roundings."""
    oracle = mlx_lm_kit.Oracle(golden.text_config(), golden.weights(False), quantised=False)
    at, columns = list(golden.POSITIONS), golden.COLUMNS
    oracle.run(golden.text_ids())
    by_depth = torch.stack([oracle.logits_at(depth)[at][:, columns] for depth in golden.DEPTHS])
    chunked, _ = oracle.run(golden.text_ids(), golden.CHUNKS)
    rows = mx.array(golden.rows_to_round().numpy())
    roundings = {
        "window": mlx_lm._fake_quant_fp8(rows),
        "entries": mlx_lm._fake_quant_fp4(rows, block_size=16, e4m3_scale=True),
        "index": mlx_lm._fake_quant_fp4(rows, block_size=32),
    }
    rounded = {f"mlx_lm.rounded_{name}": torch.from_numpy(np.array(value)) for name, value in roundings.items()}
    return {"mlx_lm.logits": by_depth, "mlx_lm.logits_in_chunks": chunked[at][:, columns], **rounded}


def _engram() -> dict[str, torch.Tensor]:
    """Table rows, gates and values of mlx-vlm's Engram with images in the prompt, and logits of its whole model with these; logits
    without images, where every token is its own compressed id."""
    oracle = mlx_vlm_kit.Oracle(config("tiny"), golden.weights(True), golden.SHUFFLED.tolist())
    ids, image, span_rows = golden.picture()
    found = {"mlx_vlm.rows": oracle.hashes(ids, image).int()}
    with mlx_vlm_kit.roundings(False):
        streams = bell(golden.SEED, "streams", (golden.LENGTH, 4, 256))
        for table, layer in enumerate((1, 3)):
            gates, added = oracle.engram_gates(layer, streams, found["mlx_vlm.rows"][:, table], image)
            found[f"mlx_vlm.gates_{layer}"] = gates
            found[f"mlx_vlm.streams_{layer}"] = added[list(golden.POSITIONS)][:, :, golden.COLUMNS]
        found["mlx_vlm.logits_with_images"] = oracle.logits(ids, span_rows)[list(golden.POSITIONS)][:, golden.COLUMNS]
        plainly = mlx_vlm_kit.Oracle(config("tiny"), golden.weights(True), range(2048))
        found["mlx_vlm.logits"] = plainly.logits(golden.text_ids())[list(golden.POSITIONS)][:, golden.COLUMNS]
    return found


def _vision() -> dict[str, torch.Tensor]:
    """Rows of mlx-vlm's tower and aligner, and the grids it plans for images of given sizes, by the full and the tiny configuration."""
    oracle = mlx_vlm_kit.Oracle(config("tiny"), golden.weights(True), golden.SHUFFLED.tolist())
    found = {f"mlx_vlm.image_{high}x{wide}": oracle.image_rows(golden.patches(high, wide), high, wide) for high, wide in golden.GRIDS}
    for name in ("full", "tiny"):
        fields = mlx_vlm_kit.module("config").ModelConfig.from_dict(config(name))
        plan = mlx_vlm_kit.module("processing_deepseek_v41").plan_image_grid
        grids = [plan(width, height, fields) for width, height in golden.SIZES]
        found[f"mlx_vlm.grids_{name}"] = torch.tensor(grids, dtype=torch.int32)
    return found


def _drafts() -> dict[str, torch.Tensor]:
    """Drafts of mlx-vlm's stages for DeepSeek-V4 and their logits without the Markov part."""
    fields = v4_kit.config(**v4_kit.DRAFTS)
    plan = v4_kit.read_plan(fields)
    drafter, tokens, logits = mlx_vlm_drafts_kit.Drafter(fields, plan, v4_kit.weights(plan, golden.SEED)), [], []
    for position, taps in enumerate(golden.draft_taps()):
        drafts, base = drafter.step(taps, position)
        if position in golden.DRAFT_POSITIONS:
            tokens.append(drafts)
            logits.append(base[:, golden.COLUMNS])
    return {"mlx_vlm.drafts": torch.stack(tokens).int(), "mlx_vlm.draft_logits": torch.stack(logits)}


def main() -> None:
    """Writes the file."""
    arrays = {name: value.numpy() for name, value in {**_text(), **_engram(), **_vision(), **_drafts()}.items()}
    arrays["checksum"] = np.array(golden.checksum())
    np.savez_compressed(golden.FILE, **arrays)  # type: ignore[arg-type]
    print(f"{golden.FILE}: {golden.FILE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
