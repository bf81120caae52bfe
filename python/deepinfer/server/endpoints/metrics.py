"""`/metrics`: everything that is counted, for Prometheus.

Owns: this route. Never touches: what is counted (see `deepinfer.server.metrics`).
"""

from __future__ import annotations

from deepinfer.server.http.auth import tenant_of
from deepinfer.server.http.call import Call
from deepinfer.server.metrics.exposition import ServerMetrics


async def metrics(call: Call) -> None:
    """The page, in the form that the scraper asks for."""
    if call.state.settings.protect_metrics:
        call.tenant = tenant_of(call.state.keys, call.headers)
    server: ServerMetrics = call.state.parts["metrics"]
    text, kind = await server.page(call.headers.get("accept", ""))
    await call.reply(200, text, {"content-type": kind, "cache-control": "no-store"})
