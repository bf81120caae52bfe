"""What differs between devices, and nothing else.

Owns: detecting a device, its memory and dtypes, pinning, threads, and the process-wide numerics settings that batch
invariance rests on (set before the device starts). Never touches: models, the scheduler, configuration files.
A leaf: any layer may import it. `get_platform("auto" | "cpu" | "cuda" | "cuda:1")` is the entrance.
"""

from deepinfer.platforms.copies import to_device
from deepinfer.platforms.detect import Platform, available_devices, get_platform
from deepinfer.platforms.visible import check_visible_devices

__all__ = ["Platform", "available_devices", "check_visible_devices", "get_platform", "to_device"]
