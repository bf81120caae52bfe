"""What DeepSeek-V4.1's production forward is compared with: a plain reference of the whole model, random weights for it, and
other implementations.

Owns: `sequential`, `drafts` and `vision` (one sequence, from the equations; `v4` for the version before), `weights_kit`
(configurations and seeded weights), the golden numbers, the kits that run mlx-lm, mlx-vlm and transformers with these weights.
Never touches: the production forward, its caches and operators; what is shared with it is the plan (`topology`, `parameters`).
"""
