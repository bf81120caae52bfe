"""The step loop and everything around it that is not tensors.

Owns: configuration, switches, what fits (planner), the `Engine` that drives core and runner, requests and deltas, text in
and out, the asynchronous front. Never touches: model mathematics, kernels, the scheduler's decisions, HTTP, terminals.
Modules: `config`, `environ`, `planner`, `assembly` set up; `engine`, `step_loop`, `answers` drive steps; `request` is the line
between ids and text; `tokenizer`, `chat_template`, `detokenizer`, `output_processor` make text; `async_engine` serves many callers;
`hooks` and `roles` are for engines that do part of a request.
"""

from deepinfer.core_check import check_core

check_core()  # ahead of all modules here that use the core's names
