"""The device side of a step.

Owns: the step ring's memory, KV tensors, the device block table, the forward's inputs, sampling state and the sampler, the
runner that puts them in order. Never touches: which sequences run (the core decides), text, configuration files, devices'
settings. Nothing here holds a Python object per sequence on the decode path, and nothing on the launch path waits for the
device: the one wait is at the end of a step, for the sampled tokens.
Modules: `step_ring`, `step`, `kv_cache`, `page_moves`, `input_batch`, `row_choice`, `sampling_state`, `sampler`, `logprobs`,
`runner`, `sync_guard`, `sync_rules`.
"""
