"""From a kernel's TileLang source to something that runs: described, lowered, compiled to machine code, kept on disk, launched.

Owns: the dialect in which one source serves a GPU and the CPU target, what names a kernel, NVRTC, the store of compiled kernels and the
launch through the driver. Never touches: what a kernel computes, torch operators, models.

Nothing here imports TileLang until a kernel has to be lowered, nor loads the driver until one is launched: a start that finds all its
kernels in the store needs torch alone.
"""

from .dialect import Dialect
from .program import SM90A, Program, shape_config
from .shapes import ModelShape
from .store import KernelStore, StoredKernel, default_store

__all__ = ["SM90A", "Dialect", "KernelStore", "ModelShape", "Program", "StoredKernel", "default_store", "shape_config"]
