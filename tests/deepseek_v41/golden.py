"""What the golden numbers in ``tests/data/deepseek_v41/golden.npz`` were computed from: seeds, prompts, places."""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any

import numpy as np
import torch

from deepseek_v41.weights_kit import DATA, RandomWeights, bell, config, plan, random_ids

FILE = DATA / "golden.npz"
TOLERANCE = 2e-5
"""Where both libraries run on one machine they are within 1e-5; sums are ordered differently on another one."""
SEED = 1
LENGTH = 90
POSITIONS = (0, 1, 17, 44, 88, 89)
DEPTHS = (1, 2, 3, 5, 6, 8, 10)
"""Layers of the models whose logits are kept: window, first Full, Reuse, second Full, decoder's source, Reindex, all."""
COLUMNS = slice(0, None, 8)
"""As many logits as the model is wide: they determine the row that the head reads."""
CHUNKS = (37, 20, *[1] * 33)
SHUFFLED = (torch.arange(2048) * 37 + 5) % 2048
"""A token map that is not the identity, so that the pad's compressed id differs from its token id."""


@cache
def weights(engram: bool) -> RandomWeights:
    """Weights of ``tiny``, with or without Engram."""
    return RandomWeights(plan("tiny") if engram else plan("tiny", engram_layer_ids=[]), SEED)


@cache
def numbers() -> dict[str, torch.Tensor]:
    """What the file holds."""
    with np.load(FILE) as file:
        return {name: torch.from_numpy(file[name]) for name in file.files}


def text_config() -> dict[str, Any]:
    """``tiny`` as mlx-lm can run it."""
    return config("tiny", engram_layer_ids=[])


def text_ids() -> torch.Tensor:
    """Prompt of the text model."""
    return random_ids(plan("tiny"), LENGTH, SEED)


def picture() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids with two images, where these are, and the rows they have."""
    ids, image = text_ids(), torch.zeros(LENGTH, dtype=torch.bool)
    image[1:4] = image[30:42] = True
    ids[image] = config("tiny")["image_token_id"]
    return ids, image, bell(SEED, "image rows", (15, plan("tiny").hidden))


GRIDS = ((7, 5), (3, 6), (1, 1))
"""Patches (high, wide) of the images whose rows are kept."""
SIZES = (
    (640, 480),
    (30, 20),
    (1, 1),
    (4000, 3000),
    (3000, 4000),
    (10000, 40),
    (40, 10000),
    (544, 544),
    (1344, 1344),
    (1345, 1330),
    (97, 2001),
)
"""Pixels (width, height) of the images whose grids are kept."""
DRAFT_POSITIONS = (0, 9, 23)
"""Last verified positions, of 24, for which V4's drafts are kept."""


def patches(high: int, wide: int) -> torch.Tensor:
    """Pixels of an image in patches ``[high wide, 588]``, between −1 and 1 as a real one's."""
    return bell(SEED, f"patches {high} {wide}", (high * wide, 588)).clamp(-1, 1)


def draft_taps() -> torch.Tensor:
    """What V4's draft stages read, for 24 verified positions."""
    return bell(SEED, "taps", (24, 3, 128))


def rows_to_round() -> torch.Tensor:
    """Rows over many orders of magnitude, with zeros and ties."""
    rows = bell(SEED, "rows to round", (24, 64)) * torch.exp2(torch.arange(-12, 12).float())[:, None]
    rows[0] = 0
    rows[1] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(8)
    rows[2] = -rows[1] / 2**20
    rows[3, 7] = 1e9
    return rows


def checksum() -> int:
    """Of weights and prompt: another one means that the numbers have to be made anew."""
    total = zlib.crc32(text_ids().numpy().tobytes())
    for name in ("embed.weight", "layers.2.hc_attn_base", "layers.5.ffn.experts.3.w2.weight", "layers.9.attn.attn_sink"):
        total = zlib.crc32(weights(True)[name].numpy().tobytes(), total)
    return total
