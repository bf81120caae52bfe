"""Functions in C that a kernel calls where tile operators do not reach, written once for a GPU and for the CPU target.

A text uses ``DEVICE`` for a function that the kernel calls (it returns ``int`` and has no ``const`` parameters) and ``INLINE`` for one of
its own, ``THREAD`` and ``THREADS`` for loops over the threads of a block, ``SYNC()`` between them, ``UNROLLED`` before one whose reads
should overlap and ``UNROLLED_BY(n)`` before any, ``ALIGNED(bytes)`` for a type that is read at once, ``SHARED`` for memory of a block,
``block_total`` and ``block_before``, ``warp_least`` and ``warp_most`` with ``FIRST_OF_WARP``, ``copy16`` of 16 bytes to shared memory,
which is done for the thread's own copies with ``copied``, and CUDA's atomic functions of 32- and 64-bit integers. On the CPU target a block
has one thread. Rows that several blocks share: ``row_blocks``.
"""

from __future__ import annotations

from typing import Any

from . import device_code, row_blocks
from .dialect import Dialect

FILES = ("toolchain/imported.py", device_code.FILE)
"""For ``Program.uses`` of every kernel that imports a text."""

_GPU = """
#define DEVICE extern "C" __device__ __forceinline__
#define INLINE static __device__ __forceinline__
#define SHARED __shared__
#define THREAD ((int)threadIdx.x)
#define SYNC() __syncthreads()
#define UNROLLED _Pragma("unroll 4")
#define ALIGNED(bytes) alignas(bytes)
#define PRAGMA(x) _Pragma(#x)
#define UNROLLED_BY(n) PRAGMA(unroll n)
#define BITS_OF(x) __float_as_int(x)
#define FLOAT_OF(x) __int_as_float(x)
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Sum over a block of whole warps, in all of its threads.
INLINE u64 block_total(u64 x) {
  __shared__ u64 of_warp[32];
  for (int step = 16; step; step /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, step);
  if (threadIdx.x % 32 == 0)
    of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int warp = 0; warp < THREADS / 32; ++warp)
    x += of_warp[warp];
  __syncthreads();
  return x;
}

// Sum over the threads before this one, of a block of whole warps.
INLINE u64 block_before(u64 x) {
  __shared__ u64 of_warp[32];
  const int lane = threadIdx.x % 32, own = threadIdx.x / 32;
  u64 sum = x;
  for (int step = 1; step < 32; step *= 2) {
    u64 lower = __shfl_up_sync(0xffffffffu, sum, step);
    sum += lane >= step ? lower : 0;
  }
  if (lane == 31)
    of_warp[own] = sum;
  __syncthreads();
  sum -= x;
  for (int warp = 0; warp < own; ++warp)
    sum += of_warp[warp];
  __syncthreads();
  return sum;
}

#define FIRST_OF_WARP (threadIdx.x % 32 == 0)
INLINE int warp_least(int x) { return __reduce_min_sync(0xffffffffu, x); }
INLINE int warp_most(int x) { return __reduce_max_sync(0xffffffffu, x); }
INLINE void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
INLINE void copied() { asm volatile("cp.async.wait_all;" ::: "memory"); }
"""

_CPU = """
#include <stdint.h>
#include <string.h>
#include <math.h>
#define DEVICE extern "C"
#define INLINE static inline
#define SHARED static
#define THREAD 0
#define THREADS 1
#define SYNC()
#define UNROLLED
#define UNROLLED_BY(n)
#define ALIGNED(bytes)
#define __threadfence()
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;
#define FIRST_OF_WARP 1
INLINE u64 block_total(u64 x) { return x; }
INLINE u64 block_before(u64 x) { return 0; }
INLINE int warp_least(int x) { return x; }
INLINE int warp_most(int x) { return x; }
INLINE void copy16(void* to, const void* from) { memcpy(to, from, 16); }
INLINE void copied() {}
static inline int BITS_OF(float x) { int b; memcpy(&b, &x, 4); return b; }
static inline float FLOAT_OF(int b) { float x; memcpy(&x, &b, 4); return x; }
template <class T> static inline T atomicMax(T* p, T v) { T old = *p; if (v > old) *p = v; return old; }
template <class T> static inline T atomicMin(T* p, T v) { T old = *p; if (v < old) *p = v; return old; }
template <class T> static inline T atomicAdd(T* p, T v) { T old = *p; *p = old + v; return old; }
template <class T> static inline T atomicExch(T* p, T v) { T old = *p; *p = v; return old; }
"""


def prelude(d: Dialect, functions: str, threads: int = 0, blocks: int = 0) -> str:
    """What ``T.Kernel`` is given as ``prelude``: ``functions`` behind the names they use, and all of ``device_code``.

    ``threads`` of a block, if the compiler is to know: loops over them are then unrolled. ``blocks`` of a row, if ``functions`` are written
    for several (``row_blocks``)."""
    names = _CPU if d.cpu else f"{device_code.prelude(d)}#define THREADS {threads or '((int)blockDim.x)'}{_GPU}"
    return names + (row_blocks.text(d, blocks) if blocks else "") + functions


def call(d: Dialect, name: str, *args: Any) -> Any:
    """A statement that calls an imported function, by all threads of the block."""
    T = d.T
    return T.evaluate(T.call_extern("int32", name, *args))
