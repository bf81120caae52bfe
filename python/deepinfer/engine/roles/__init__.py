"""Engines that do one half of a request, and how a sequence gets from one to the other.

Owns: what a prompt engine does with a sequence that is done there (`prompt`), what a completion engine does with one that arrives
(`completion`), the way the bytes go (`transport`), and a pair of such engines as one model (`pair`). Never touches: the scheduler's
decisions, the step, text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.engine.roles.completion import CompletionRole
from deepinfer.engine.roles.prompt import PromptRole
from deepinfer.engine.roles.transport import open_transport

if TYPE_CHECKING:
    from deepinfer import _core
    from deepinfer.engine.config import EngineConfig
    from deepinfer.engine.hooks import EngineHooks
    from deepinfer.engine.mover import Bell
    from deepinfer.kvcache.layout import KvLayout
    from deepinfer.worker.runner import ModelRunner

__all__ = ["CompletionRole", "PromptRole", "make_role"]


def make_role(
    config: EngineConfig, core: _core.Core, runner: ModelRunner, hooks: EngineHooks, layout: KvLayout, max_num_seqs: int, bell: Bell
) -> PromptRole | CompletionRole | None:
    """The role that a configuration asks for, which rings ``bell`` when it has moved on; ``None`` for an engine that does everything."""
    if config.engine_type == "normal":
        return None
    transport = open_transport(config, layout, max_num_seqs + 1)
    if config.engine_type == "prompt":
        return PromptRole(core, runner, hooks, layout, transport, config.handover_lease, bell)
    return CompletionRole(core, runner, layout, transport, config.handover_lease, bell)
