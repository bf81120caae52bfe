"""Reads tensors side by side, a bounded part of a checkpoint ahead of where they are put."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from ...platforms.cpu import CpuPlatform

T = TypeVar("T")

_MOST = 8 << 30
"""Bytes that are read ahead at most, where the host has eight times as many free."""


def room_ahead() -> int:
    """Bytes of host memory that tensors may take before they are put in their places."""
    return min(_MOST, CpuPlatform().memory_available() // 8)


def read_ahead(sizes: Mapping[str, int], read: Callable[[str], T], threads: int, room: int) -> Iterator[tuple[str, T]]:
    """Every name of ``sizes`` with what ``read`` gives for it, as they are ready.

    Args:
        sizes: bytes of each, as far as memory goes.
        read: is called from ``threads`` threads at once, or from this one if they are one.
        room: bytes that are read or waiting at a time; a single tensor may be larger.

    Tensors of over an eighth of ``room`` come first, so that none of them is waited for alone at the end; the others in order. An error
    ends it, once what is being read has been.
    """
    large = {name for name, size in sizes.items() if size > room // 8}
    names = [*(n for n in sizes if n in large), *(n for n in sizes if n not in large)]
    if threads == 1:
        for name in names:
            yield name, read(name)
        return
    reading: dict[Future[T], str] = {}
    held = at = 0
    ours = torch.get_num_threads()
    # Teams of threads for each of these would fight for the same cores, and spin while they wait for each other.
    pool = ThreadPoolExecutor(threads, thread_name_prefix="deepinfer-load", initializer=torch.set_num_threads, initargs=(1,))
    try:
        while reading or at < len(names):
            while at < len(names) and (not reading or (held + sizes[names[at]] <= room and len(reading) <= threads)):
                reading[pool.submit(read, names[at])] = names[at]
                held += sizes[names[at]]
                at += 1
            done, _ = wait(reading, return_when=FIRST_COMPLETED)
            for future in [f for f in reading if f in done]:
                name = reading.pop(future)
                yield name, future.result()
                held -= sizes[name]
            del done, future
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(ours)  # of threads that are yet to come, too
