"""Environment variables that say which devices a process may see, and whether they say the same.

Each maker's library reads its own. Where two are set and differ, one of them is a mistake, and which one shows only as a wrong device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from deepinfer.errors import ConfigError

CUDA = "CUDA_VISIBLE_DEVICES"
ASCEND = "ASCEND_RT_VISIBLE_DEVICES"
CONTAINER = "NVIDIA_VISIBLE_DEVICES"
"""Read by the container runtime before the process starts: which GPUs of the host are in the container, where they count from 0 anew."""


def check_visible_devices(environ: Mapping[str, str] = os.environ) -> None:
    """Checks that the variables agree. One that is not set says nothing.

    ``CUDA`` and ``ASCEND`` must list the same devices. ``CONTAINER`` counts the host's devices, so only what cannot hold is refused: a
    device with ``none``, a number beyond those in the container, a UUID that is not one of those listed.

    Raises:
        ConfigError: two of them disagree; both are named with their values.
    """
    cuda, ascend, container = (environ.get(name) for name in (CUDA, ASCEND, CONTAINER))
    if cuda is not None and ascend is not None and _devices(cuda) != _devices(ascend):
        raise ConfigError(f"{CUDA}={cuda!r} and {ASCEND}={ascend!r} name different devices; set them alike, or unset one")
    if cuda is not None and container is not None and not _holds(_devices(cuda), container.strip()):
        raise ConfigError(f"{CUDA}={cuda!r} names devices that {CONTAINER}={container!r} leaves out of the container; set one of them anew")


def _devices(value: str) -> list[str]:
    """Devices in their order, numbers in one spelling; CUDA's library stops at the first that is empty or -1."""
    found = []
    for part in value.split(","):
        name = part.strip()
        if not name or name.startswith("-"):
            break
        found.append(str(int(name)) if name.isdecimal() else name)
    return found


def _holds(devices: list[str], container: str) -> bool:
    """Whether ``devices`` can be among what the container's variable lets in; ``void`` and an empty value say that something else chose."""
    if container in ("", "all", "void"):
        return True
    inside = [] if container == "none" else [part.strip() for part in container.split(",")]
    for name in devices:
        if name.isdecimal():
            if int(name) >= len(inside):
                return False
        elif all(part.startswith(("GPU-", "MIG-")) for part in inside) and not any(part.startswith(name) for part in inside):
            return False
    return True
