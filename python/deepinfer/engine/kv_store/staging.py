"""Host memory between the device and a tier, bounded, and the copies in and out of it.

Owns: the buffers, who has which, and when one may be used again. Never touches: what is copied when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.kvcache.objects import ObjectForm, Staging, read_objects, write_objects
from deepinfer.platforms import to_device

if TYPE_CHECKING:
    from deepinfer.worker.device_queue import Handed
    from deepinfer.worker.runner import ModelRunner

_BUFFER_BYTES = 32 << 20
_BUFFERS = 4

Pages = Sequence[NDArray[np.int64]]
"""Page ids of each paged group, ``[objects, pages of an object]``."""


class Buffers:
    """A few buffers of one size, and what the device does with them. Calls come from the step thread and do not wait.

    Args:
        runner: whose pages.
        form: of the objects.
        most: objects that one may ever need.

    Attributes:
        objects: in a buffer.
    """

    def __init__(self, runner: ModelRunner, form: ObjectForm, most: int, count: int = _BUFFERS) -> None:
        self._runner, self._form = runner, form
        self.objects = max(1, min(most, _BUFFER_BYTES // form.num_bytes))
        device = runner.device
        # Locking pages takes long, so a GPU's are all made now; plain memory is taken when it is written first.
        self._free = deque(Staging(form, self.objects, device) for _ in range(count))
        self._copied: deque[tuple[Handed, Staging]] = deque()

    def take(self) -> Staging | None:
        """A buffer that nobody uses, if there is one."""
        while self._copied and self._copied[0][0].done:
            handed, staging = self._copied.popleft()
            handed()  # a copy that failed is the device's end: pages that count as written are not
            self._free.append(staging)
        return self._free.popleft() if self._free else None

    def give(self, staging: Staging) -> None:
        """It is not used any more."""
        self._free.append(staging)

    def view(self, staging: Staging, count: int) -> NDArray[Any]:
        """Its first objects as bytes, uint8 ``[count * bytes of an object]``."""
        return staging.host[:count].view(-1).numpy()

    def read(self, pages: Pages, staging: Staging) -> Handed:
        """Starts a copy from pages, behind every step launched so far. The result waits for it, on any thread."""
        count, ids = len(pages[0]), self._ids(pages)
        return self._runner.in_order(lambda: read_objects(self._runner.kv, self._form, ids, staging.seen[:count]))

    def write(self, pages: Pages, staging: Staging) -> None:
        """Starts a copy to pages, ahead of the next step; the buffer comes back by itself."""
        count, ids = len(pages[0]), self._ids(pages)
        handed = self._runner.in_order(lambda: write_objects(self._runner.kv, self._form, ids, staging.seen[:count]))
        self._copied.append((handed, staging))

    def _ids(self, pages: Pages) -> list[torch.Tensor]:
        return [to_device(torch.from_numpy(ids), self._runner.device) for ids in pages]
