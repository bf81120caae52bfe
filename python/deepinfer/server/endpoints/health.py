"""Whether the server lives, whether it takes work, and what it is.

Owns: `/health`, `/ready`, `/version`. Never touches: the engine, beyond asking whether it runs.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

from deepinfer.server.errors import ApiError
from deepinfer.server.http.call import Call


async def health(call: Call) -> None:
    """Empty 200 while the engine runs, also while the server drains: it must not be killed for that."""
    if not call.state.alive:
        raise ApiError(503, "the engine has stopped; it is not restarted by itself", code="engine_dead", retry_after=30)
    await call.reply(200, None)


async def ready(call: Call) -> None:
    """Empty 200 while new requests are taken in."""
    call.state.check_open()
    await call.reply(200, None)


async def version(call: Call) -> None:
    """The version of the program."""
    await call.reply(200, {"version": program_version()})


def program_version() -> str:
    """Version of the package, however it is on the path."""
    try:
        return installed_version("deepinfer")
    except PackageNotFoundError:
        import deepinfer

        return str(getattr(deepinfer, "__version__", "unknown"))
