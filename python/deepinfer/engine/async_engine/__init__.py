"""An engine in a process of its own, and the asynchronous front that many callers share.

Owns: the process, the socket between the two, what happens when either side dies. Never touches: the step itself, text.

The step loop must not share its interpreter with a busy thread, so the front (`front`, `client.AsyncLLM`: tokenizing, text, the
caller's event loop) and the engine (`process`: one thread that steps) are two processes joined by a socket (`wire`). If
the engine dies, all callers get EngineDeadError at once; if the front dies, even by SIGKILL, the engine process ends.
"""

from deepinfer.engine.async_engine.client import AsyncLLM

__all__ = ["AsyncLLM"]
