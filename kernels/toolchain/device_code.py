"""CUDA text that kernels carry beside what TileLang writes, and the names by which a kernel uses it.

A kernel of a chain says ``let_next_start(d)`` first, reads what nothing in a step writes (weights), says ``wait_for_previous(d)`` and only
then reads anything else or writes. Launched with ``after=True`` (``driver.Kernel``) it may then start while the one before it ends;
launched without, both are free. Waiting is for all of the kernels before, since each waits for its own: what they wrote is there.

TileLang writes both under the names of CUDA's device library, whose header NVRTC does not have, and leaves ``__restrict__`` out of
a kernel that waits: without it no read may move over the wait.
"""

from __future__ import annotations

from typing import Any

from .dialect import Dialect

FILE = "toolchain/device_code.py"
"""For ``Program.uses`` of every kernel that takes something from here."""

_TEXT = """
static __device__ __forceinline__ void cudaTriggerProgrammaticLaunchCompletion() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
static __device__ __forceinline__ void cudaGridDependencySynchronize() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// 2^x as the hardware has it; 0 for x below -126.
static __device__ __forceinline__ float exp2_flushed(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Sum over `width` neighbouring lanes (a power of two up to 32), the same bits in all of them.
template <int width> static __device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int step = width / 2; step; step /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}

// Sum over a block of `threads` (a multiple of 32), the same bits in all of them: within warps, then warp by warp.
template <int threads> static __device__ __forceinline__ float block_sum(float x) {
  __shared__ float of_warp[threads / 32];
  x = lanes_sum<32>(x);
  if (threadIdx.x % 32 == 0)
    of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  x = of_warp[0];
#pragma unroll
  for (int warp = 1; warp < threads / 32; ++warp)
    x += of_warp[warp];
  return x;
}
"""


def prelude(d: Dialect) -> str | None:
    """What ``T.Kernel`` is given as ``prelude``."""
    return None if d.cpu else _TEXT


def let_next_start(d: Dialect) -> Any:
    """The next kernel of the stream may start as soon as all blocks of this one have come here."""
    return None if d.cpu else d.T.pdl_trigger()


def wait_for_previous(d: Dialect) -> Any:
    """Goes on when the kernels before have ended and what they wrote can be read."""
    return None if d.cpu else d.T.pdl_sync()


def quotient(d: Dialect, x: Any, y: Any) -> Any:
    """``x / y`` by the reciprocal that the hardware has, off by 2 in the last place at most; 0 for ``y`` from 2^126 on."""
    return x / y if d.cpu else d.T.call_extern("float32", "__fdividef", x, y)


def exp2(d: Dialect, x: Any) -> Any:
    """``2^x`` by one instruction, off by 2 in the last place at most; on a GPU 0 for ``x`` below -126."""
    return d.T.exp2(x) if d.cpu else d.T.call_extern("float32", "exp2_flushed", x)


def lanes_sum(d: Dialect, groups: int, lanes: int) -> Any:
    """Gives ``add(part, total)``: ``total[g, l]`` becomes the sum over ``part[g]`` ``[groups, lanes]`` for every ``l``. ``lanes`` is a
    power of two up to 32; neighbouring threads hold them."""
    T = d.T

    @T.macro
    def on_cpu(part: Any, total: Any) -> None:
        for g in T.serial(groups):
            total[g, 0] = part[g, 0]
            for i in T.serial(1, lanes):
                total[g, 0] += part[g, i]
            for i in T.serial(1, lanes):
                total[g, i] = total[g, 0]

    @T.macro
    def on_gpu(part: Any, total: Any) -> None:
        for g, i in T.Parallel(groups, lanes):
            total[g, i] = T.call_extern("float32", f"lanes_sum<{lanes}>", part[g, i])

    return on_cpu if d.cpu else on_gpu


def block_sum(d: Dialect, threads: int) -> Any:
    """Gives ``add(part, total)``, once in a kernel: ``total[t]`` becomes the sum over ``part`` ``[threads]`` for every ``t``."""
    T = d.T

    @T.macro
    def on_cpu(part: Any, total: Any) -> None:
        for t in T.serial(threads):
            total[t] = 0.0
        for t in T.serial(threads):
            total[0] += part[t]
        for t in T.serial(1, threads):
            total[t] = total[0]

    @T.macro
    def on_gpu(part: Any, total: Any) -> None:
        for t in T.Parallel(threads):
            total[t] = T.call_extern("float32", f"block_sum<{threads}>", part[t])

    return on_cpu if d.cpu else on_gpu
