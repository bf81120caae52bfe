"""xgrammar without what it imports and does not need.

Owns: the import. Never touches: what is done with it.

``import xgrammar`` imports torch and transformers (570 MB and seconds), of which compiling and matching use nothing but annotations. Its
few modules that are needed are imported under a package name of our own instead, in which what this process has not loaded is an empty
stand-in: 60 MB, half a second. Nobody else sees that; who imports xgrammar itself, before or after, gets the whole of it.
"""

from __future__ import annotations

import builtins
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
_ALIAS = "_deepinfer_xgrammar"
_NEEDLESS = ("torch", "transformers")
_lock = threading.Lock()
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
                _loaded = _import_parts()
            except ImportError as e:
                raise ConfigError(f"xgrammar is installed but cannot be imported ({e}); {_MISSING.partition(': ')[2]}") from e
        return _loaded


class _StandIn(types.ModuleType):
    """A module of which any name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


def _import_parts() -> Bindings:
    if (whole := sys.modules.get("xgrammar")) is not None:
        return _bindings(whole, whole, whole, whole, whole)
    _import_ffi()
    found = importlib.util.find_spec("xgrammar")
    assert found is not None
    package = types.ModuleType(_ALIAS)
    package.__path__ = list(found.submodule_search_locations or ())
    sys.modules[_ALIAS] = package
    try:
        for name in ("exception", "load_binding"):
            importlib.import_module(f"{_ALIAS}.{name}")
        info = _import_part("tokenizer_info")  # before those that import it in turn
        grammar, compiler, matcher, config = map(_import_part, ("grammar", "compiler", "matcher", "config"))
        return _bindings(grammar, compiler, matcher, info, config)
    except BaseException:
        for name in [n for n in sys.modules if n == _ALIAS or n.startswith(f"{_ALIAS}.")]:
            del sys.modules[name]
        raise


def _import_ffi() -> None:
    """Its foreign function interface takes torch where it can be imported; where it has not been, it is to do without."""
    if "tvm_ffi" in sys.modules:
        return
    switch = "TVM_FFI_DISABLE_TORCH_C_DLPACK"  # else it looks for a compiler
    unset = switch not in os.environ
    os.environ.setdefault(switch, "1")
    blocked = "torch" not in sys.modules
    if blocked:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("tvm_ffi")
    finally:
        if blocked:
            del sys.modules["torch"]
        if unset:
            os.environ.pop(switch, None)


def _import_part(name: str) -> types.ModuleType:
    """One module, in whose own imports the needless ones are stand-ins unless they are loaded anyway."""
    full = f"{_ALIAS}.{name}"
    if full in sys.modules:
        return sys.modules[full]
    spec = importlib.util.find_spec(full)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    stand_ins = {n: _StandIn(n) for n in _NEEDLESS if n not in sys.modules}

    def import_(wanted: str, *args: Any, **kwargs: Any) -> Any:
        return stand_ins[wanted] if wanted in stand_ins else builtins.__import__(wanted, *args, **kwargs)

    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": import_}
    sys.modules[full] = module
    spec.loader.exec_module(module)
    return module


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
