"""The ASGI application.

Owns: which call answers what; answers for what is no route. Never touches: the process around it (see `run`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route as StarletteRoute

from deepinfer.server.endpoints import ROUTES, Route
from deepinfer.server.errors import ApiError
from deepinfer.server.http.access_log import log_call
from deepinfer.server.http.auth import tenant_of
from deepinfer.server.http.call import Call
from deepinfer.server.ledger import Ledger
from deepinfer.server.metrics.exposition import ServerMetrics
from deepinfer.server.metrics.tracing import tracing
from deepinfer.server.settings import ServerSettings
from deepinfer.server.state import ServerState

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from deepinfer.engine.async_engine import AsyncLLM


class _Path:
    """All methods of one path, as an ASGI application."""

    def __init__(self, state: ServerState, routes: Iterable[Route]) -> None:
        self._state = state
        self._by_method = {route.method: route for route in routes}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        route = self._by_method.get("GET" if method == "HEAD" else method)
        known = route or next(iter(self._by_method.values()))
        call = Call(self._state, known.path, known.protocol, scope, receive, send)
        await call.run(self._refuse if route is None else _handler(route))

    async def _refuse(self, call: Call) -> None:
        allowed = ", ".join(self._by_method)
        raise ApiError(405, f"{call.method} is not served here; use {allowed}", code="method_not_allowed", headers={"allow": allowed})


def _handler(route: Route) -> Any:
    if route.open:
        return route.handler

    async def guarded(call: Call) -> None:
        call.tenant = tenant_of(call.state.keys, call.headers)
        await route.handler(call)

    return guarded


class _Nowhere:
    """What is no route, as an ASGI application; all such paths are one in records."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Call(self._state, "none", "openai", scope, receive, send).run(self._refuse)

    async def _refuse(self, call: Call) -> None:
        raise ApiError(404, f"no such route: {call.path[:200]}", code="not_found")


def _observe(state: ServerState) -> None:
    """Counts, traces and logs calls."""
    metrics = ServerMetrics(state, state.settings.vllm_metric_names)
    state.parts["metrics"] = metrics
    state.first_token, state.gap = metrics.front.first_token, metrics.front.gap
    state.observers += [metrics.front.observe, log_call]
    state.closers.append(metrics.close)
    spans = tracing(state.settings.otlp_traces_endpoint, state.model_name)
    if spans is not None:
        state.observers.append(spans.observe)
        state.closers.append(spans.close)


def build_app(llm: AsyncLLM, settings: ServerSettings, ledger: Ledger | None = None) -> Starlette:
    """The application for an engine that is ready; its `ServerState` is ``app.state.server``. ``ledger``: where tenants' use is counted
    together with other front processes."""
    state = ServerState(llm, settings, ledger)
    _observe(state)
    routes = [
        StarletteRoute(path, _Path(state, list(methods)))
        for path, methods in groupby(sorted(ROUTES, key=lambda r: ("{" in r.path, r.path)), key=lambda r: r.path)
    ]
    middleware = []
    if settings.cors_origin:
        middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=list(settings.cors_origin), allow_methods=["*"], allow_headers=["*"], expose_headers=["*"]
            )
        )
    app = Starlette(routes=routes, middleware=middleware)
    app.router.redirect_slashes = False
    app.router.default = _Nowhere(state)
    app.state.server = state
    return app
