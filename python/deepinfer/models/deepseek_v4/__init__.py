"""DeepSeek-V4 (not V4.1): from its configuration and checkpoint to logits.

Owns: V4's plan of layers, its compressors, its caches, how its layers are wired. What both families have (products around attention,
experts, the state of windows, the step) is that of ``deepseek_v41``. Never touches: the scheduler, sampling, KV allocation.
"""
