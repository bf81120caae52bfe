"""Answers held to a form: schemas, expressions and grammars become matchers, compiled by processes that can be killed.

Owns: checking what is asked for (`screen`), compiling it (`compiler` inside `compile_process`, `pool` outside), keeping what was compiled
(`cache`, `service`), and the matchers that mask tokens (`matcher`, `vocabulary`). Never touches: tensors, requests, the step loop.

Compilation of a few kilobytes can take minutes and gigabytes, and native code cannot be interrupted: it happens in processes with limits
on time and memory, and what comes back is a serialised grammar. xgrammar is an optional dependency: `pip install 'deepinfer[structured]'`.
"""

from deepinfer.structured.response_format import from_response_format
from deepinfer.structured.tool_tags import tool_tag

__all__ = ["from_response_format", "tool_tag"]
