"""Operators of DeepInfer: one folder each, imported as ``deepinfer.kernels``.

Owns: the meaning of every operator as a torch reference (``<op>/reference.py``) with its shape contract, and faster
forms of the same contract beside it. Never touches: model structure, scheduling, checkpoints.

Importing this package loads neither a compiler nor a GPU library. Every operator keeps the batch-invariance rule: the
bits of a row's result depend on the row's own sequence only, not on its batch mates and not on where a chunk was cut.
"""

KERNEL_SET = 2
"""Raised whenever a change may alter the bits of any operator: cached KV of another set is not reused."""
