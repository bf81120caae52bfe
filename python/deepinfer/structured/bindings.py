"""xgrammar, imported in the way that fits the process.

Owns: the import. Never touches: what is done with it.

``import xgrammar`` imports torch and transformers (570 MB and seconds), of which compiling and matching use nothing but annotations. A
process that is ours alone takes the few modules it needs and gives them empty stand-ins for what it does not have loaded: 60 MB, half
a second. A user's process gets the whole package, since the user may want it too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import types
from dataclasses import dataclass
from typing import Any

from deepinfer.errors import ConfigError

_MISSING = "structured outputs need xgrammar: pip install 'deepinfer[structured]'"
_lock = threading.Lock()
_light = False
_loaded: Bindings | None = None


@dataclass(frozen=True)
class Bindings:
    """The classes in use, and the version of serialised grammars."""

    TokenizerInfo: Any
    VocabType: Any
    Grammar: Any
    GrammarCompiler: Any
    CompiledGrammar: Any
    GrammarMatcher: Any
    version: str


def use_light() -> None:
    """From now on this process takes only the modules it needs; for processes in which nothing else imports xgrammar."""
    global _light
    _light = True


def available() -> bool:
    """Whether xgrammar is installed."""
    return importlib.util.find_spec("xgrammar") is not None


def check_available() -> None:
    """Raises ConfigError if xgrammar is not installed."""
    if not available():
        raise ConfigError(_MISSING)


def load() -> Bindings:
    """The bindings, imported on the first call.

    Raises:
        ConfigError: xgrammar is missing, or cannot be imported.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            check_available()
            try:
                _loaded = _import_light() if _light and "xgrammar" not in sys.modules else _import_whole()
            except ImportError as e:
                raise ConfigError(f"xgrammar is installed but cannot be imported ({e}); {_MISSING.partition(': ')[2]}") from e
        return _loaded


def _import_whole() -> Bindings:
    whole: Any = importlib.import_module("xgrammar")
    return _bindings(whole, whole, whole, whole, whole)


class _StandIn(types.ModuleType):
    """A module of which any name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


def _import_light() -> Bindings:
    spec = importlib.util.find_spec("xgrammar")
    assert spec is not None
    # Its __init__ imports everything: an empty package stands in for it, from which the modules are taken one by one.
    package = types.ModuleType("xgrammar")
    package.__path__, package.__spec__ = list(spec.submodule_search_locations or ()), spec
    sys.modules["xgrammar"] = package
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")  # else it looks for a compiler
    names = [name for name in ("torch", "transformers") if name not in sys.modules]
    blocked: dict[str, Any] = dict.fromkeys(names)
    sys.modules.update(blocked)  # None: its import fails, which tvm_ffi takes for "not installed"
    try:
        importlib.import_module("tvm_ffi")
        sys.modules.update({name: _StandIn(name) for name in names})
        for name in ("exception", "load_binding"):
            importlib.import_module(f"xgrammar.{name}")
        grammar, compiler, matcher, info, config = (
            importlib.import_module(f"xgrammar.{name}") for name in ("grammar", "compiler", "matcher", "tokenizer_info", "config")
        )
    except BaseException:
        for name in [n for n in sys.modules if n == "xgrammar" or n.startswith("xgrammar.")]:
            del sys.modules[name]
        raise
    finally:
        for name in names:
            del sys.modules[name]
    return _bindings(grammar, compiler, matcher, info, config)


def _bindings(grammar: Any, compiler: Any, matcher: Any, info: Any, config: Any) -> Bindings:
    return Bindings(
        TokenizerInfo=info.TokenizerInfo,
        VocabType=info.VocabType,
        Grammar=grammar.Grammar,
        GrammarCompiler=compiler.GrammarCompiler,
        CompiledGrammar=compiler.CompiledGrammar,
        GrammarMatcher=matcher.GrammarMatcher,
        version=config.get_serialization_version(),
    )
