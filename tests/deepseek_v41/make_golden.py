"""Writes ``tests/data/deepseek_v41/golden.npz`` from mlx-lm and mlx-vlm: `PYTHONPATH=tests python -m deepseek_v41.make_golden`.

Needs what `make oracle` installs. What is computed, from which seeds, is in ``golden``.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models import deepseek_v41 as mlx_lm

from deepseek_v41 import golden, mlx_lm_kit, mlx_vlm_kit
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
    """Table rows, gates and values of mlx-vlm's Engram with images in the prompt, and logits of its whole model."""
    oracle = mlx_vlm_kit.Oracle(config("tiny"), golden.weights(True), golden.SHUFFLED.tolist())
    ids, image, span_rows = golden.picture()
    found = {"mlx_vlm.rows": oracle.hashes(ids, image).int()}
    with mlx_vlm_kit.roundings(False):
        streams = bell(golden.SEED, "streams", (golden.LENGTH, 4, 256))
        for table, layer in enumerate((1, 3)):
            gates, added = oracle.engram_gates(layer, streams, found["mlx_vlm.rows"][:, table], image)
            found[f"mlx_vlm.gates_{layer}"] = gates
            found[f"mlx_vlm.streams_{layer}"] = added[list(golden.POSITIONS)][:, :, golden.COLUMNS]
        found["mlx_vlm.logits"] = oracle.logits(ids, span_rows)[list(golden.POSITIONS)][:, golden.COLUMNS]
    return found


def main() -> None:
    """Writes the file."""
    arrays = {name: value.numpy() for name, value in {**_text(), **_engram()}.items()}
    arrays["checksum"] = np.array(golden.checksum())
    np.savez_compressed(golden.FILE, **arrays)  # type: ignore[arg-type]
    print(f"{golden.FILE}: {golden.FILE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
