"""What DeepSeek-V4.1's production forward is compared with: a plain reference of the whole model, random weights for it, and
other implementations.

Owns: `sequential` (one sequence, from the equations), `weights_kit` (configurations and seeded weights), the golden numbers.
Never touches: the production forward, its caches and operators; what is shared with it is the plan (`topology`, `parameters`).
"""
