"""``deepinfer kvstore check``: how much of a chain is in the store."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from deepinfer.cli import console
from deepinfer.cli.kvstore_options import add_server, operator

EXAMPLES = (
    "deepinfer kvstore check 3f0c…64 9be1…07",
    "deepinfer kvstore check --keys chain.txt --tenant team-a --slices 4 --json",
    "deepinfer kvstore check --tokens prompt.json --identity engine.json",
)
GRAIN = 128  # tokens of an object
HEX = set("0123456789abcdef")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("key", nargs="*", metavar="KEY", help="keys of a chain, first block first: 32 lower-case hex digits each")
    parser.add_argument("--keys", default=None, metavar="FILE", help="file with one key a line; - reads stdin")
    parser.add_argument("--tokens", default=None, metavar="FILE", help="file with token ids, as a JSON list or between spaces")
    parser.add_argument(
        "--identity",
        default=None,
        metavar="FILE",
        help="with --tokens: JSON object of what else keys are made of, as `deepinfer kvstore identity` prints it: block_tokens, "
        "model, revision, weight_format, kv_format, numerics, hit_policy, salt (hex), tenant",
    )
    parser.add_argument(
        "--tenant", default=None, metavar="NAME", help="whose objects count beside everybody's (default: the identity's, or nobody's)"
    )
    parser.add_argument("--slices", type=int, default=1, metavar="N", help="name up to N slices, deepest first (default: 1)")
    add_server(parser, "check")


def run(args: argparse.Namespace) -> int:
    """Prints the longest present prefix."""
    if not 0 <= args.slices < 2**32:
        raise console.UserError(f"--slices {args.slices} must be 0 or more")
    keys, tenant = _keys(args)
    blocks, slices, other = operator(args, "check", tenant if args.tenant is None else args.tenant).check(b"".join(keys), args.slices)
    found = {"keys": len(keys), "blocks": blocks, "tokens": blocks * GRAIN, "slices": slices, "other_block_tokens": other or None}
    if args.json:
        console.print_json(found)
        return console.EXIT_OK
    console.write_out(f"{blocks} of {len(keys)} blocks are there: {blocks * GRAIN:,} tokens\n")
    if slices:
        console.write_out(f"slices end at block {', '.join(str(position + 1) for position in slices)}\n")
    if other:
        console.write_out(f"engines of this fingerprint also write with blocks of {other} tokens, which cannot be found from here\n")
    return console.EXIT_OK


def _keys(args: argparse.Namespace) -> tuple[list[bytes], str]:
    """Keys of the chain, and the tenant that the identity names."""
    sources = [name for name, given in (("KEY", args.key), ("--keys", args.keys), ("--tokens", args.tokens)) if given]
    if len(sources) != 1:
        raise console.UserError("give the chain once: as KEY arguments, --keys FILE or --tokens FILE")
    if args.tokens is not None:
        return _keys_of_tokens(args.tokens, args.identity)
    if args.identity is not None:
        raise console.UserError("--identity belongs to --tokens")
    lines = args.key or _read(args.keys, "--keys").split()
    return [_key(text, place) for place, text in enumerate(lines, 1)], ""


def _key(text: str, place: int) -> bytes:
    if len(text) != 32 or not HEX.issuperset(text):
        raise console.UserError(f"key {place} is {console.shortened(text)}: give 32 lower-case hex digits")
    return int(text, 16).to_bytes(16, "little")


def _read(path: str, option: str) -> str:
    if path == "-":
        return console.read_stdin()
    try:
        return console.decode_utf8(Path(path).expanduser().read_bytes(), path)
    except OSError as error:
        raise console.UserError(f"{option} {path}: {error.strerror}") from None


def _keys_of_tokens(path: str, identity: str | None) -> tuple[list[bytes], str]:
    from deepinfer import _core

    if identity is None:
        raise console.UserError(
            "--tokens needs --identity FILE: keys depend on model, formats and block size too; `deepinfer kvstore identity` prints it"
        )
    text = _read(path, "--tokens").strip()
    try:
        tokens = json.loads(text) if text.startswith("[") else [int(word) for word in text.split()]
    except ValueError:
        raise console.UserError(f"--tokens {path} holds no token ids: give a JSON list, or numbers between spaces") from None
    if not all(isinstance(token, int) and 0 <= token < 2**32 for token in tokens):
        raise console.UserError(f"--tokens {path}: every token id is a whole number from 0 to 4294967295")
    fields, tenant = _identity(identity)
    keys = _core.kv_keys(tokens, **fields)
    return [keys[at : at + 16] for at in range(0, len(keys), 16)], tenant


def _identity(path: str) -> tuple[dict[str, Any], str]:
    try:
        fields = json.loads(_read(path, "--identity"))
    except ValueError as error:
        raise console.UserError(f"--identity {path} is no JSON: {error}") from None
    names = {"block_tokens": int, "model": str, "revision": str, "weight_format": str, "kv_format": str, "numerics": str, "hit_policy": str}
    if not isinstance(fields, dict) or "block_tokens" not in fields:
        raise console.UserError(f"--identity {path}: give a JSON object with block_tokens at least")
    salt, tenant = fields.pop("salt", ""), fields.pop("tenant", "")
    if not isinstance(tenant, str):
        raise console.UserError(f"--identity {path}: tenant must be a name")
    for name, value in fields.items():
        kind = names.get(name)
        if kind is None or not isinstance(value, kind) or isinstance(value, bool):
            raise console.UserError(f"--identity {path}: {name} is unknown or of the wrong type; known: {', '.join(names)}, salt, tenant")
    try:
        return {**fields, "salt": bytes.fromhex(salt)}, tenant
    except (TypeError, ValueError):
        raise console.UserError(f"--identity {path}: salt must be hex digits") from None
