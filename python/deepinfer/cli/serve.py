"""``deepinfer serve``: a model behind HTTP, in the protocols of OpenAI and Anthropic."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from deepinfer.cli import console, options
from deepinfer.errors import ConfigError

if TYPE_CHECKING:
    from deepinfer.server.settings import About

USAGE = "MODEL [options]"
EXAMPLES = (
    "deepinfer serve smollm2",
    "deepinfer serve smollm2 --port 8080 --served-model-name chat --api-key-file keys.txt",
    "deepinfer serve --config serve.yaml",
)
NEEDS = "deepinfer serve needs starlette, uvicorn, httptools and PyYAML; install them with: pip install 'deepinfer[server]'"

_KINDS: dict[str, Any] = {"text": str, "list": str, "integer": int, "number": float, "switch": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the model, as with --model")
    parser.add_argument("--config", metavar="FILE", help="YAML file of these options, keys without dashes; the command line wins")
    group = parser.add_argument_group("server")
    for option in server_options():
        option.add_to(group)
    options.add_engine_options(parser, model_required=False)


def server_options() -> list[options.Option]:
    """One option for each setting of the server."""
    from deepinfer.server.settings import about

    def option(name: str, about: About) -> options.Option:
        return options.Option(
            name,
            about.help,
            _KINDS[about.kind],
            about.choices,
            about.kind == "list",
            () if about.flag is None else (about.flag,),
            about.metavar,
        )

    return [option(name, a) for name, a in about().items()]


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it."""
    try:
        import yaml  # noqa: F401
    except ImportError:
        raise console.UserError(NEEDS) from None
    _read_config(args)
    if args.model is not None and args.model_name is not None and args.model != args.model_name:
        raise console.UserError("MODEL and --model name different models; give one of them")
    args.model = args.model if args.model is not None else args.model_name
    if args.model is None:
        raise console.UserError("no model given; name a directory, a .gguf file, a hub id or smollm2, for example: deepinfer serve smollm2")
    settings = server_settings(args)
    engine = options.engine_arguments(args)
    try:
        from deepinfer.server.run import serve
    except ImportError as e:
        if e.name is not None and e.name.partition(".")[0] in ("starlette", "uvicorn", "httptools"):
            raise console.UserError(NEEDS) from None
        raise
    return serve(engine, settings, console.note)


def server_settings(args: argparse.Namespace) -> Any:
    """The settings that were given."""
    from deepinfer.engine import environ
    from deepinfer.server.settings import ServerSettings, about

    given: dict[str, Any] = {}
    for name, a in about().items():
        value = getattr(args, name)
        if value is not None:
            given[name] = tuple(value) if a.kind == "list" else value
    if key := environ.get("DEEPINFER_API_KEY"):
        given["api_key"] = (*given.get("api_key", ()), key)
    return ServerSettings(**given)


class _FileParser(argparse.ArgumentParser):
    """Reads a file's values as the command line's would be, and complains about the file."""

    path = ""

    def error(self, message: str) -> NoReturn:
        raise console.UserError(f"--config {self.path}: {message}")


def _read_config(args: argparse.Namespace) -> None:
    """Adds what the file says to what the command line left open."""
    if args.config is None:
        return
    from deepinfer.server.settings import read_config

    parser = _FileParser(add_help=False, allow_abbrev=False)
    parser.path = args.config
    for option in server_options():
        option.add_to(parser)
    options.add_engine_options(parser, model_required=False)
    flags = [f for f in parser._option_string_actions if f.startswith("--") and not f.startswith("--no-")]
    values = read_config(args.config, [f[2:] for f in flags])
    found = parser.parse_args(list(_as_arguments(args.config, values)))
    for name, value in vars(found).items():
        if value is not None and getattr(args, name, None) is None and not (name == "model" and args.model_name is not None):
            setattr(args, name, value)


def _as_arguments(path: str, values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        for item in value if isinstance(value, list) else [value]:
            match item:
                case True:
                    yield f"--{key}"
                case False:
                    yield f"--no-{key}"
                case None:
                    pass
                case dict() | list():
                    raise ConfigError(f"--config {path}: {key} must be one value or a list of them")
                case _:
                    yield f"--{key}={item}"
