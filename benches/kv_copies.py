"""How fast KV moves between a GPU's pages and host memory: one gather for all objects, beside one copy and beside a copy a page.

    python benches/kv_copies.py [--layers 32 --kv-heads 8 --head-dim 128] [--objects 64] [--block-size 64] [--json]

Objects hold 128 tokens of all layers, as the KV store and its host tier keep them, in page-locked memory; their pages lie scattered over
a cache. `in` is `write_objects`, what brings a stored prefix back; `out` is `read_objects`, what saves one. Beside them: `copy`, the same
bytes as one asynchronous copy, the most that the bus gives; `pages`, one copy for each page of each tensor. Medians of `--repeats` by
CUDA events, GB/s of the objects' bytes; the answer is compared with what went in.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch

from deepinfer.kvcache.layout import KvLayout
from deepinfer.kvcache.objects import ObjectForm, Staging, read_objects, write_objects
from deepinfer.models.base import PagedGroup, Source
from deepinfer.worker.kv_cache import KVCache


def seconds(work: Callable[[], None], repeats: int) -> float:
    """Median of ``repeats`` runs on the device's clock."""
    found = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found[1:])


def main() -> None:
    """Prints one line a way, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--objects", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kv_copies: no GPU is here; on a CPU the store's own figures are those of `deepinfer kvstore bench`")
    device = torch.device("cuda")
    names = tuple(f"{kind}{layer}" for layer in range(args.layers) for kind in "kv")
    group = PagedGroup(args.block_size, (Source(names, args.block_size, (args.kv_heads, args.head_dim), torch.bfloat16),))
    form = ObjectForm(KvLayout({"model": "bench"}, (group,), ()))
    total = 2 * args.objects * form.blocks
    kv = KVCache((group,), [total + 1], (), 1, device)
    for tensor in kv.tensors.values():
        tensor.normal_()
    pages = [
        (1 + torch.randperm(total, generator=torch.Generator().manual_seed(0)))[: args.objects * form.blocks]
        .view(args.objects, -1)
        .to(device)
    ]
    staging, back = Staging(form, args.objects, device), Staging(form, args.objects, device)
    flat = torch.empty_like(staging.host, device=device)
    listed = pages[0].flatten().tolist()

    def page_by_page() -> None:
        for tensor in kv.tensors.values():
            rows = tensor.view(tensor.shape[0], -1).view(torch.uint8)
            for nth, page in enumerate(listed):
                rows[page].copy_(staging.host.view(-1)[nth * rows.shape[1] : (nth + 1) * rows.shape[1]], non_blocking=True)

    read_objects(kv, form, pages, staging.seen)
    torch.cuda.synchronize()
    ways: dict[str, Callable[[], None]] = {
        "out": lambda: read_objects(kv, form, pages, back.seen),
        "in": lambda: write_objects(kv, form, pages, staging.seen),
        "copy": lambda: (flat.copy_(staging.host, non_blocking=True), None)[1],
        "pages": page_by_page,
    }
    nbytes = args.objects * form.num_bytes
    found = {"device": torch.cuda.get_device_name(), "objects": args.objects, "bytes": nbytes}
    found |= {f"{way}_gb_s": round(nbytes / seconds(ways[way], args.repeats) / 1e9, 2) for way in ("out", "in", "copy")}
    assert torch.equal(back.host, staging.host), "what came out differs from what lies in the cache"
    for tensor in kv.tensors.values():
        tensor.zero_()
    write_objects(kv, form, pages, staging.seen)
    back.host.zero_()
    read_objects(kv, form, pages, back.seen)
    torch.cuda.synchronize()
    assert torch.equal(back.host, staging.host), "what was brought back differs from what was saved"
    found["pages_gb_s"] = round(nbytes / seconds(ways["pages"], 3) / 1e9, 2)
    print(json.dumps(found) if args.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
