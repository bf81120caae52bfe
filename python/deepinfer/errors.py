"""Every exception a user can meet, in one place.

Owns: the exception classes, and how one gets to another process or to several callers. Never touches: anything else (a leaf, importable
from every layer).
Each message says what is wrong and what to change; commands print it on one line and exit with 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar


class DeepInferError(Exception):
    """Base of all errors raised on purpose by DeepInfer."""


class InvalidRequestError(DeepInferError, ValueError):
    """One request cannot be served as written; others are unaffected."""


class PromptTooLongError(InvalidRequestError):
    """The prompt does not fit the model's length or the KV pool."""


class EmptyPromptError(InvalidRequestError):
    """The prompt has no tokens."""


class TokenOutOfRangeError(InvalidRequestError):
    """A token id is negative or not below the vocabulary size."""


class ImageError(InvalidRequestError):
    """An image of a request, or its place in the prompt, is wrong."""


class SamplingParamsError(InvalidRequestError):
    """A sampling value is out of range or conflicts with another one."""


class GrammarError(InvalidRequestError):
    """A schema, expression or grammar of a request cannot be used; the message says where and why."""


class GrammarTimeoutError(GrammarError):
    """A schema, expression or grammar takes more time or memory to compile than one request may have."""


class GrammarBusyError(GrammarTimeoutError):
    """A grammar was not compiled because processors, or the processes that compile, were busy with others: the same one may do later."""


class ConfigError(DeepInferError, ValueError):
    """An engine setting is out of range or conflicts with another one."""


class CapacityError(ConfigError):
    """Weights or KV do not fit the memory that was given; the message names the setting to change."""


class RingLayoutError(ConfigError):
    """Memory given to the core as a step ring has a wrong size, type or place; the message names the field."""


class ModelNotFoundError(DeepInferError):
    """No model under that name: neither a path, a known alias nor a reachable hub id."""


class UnsupportedModelError(DeepInferError):
    """The architecture is not registered; the message names the registry and the nearest match."""


class ModelContractError(UnsupportedModelError):
    """A registered model class does not keep the contract of ``deepinfer.models.base``; the message names what to change in it."""


class UnsupportedConfigError(DeepInferError):
    """A configuration field changes the mathematics and is not implemented; the message names the field."""


class UnsupportedFormatError(DeepInferError):
    """A checkpoint format (AWQ, GPTQ, LoRA, a GGUF type) is not read; the message names it."""


class CheckpointError(DeepInferError):
    """A checkpoint is truncated, incomplete or its shapes disagree with the configuration."""


class EngineDeadError(DeepInferError):
    """The engine stopped after a fault; requests in flight have failed."""


class NoAnswerError(DeepInferError, TimeoutError):
    """A question to an engine (its metrics, its counts, logits) was not answered in time; the engine goes on."""


class StepFailedError(DeepInferError):
    """One step failed; the requests in it have failed, the engine goes on."""


class StepOrderError(DeepInferError, RuntimeError):
    """A call of the step loop came out of order; the core is unchanged."""


class HiddenSyncError(DeepInferError, RuntimeError):
    """Something waited for the device where waiting is forbidden; the message says what."""


class RankGroupError(DeepInferError, RuntimeError):
    """The ranks of a group did not agree on a step: one failed, is lost or late, or is configured differently; every rank is told."""


class GroupStepFailedError(RankGroupError):
    """A step failed on one rank of a group, whose log says why; no rank has that step, and the group goes on."""


class TransferError(DeepInferError, RuntimeError):
    """KV of a sequence cannot be loaded or saved now; nothing was taken."""


class HandoverError(DeepInferError, RuntimeError):
    """A sequence could not be passed from a prompt engine to a completion engine; sending the request again computes it anew."""


class KvLayoutError(HandoverError):
    """The KV of two engines means different things (model, dtype, block size, format); the message names each field that differs."""


class CoreMismatchError(DeepInferError, ImportError):
    """The compiled core is missing, or of another version than the Python beside it."""


class NoRoomError(HandoverError):
    """A completion engine was full for as long as a hand-over may take; nothing is wrong with the request, it can be sent again."""


class KvTransferError(TransferError):
    """KV could not be handed from one process to another; the message says why, and nothing stays taken."""


class KvGoneError(KvTransferError):
    """The offer was released, its lease is over or its owner has ended: compute the KV anew."""


class KvCorruptError(KvTransferError):
    """The bytes that came are not those that were offered: pull again or compute the KV anew."""


class KvUnreachableError(KvTransferError):
    """The owner of an offer could not be reached, fell silent or died on the way."""


class KvRefusedError(KvTransferError):
    """The two sides do not belong together: another layout, version, back end, token or length of buffers."""


class KvTooLargeError(KvTransferError):
    """More bytes than a limit or the given buffers hold."""


class KvFullError(KvTransferError):
    """This owner's limit on offers or bytes is reached; it goes down when offers are released or end."""


class KvStoreError(DeepInferError, RuntimeError):
    """The KV store could not do something: a disk or a service failed. To an engine that is a miss, never the end of a request."""


class KvStoreRefusedError(KvStoreError, ValueError):
    """Words to the KV store that make no sense, or that the token given does not allow; the message says what to change."""


class KvStoreFullError(KvStoreError):
    """No room: the capacity, the quota, the disk or the memory that the message names."""


class KvStoreFormatError(KvStoreError):
    """The store's files were written by a newer version of DeepInfer."""


class KvStoreUnavailableError(KvStoreError):
    """The store, or a service it needs, does not answer, is closing, or is open in another process."""


class KernelBuildError(DeepInferError, RuntimeError):
    """A kernel cannot be lowered, compiled or loaded; whoever wanted it runs the reference operator instead and says so."""


# From one process to another, from one to many

_E = TypeVar("_E", bound=BaseException)

Plain = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class ErrorData:
    """An error as data, so that who reads it needs no import but this module and calls no constructor.

    Attributes:
        kind: name of a class here.
        message: what the error says.
        details: its attributes that are plain values.
    """

    kind: str
    message: str
    details: dict[str, Plain] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BaseException) -> ErrorData:
        """Of an error of ours: the nearest class that is defined here. Others end an engine: their class's name goes into the message."""
        for kind in type(error).__mro__:
            if issubclass(kind, DeepInferError) and globals().get(kind.__name__) is kind:
                details = {name: value for name, value in vars(error).items() if isinstance(value, Plain)}
                return cls(kind.__name__, str(error), details)
        return cls(EngineDeadError.__name__, f"{type(error).__name__}: {error}")

    def told_by(self, name: str) -> ErrorData:
        """The same error, with whose it is."""
        return replace(self, message=f"{name}: {self.message}")

    def exception(self) -> DeepInferError:
        """The error again."""
        kind: type[DeepInferError] = globals()[self.kind]
        return _made(kind, (self.message,), self.details)


def fresh(error: _E) -> _E:
    """The same error for one more caller: whoever raises an exception writes a traceback into it."""
    return _made(type(error), error.args, vars(error))


def _made(kind: type[_E], args: tuple[object, ...], details: dict[str, Plain] | dict[str, object]) -> _E:
    """Without the constructor, whose parameters are its own affair."""
    made = kind.__new__(kind, *args)
    made.args = args
    vars(made).update(details)
    return made
