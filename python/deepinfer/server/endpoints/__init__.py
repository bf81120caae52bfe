"""One file a family of routes, and the table of all routes.

Owns: which path is answered by whom. Never touches: how a request is read or its tenant found (see `deepinfer.server.http`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from deepinfer.server.endpoints import chat, completions, health, messages, metrics, models, page, responses, tokens
from deepinfer.server.errors import Protocol
from deepinfer.server.http.call import Call


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path (parts in braces are `Call.path_params`). ``open``: answered without a key, and while the server drains."""

    method: str
    path: str
    handler: Callable[[Call], Awaitable[None]]
    protocol: Protocol = "openai"
    open: bool = False


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions", chat.create),
    Route("POST", "/v1/completions", completions.create),
    Route("POST", "/v1/responses", responses.create),
    Route("POST", "/v1/messages", messages.create, protocol="anthropic"),
    Route("POST", "/v1/messages/count_tokens", messages.count_tokens, protocol="anthropic"),
    Route("GET", "/v1/models", models.list_models),
    Route("GET", "/v1/models/{name:path}", models.get_model),
    Route("POST", "/v1/embeddings", models.embeddings),
    Route("POST", "/tokenize", tokens.tokenize),
    Route("POST", "/detokenize", tokens.detokenize),
    Route("GET", "/tokenizer_info", tokens.tokenizer_info),
    Route("GET", "/health", health.health, open=True),
    Route("GET", "/ready", health.ready, open=True),
    Route("GET", "/version", health.version, open=True),
    Route("GET", "/metrics", metrics.metrics, open=True),
    Route("GET", "/", page.index, open=True),
    Route("GET", "/page/{name}", page.asset, open=True),
)
