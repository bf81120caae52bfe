"""Angles of the release: two tables, one of them stretched, none of them with an amplitude."""

from __future__ import annotations

import torch

from deepinfer.kernels.rope import RopeTable
from deepinfer.models.deepseek_v41.fields import read_rope_tables


def test_stretched_angles_of_the_release_scale_no_amplitude() -> None:
    """Factor 16 would give cos and sin an amplitude of 1.28 by YaRN's own rule; this family states 1."""
    fields = {
        "qk_rope_head_dim": 64, "head_dim": 512, "max_position_embeddings": 1048576, "rope_theta": 10000, "compress_rope_theta": 160000,
        "rope_scaling": {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536},
    }  # fmt: skip
    main, compress = (RopeTable(parameters, torch.device("cpu")) for parameters in read_rope_tables(fields))
    for table in (main, compress):
        cos, sin = table.pair_cos_sin(torch.tensor([0, 5, 99999]))
        torch.testing.assert_close(cos.square() + sin.square(), torch.ones(3, 32))
    plain = [160000.0 ** (-2 * pair / 64) for pair in range(32)]
    ramp = [min(max((pair - 15) / 10, 0.0), 1.0) for pair in range(32)]  # the band is 15 … 25
    wanted = torch.tensor([f / 16 * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)])
    torch.testing.assert_close(compress.frequencies, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(main.frequencies, torch.tensor([10000.0 ** (-2 * pair / 64) for pair in range(32)]), rtol=1e-6, atol=0)
