"""Which rows of a step show images: what the worker remembers of each state slot's prompt, and a step's pieces of it."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.models.images import ImagePiece, ImageSpan
from deepinfer.worker.step_ring import Header, RingSlot


class ImageRows:
    """Host side. A slot is known from its sequence's admission, again after each preemption, until rows have passed its last image."""

    def __init__(self) -> None:
        self._spans: dict[int, list[ImageSpan]] = {}

    def admit(self, slot: int, spans: Sequence[ImageSpan]) -> None:
        """A sequence was given a slot."""
        if spans:
            self._spans[slot] = list(spans)
        else:
            self._spans.pop(slot, None)

    def pieces(self, slot: RingSlot, header: Header) -> list[ImagePiece]:
        """Rows of a planned step that lie in images, in order. Positions of prompts are exact when a step is planned."""
        found: list[ImagePiece] = []
        if not self._spans:
            return found
        a = slot.a
        for i, state_slot in enumerate(a["state_row"][: header.seqs].tolist()):
            spans = self._spans.get(state_slot)
            if spans is None:
                continue
            row, behind = int(a["cu_q"][i]), int(a["cu_q"][i + 1])
            start = int(a["pos"][row])
            end = start + behind - row
            for span in spans:
                first, last = max(start, span.start), min(end, span.end)
                if first < last:
                    found.append(ImagePiece(span.image, row + first - start, first - span.start, last - first))
            if spans[-1].end <= end:
                del self._spans[state_slot]
        return found


def without_images(ids: Sequence[int], end: int, spans: Sequence[ImageSpan]) -> list[int]:
    """Token ids of the positions before ``end``, −1 for those of images."""
    start = end - len(ids)
    shown = {place for span in spans for place in range(max(span.start, start), min(span.end, end))}
    return [-1 if place in shown else token for place, token in enumerate(ids, start)]
