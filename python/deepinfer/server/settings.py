"""Settings of `deepinfer serve` that are not the engine's.

Owns: :class:`ServerSettings`, its checks, the configuration file. Never touches: argparse (see `deepinfer.cli.serve`), sockets.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from deepinfer.errors import ConfigError

_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f.:]*:[0-9A-Fa-f.:]*:[0-9A-Fa-f.:]*")
Kind = Literal["text", "integer", "number", "switch", "list"]


@dataclass(frozen=True, slots=True)
class About:
    """How a setting appears on the command line; its flag is the field's name with dashes, unless ``flag`` says otherwise."""

    kind: Kind
    help: str
    metavar: str | None = None
    flag: str | None = None
    choices: tuple[str, ...] | None = None


def _setting(default: Any, kind: Kind, help: str, **more: Any) -> Any:
    return field(default=default, metadata={"about": About(kind, help, **more)})


@dataclass(frozen=True)
class ServerSettings:
    """What a server is told; every field is an option of the command. Numbers that limit something: 0 is no limit where the help says so.

    Raises:
        ConfigError: a value is out of range or conflicts with another one.
    """

    served_model_name: tuple[str, ...] = _setting(
        (),
        "list",
        "name under which clients ask for the model; may be repeated, the first one is shown (default: as given)",
        metavar="NAME",
    )
    host: str = _setting("127.0.0.1", "text", "address to listen on (default: 127.0.0.1, this machine only)", metavar="ADDRESS")
    port: int = _setting(8000, "integer", "port; 0 takes a free one (default: 8000)")
    uds: str | None = _setting(None, "text", "listen on a Unix socket instead", metavar="PATH")
    allowed_host: tuple[str, ...] = _setting(
        (),
        "list",
        "name that requests may ask by beside localhost and --host; may be repeated, * is any (default: only these where --host is a "
        "loopback address, else any)",
        metavar="NAME",
    )
    api_key: tuple[str, ...] = _setting(
        (), "list", "key that clients must send; may be repeated (others see it in the list of processes: a file is safer)", metavar="KEY"
    )
    api_key_file: str | None = _setting(
        None,
        "text",
        "file of keys, one a line (or sha256:HEX), or of tenants (docs/serving.md); read again when it changes",
        metavar="FILE",
    )
    cors_origin: tuple[str, ...] = _setting(
        (), "list", "origin whose pages may call; may be repeated, * is any (default: none)", metavar="ORIGIN"
    )
    chat_backend: str = _setting(
        "auto",
        "text",
        "how conversations become prompts: template (the model's chat template), deepseek (DeepSeek's own format) or auto (default: auto)",
        metavar="NAME",
        choices=("auto", "template", "deepseek"),
    )
    max_queued_requests: int = _setting(1024, "integer", "most answers that wait beyond those the engine runs at once (default: 1024)")
    max_tokens_in_flight: int = _setting(
        0, "integer", "most prompt and answer tokens of all requests taken in, answers at their longest (default: no limit)"
    )
    max_logprobs: int = _setting(
        20, "integer", "most likely tokens that a request may ask for at each position; -1 is no limit (default: 20)"
    )
    max_body_bytes: int = _setting(8 << 20, "integer", "most bytes of a request's body (default: 8388608)")
    max_json_depth: int = _setting(64, "integer", "deepest nesting of a request's JSON (default: 64)")
    max_connections: int = _setting(4096, "integer", "most connections open at once (default: 4096)")
    header_timeout: float = _setting(10.0, "number", "seconds for a request's headers to arrive (default: 10)")
    body_timeout: float = _setting(30.0, "number", "seconds for a request's body to arrive (default: 30)")
    keep_alive_timeout: float = _setting(75.0, "number", "seconds after which a connection without requests is closed (default: 75)")
    write_timeout: float = _setting(
        300.0, "number", "seconds after which a client that reads nothing of its answer is cut off (default: 300)"
    )
    ping_interval: float = _setting(15.0, "number", "seconds of silence after which a stream gets a comment line (default: 15)")
    hang_timeout: float = _setting(
        300.0, "number", "seconds of silence after which an engine process with work is ended; 0 is never (default: 300)"
    )
    front_processes: int = _setting(1, "integer", "processes that answer clients, on one port and one engine (default: 1)")
    drain_timeout: float = _setting(30.0, "number", "seconds that running requests are given at SIGTERM (default: 30)")
    protect_metrics: bool = _setting(False, "switch", "ask for a key at /metrics, too")
    vllm_metric_names: bool = _setting(False, "switch", "give the core metrics under vLLM's names as well")
    otlp_traces_endpoint: str | None = _setting(
        None,
        "text",
        "where traces go (OTLP over HTTP), such as http://127.0.0.1:4318/v1/traces; OpenTelemetry's own variables count, too",
        metavar="URL",
    )
    log_format: Literal["text", "json"] = _setting("text", "text", "form of the lines on stderr (default: text)", choices=("text", "json"))
    access_log: bool = _setting(True, "switch", "write a line for every request")
    page: bool = _setting(True, "switch", "serve the page at /")

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_queued_requests", 0, None),
            ("max_tokens_in_flight", 0, None),
            ("max_logprobs", -1, None),
            ("max_body_bytes", 1, None),
            ("max_json_depth", 1, 500),
            ("max_connections", 1, None),
            ("front_processes", 1, 64),
        ):
            value = getattr(self, name)
            if not low <= value <= (value if high is None else high):
                span = f"at least {low}" if high is None else f"between {low} and {high}"
                raise ConfigError(f"{flag(name)} must be {span}, got {value}")
        for name in ("header_timeout", "body_timeout", "keep_alive_timeout", "write_timeout", "ping_interval"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{flag(name)} must be a number of seconds above 0, got {getattr(self, name):g}")
        for name in ("drain_timeout", "hang_timeout"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{flag(name)} must be a number of seconds of at least 0, got {getattr(self, name):g}")
        if self.chat_backend not in (about()["chat_backend"].choices or ()):
            raise ConfigError(f"--chat-backend must be auto, template or deepseek, got {self.chat_backend!r}")
        for host in self.allowed_host:
            if host != "*" and not _HOST_NAME.fullmatch(host):
                raise ConfigError(f"--allowed-host takes a host name or an address, without port or path, or *; got {host!r}")
        for name in ("served_model_name", "api_key"):
            if not all(getattr(self, name)):
                raise ConfigError(f"{flag(name)} must not be empty")


def flag(name: str) -> str:
    """The option of a setting."""
    return about()[name].flag or "--" + name.replace("_", "-")


def about() -> dict[str, About]:
    """Every setting's place on the command line, in order."""
    return {f.name: f.metadata["about"] for f in fields(ServerSettings)}


def read_config(path: str, known: Iterable[str]) -> dict[str, Any]:
    """A configuration file: a YAML mapping whose keys are the long options without their dashes.

    Args:
        path: the file.
        known: every key that may be there.

    Raises:
        ConfigError: it cannot be read, is no mapping, or has a key that is no option.
    """
    try:
        read = read_yaml(Path(path).read_text(encoding="utf-8"), f"--config {path}")
    except OSError as e:
        raise ConfigError(f"--config {path} cannot be read: {e.strerror or e}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path} is no YAML: it is not UTF-8") from None
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise ConfigError(f"--config {path} must hold a mapping of options, such as 'max-num-seqs: 64'")
    known = list(known)
    values: dict[str, Any] = {}
    for key, value in read.items():
        name = str(key).replace("_", "-")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(f"--config {path}: unknown option {key!r}" + (f"; did you mean {near[0]}?" if near else ""))
        if name in values:
            raise ConfigError(f"--config {path}: {name} stands there twice")
        values[name] = value
    return values


def read_yaml(text: str, where: str) -> Any:
    """What a YAML text holds.

    Raises:
        ConfigError: it is none. Says the place and repeats nothing of the text, which may have keys in it.
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as e:
        mark, why = e.problem_mark or e.context_mark, e.problem or ""
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{where} is no YAML{place}" + (f": {why}" if why and not {"'", '"'} & set(why) else "")) from None
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: what looks like a date and is none
        raise ConfigError(f"{where} is no YAML that can be read") from None
