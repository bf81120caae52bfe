"""What the commands around a running KV store share: whom to ask, with which token; numbers for people."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from deepinfer.cli import console
from deepinfer.kvcache.store_address import expanded

if TYPE_CHECKING:
    from deepinfer import _core

DEFAULT_ADDRESS = "tcp://127.0.0.1:7460"
Role = Literal["check", "get", "put", "admin"]


def add_server(parser: argparse.ArgumentParser, role: Role) -> None:
    """Options that name a server, or a store in a directory that nobody serves."""
    parser.add_argument(
        "--address",
        default=None,
        metavar="ADDR",
        help=f"tcp://HOST:PORT, unix:/PATH, or dir:/PATH of a store that no server has open (default: {DEFAULT_ADDRESS})",
    )
    parser.add_argument(
        "--token-file",
        default=None,
        metavar="FILE",
        help=f"file with the token of the role {role} (default: the variable {token_variable(role)}, if it is set)",
    )
    parser.add_argument("--tls-ca", default=None, metavar="FILE", help="PEM file of the authority that the server's certificate is from")
    parser.add_argument(
        "--tls-name", default=None, metavar="NAME", help="name in the server's certificate (default: the host of --address)"
    )
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="seconds to wait for an answer (default: 30)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def token_variable(role: Role) -> str:
    """The variable that holds a role's token."""
    return f"DEEPINFER_KVSTORE_TOKEN_{role.upper()}"


def operator(args: argparse.Namespace, role: Role, tenant: str = "") -> _core.KvOperator:
    """The end that asks, with the token of one role."""
    from deepinfer import _core

    if args.tls_name is not None and args.tls_ca is None:
        raise console.UserError("--tls-name is for a server that is known by --tls-ca: give both, or neither")
    token = _token(args.token_file, role)
    return _core.KvOperator(
        expanded(args.address or DEFAULT_ADDRESS),
        role=role,
        token=token,
        tenant=tenant,
        tls_ca=args.tls_ca,
        tls_name=args.tls_name,
        timeout=args.timeout,
    )


def _token(path: str | None, role: Role) -> bytes | None:
    if path is None:
        given = os.environ.get(token_variable(role), "").strip()
        return given.encode() or None
    try:
        token = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise console.UserError(f"--token-file {path}: {error.strerror}") from None
    if not token:
        raise console.UserError(f"--token-file {path} holds no token")
    return token


def size(nbytes: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:,.1f} TiB"


def table(rows: Iterable[tuple[str, Any]]) -> str:
    """Names and values below each other, values to the right."""
    shown = [(name, value if isinstance(value, str) else f"{value:,}") for name, value in rows]
    left = max((len(name) for name, _ in shown), default=0)
    right = max((len(value) for _, value in shown), default=0)
    return "".join(f"  {name:<{left}}  {value:>{right}}\n" for name, value in shown)
