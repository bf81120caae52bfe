"""What goes with a sequence's KV from the engine that computed its prompt to the one that goes on.

Owns: the record, its bytes, and every check of bytes that came from elsewhere. Never touches: requests, engines, how bytes travel.

The record is small and carries all that the next engine needs to know before it takes a single page: tokens, sampling values, limits,
images with their pixels, the layout of the KV, and the ticket under which the pages can be fetched. Nothing in it is executed when it
is read.

As bytes: a head (magic, format, lengths), a JSON part, token ids as int32, pixels. All little endian.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from deepinfer.errors import HandoverError, InvalidRequestError
from deepinfer.kvcache.handover_images import describe_images, pack_pixels, pixel_bytes, unpack_images
from deepinfer.kvcache.layout import FORMAT
from deepinfer.models.images import ImageSpan
from deepinfer.sampling import SamplingParams

_HEAD = struct.Struct("<4sHHIII")  # magic, format, zero, bytes of the JSON part, prompt tokens, produced tokens
_MAGIC = b"DIHO"
_CUT = "the hand-over record was cut, or something was added to it"


@dataclass(frozen=True, slots=True)
class Handover:
    """One sequence on its way from a prompt engine to a completion engine.

    Attributes:
        request_id: as the prompt engine knew it.
        prompt_ids: the prompt.
        produced: tokens made after it, at least one; their random numbers and penalties are functions of what stands here.
        computed: leading positions whose KV is in the payload.
        params: sampling values, of one answer.
        seed: of its draws.
        max_new: most tokens to generate, ``produced`` included.
        eos_ids, bad_word_ids, salt, priority, order, stream: as in an engine's request.
        cached_tokens: prompt tokens that the prompt engine found in its index.
        images: of the prompt, in order; equal digests mean equal pixels.
        grammar: name of the grammar that the answer follows, its position being ``len(produced)``; ``None`` without one.
        layout: `KvLayout.fields` of the payload.
        ticket: under which the payload can be fetched; empty until it is offered.
    """

    request_id: str
    prompt_ids: Sequence[int]
    produced: Sequence[int]
    computed: int
    params: SamplingParams
    seed: int
    max_new: int
    layout: Mapping[str, Any] = field(repr=False)
    eos_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    salt: bytes = b""
    priority: int = 0
    order: int = 0
    stream: bool = False
    cached_tokens: int = 0
    images: tuple[ImageSpan, ...] = ()
    grammar: str | None = None
    ticket: bytes = b""

    def with_ticket(self, ticket: bytes) -> Handover:
        """The record of a payload that is on offer."""
        return replace(self, ticket=ticket)

    def digest(self) -> bytes:
        """16 bytes that name this record, the ticket left out: the payload carries them, so that it cannot be taken for another's.

        Pixels count by their digests.
        """
        return hashlib.blake2b(self.with_ticket(b"")._without_pixels(), digest_size=16).digest()

    def to_bytes(self) -> bytes:
        """The record as bytes."""
        return self._without_pixels() + pack_pixels(self.images)

    def _without_pixels(self) -> bytes:
        text = json.dumps(
            {
                "request_id": self.request_id,
                "computed": self.computed,
                "params": _params(self.params),
                "seed": self.seed,
                "max_new": self.max_new,
                "layout": self.layout,
                "eos_ids": self.eos_ids,
                "bad_word_ids": self.bad_word_ids,
                "salt": self.salt.hex(),
                "priority": self.priority,
                "order": self.order,
                "stream": self.stream,
                "cached_tokens": self.cached_tokens,
                "images": describe_images(self.images),
                "grammar": self.grammar,
                "ticket": self.ticket.hex(),
            },
            separators=(",", ":"),
        ).encode()
        ids = np.asarray([*self.prompt_ids, *self.produced], dtype="<i4")
        return _HEAD.pack(_MAGIC, FORMAT, 0, len(text), len(self.prompt_ids), len(self.produced)) + text + ids.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Handover:
        """Reads a record.

        Raises:
            HandoverError: the bytes are no record, of another version, cut, or say what cannot be.
        """
        if len(data) < _HEAD.size:
            raise HandoverError(f"{len(data)} bytes are too few for a hand-over record")
        magic, version, _, size, prompt, produced = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise HandoverError("these bytes are no hand-over record")
        if version != FORMAT:
            raise HandoverError(f"the hand-over record has format {version}, this engine reads {FORMAT}; run one version on both sides")
        tokens, end = _HEAD.size + size, _HEAD.size + size + 4 * (prompt + produced)
        if len(data) < end:
            raise HandoverError(_CUT)
        ids = np.frombuffer(data, "<i4", prompt + produced, tokens).tolist()
        try:
            said = json.loads(data[_HEAD.size : tokens])
            if len(data) != end + pixel_bytes(said["images"]):
                raise HandoverError(_CUT)
            made = cls._of(said, ids[:prompt], ids[prompt:], unpack_images(said["images"], memoryview(data)[end:], prompt))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError, InvalidRequestError) as e:
            raise HandoverError(f"the hand-over record cannot be read: {type(e).__name__}: {e}") from None
        made._check()
        return made

    @classmethod
    def _of(cls, said: dict[str, Any], prompt: list[int], produced: list[int], images: tuple[ImageSpan, ...]) -> Handover:
        return cls(
            request_id=_of_type(said["request_id"], str),
            prompt_ids=prompt,
            produced=produced,
            computed=_of_type(said["computed"], int),
            params=SamplingParams(**said["params"]),
            seed=_of_type(said["seed"], int),
            max_new=_of_type(said["max_new"], int),
            layout=_of_type(said["layout"], dict),
            eos_ids=tuple(_of_type(i, int) for i in said["eos_ids"]),
            bad_word_ids=tuple(tuple(_of_type(i, int) for i in word) for word in said["bad_word_ids"]),
            salt=bytes.fromhex(said["salt"]),
            priority=_of_type(said["priority"], int),
            order=_of_type(said["order"], int),
            stream=_of_type(said["stream"], bool),
            cached_tokens=_of_type(said["cached_tokens"], int),
            images=images,
            grammar=None if said["grammar"] is None else _of_type(said["grammar"], str),
            ticket=bytes.fromhex(said["ticket"]),
        )

    def _check(self) -> None:
        known = len(self.prompt_ids) + len(self.produced)
        wrong = (
            "it has no prompt or no produced token"
            if not self.prompt_ids or not self.produced
            else f"{self.computed} of {known} tokens cannot be computed"
            if not 0 < self.computed < known
            else "it holds several answers"
            if self.params.n != 1
            else "an id is negative"
            if min(*self.prompt_ids, *self.produced) < 0
            else "its seed is out of range"
            if not 0 <= self.seed < 2**63
            else "its order is out of range"
            if not 0 <= self.order < 2**63
            else None
        )
        if wrong is not None:
            raise HandoverError(f"the hand-over record makes no sense: {wrong}")


def _params(params: SamplingParams) -> dict[str, Any]:
    """Values that are not the default."""
    return {f.name: getattr(params, f.name) for f in fields(params) if getattr(params, f.name) != f.default}


def _of_type(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
