"""Blocks that work on one row together, for the C texts of ``imported``: a cluster on a GPU, threads of the host on the CPU target.

A text says ``BLOCKS`` and ``BLOCK`` (how many, which one), ``ROW_SYNC()`` where ``SYNC()`` must hold for all blocks of a row,
``of_block(p, b)`` for what ``p`` points to in block ``b``'s shared memory, ``EVERY_BLOCK(b)`` for an unrolled loop over them,
``TOGETHER(call)`` once in the function that the kernel calls, around all of its work, and ``OWN_PART(p, n)`` for the ``n`` elements of a
block where the kernel passes shared memory (on the CPU target: a buffer for all ``BLOCKS``). Pointers of ``of_block`` lie in the one object
that every block has named in ``SHARED_WITH_ROW(p)``. All blocks of a row come to the same ``ROW_SYNC()``s: what decides on them is the same
for all. No block may end while another may still reach its memory: the last word is a ``ROW_SYNC()``.
"""

from __future__ import annotations

from .dialect import Dialect

FILE = "toolchain/row_blocks.py"
"""For ``Program.uses`` of every kernel whose blocks share rows."""

PORTABLE = 8
"""Blocks that any GPU with clusters can hold together."""

_ALONE = """
#define BLOCK 0
#define ROW_SYNC() SYNC()
#define SHARED_WITH_ROW(p)
#define TOGETHER(call) call
#define OWN_PART(p, n) (p)
#define EVERY_BLOCK(b) for (int b = 0; b < 1; ++b)
template <class T> INLINE T* of_block(T* p, int block) { return p; }
"""

_GPU = """
#define BLOCK ((int)blockIdx.x % BLOCKS)
#define SHARED_WITH_ROW(p)
#define TOGETHER(call) call
#define OWN_PART(p, n) (p)
#define EVERY_BLOCK(b) _Pragma("unroll") for (int b = 0; b < BLOCKS; ++b)
INLINE void ROW_SYNC() {
  SYNC();
  if (THREAD == 0) asm volatile("fence.acq_rel.cluster;" ::: "memory");  // for the block, which the barrier before has brought together
  asm volatile("barrier.cluster.arrive.relaxed;\\nbarrier.cluster.wait.acquire;" ::: "memory");
}
template <class T> INLINE T* of_block(T* p, int block) {
  T* there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(p), "r"(block));
  return there;
}
"""

# A block that ends where others still wait would be a cluster that hangs.
_CPU = """
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>
#undef SHARED
#define SHARED static thread_local
static thread_local int BLOCK;
static char* shared_of[BLOCKS];
#define SHARED_WITH_ROW(p) shared_of[BLOCK] = (char*)(p)
#define OWN_PART(p, n) ((p) + BLOCK * (n))
#define EVERY_BLOCK(b) for (int b = 0; b < BLOCKS; ++b)
template <class T> static inline T* of_block(T* p, int block) { return (T*)(shared_of[block] + ((char*)p - shared_of[BLOCK])); }
static std::mutex row_mutex;
static std::condition_variable row_met;
static int row_waiting, row_ended;
static long row_turn;
static void row_check() {
  if (row_waiting && row_ended) {
    fputs("blocks of a row have parted: some have ended where others wait\\n", stderr);
    abort();
  }
}
static void ROW_SYNC() {
  std::unique_lock<std::mutex> lock(row_mutex);
  const long turn = row_turn;
  if (++row_waiting == BLOCKS) {
    row_waiting = 0;
    ++row_turn;
    row_met.notify_all();
  }
  row_check();
  row_met.wait(lock, [&] { return row_turn != turn; });
}
template <class F> static void together(F work) {
  std::vector<std::thread> blocks;
  row_ended = 0;
  for (int b = 0; b < BLOCKS; ++b)
    blocks.emplace_back([=] {
      BLOCK = b;
      work();
      std::lock_guard<std::mutex> lock(row_mutex);
      shared_of[b] = nullptr;
      ++row_ended;
      row_check();
    });
  for (auto& block : blocks) block.join();
}
#define TOGETHER(call) together([=] { call; })
"""


def text(d: Dialect, blocks: int) -> str:
    """Behind the names of ``imported``. On a GPU a kernel has ``cluster_dims=blocks`` and a row's blocks are neighbours along x; on the CPU
    target it calls the function once a row."""
    return f"#define BLOCKS {blocks}\n" + (_ALONE if blocks == 1 else _CPU if d.cpu else _GPU)
