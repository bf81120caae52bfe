"""Ring memory, KV tensors, the block table and the forward's inputs."""

from __future__ import annotations

import itertools

import pytest
import torch

from deepinfer.models.base import PagedGroup, Source, StateGroup
from deepinfer.worker.input_batch import InputBatch, one_sequence
from deepinfer.worker.kv_cache import KVCache, state_bytes, zeros
from deepinfer.worker.resolve import SlotMap
from deepinfer.worker.step_ring import Header, StepRing

LAYOUT = [("header", 64), ("ids", 8), ("pos", 8), ("slots0", 8), ("cu_q", 5), ("seq_len", 4), ("state_row", 4)]
LAYOUT += [("table_delta", 30), ("tokens", 4), ("accepted", 4)]


def ring(device: str) -> StepRing:
    return StepRing(LAYOUT, [("mine", 4)], torch.device(device), pinned=device != "cpu")


def test_fields_of_all_slots_are_disjoint_and_of_the_named_length(device: str) -> None:
    r = ring(device)
    spans = []
    for slot in r.slots:
        for name, words in [*LAYOUT, ("mine", 4)]:
            view = slot.t[name]
            assert view.dtype == torch.int32 and view.is_contiguous() and view.numel() == words
            spans.append((view.data_ptr(), view.data_ptr() + 4 * words))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert [set(fields) for fields in r.registration()] == [{name for name, _ in LAYOUT}] * 3


def test_upload_carries_inputs_and_leaves_outputs_alone(device: str) -> None:
    slot = ring(device).slots[1]
    slot.a["ids"][:] = range(8)
    slot.a["mine"][:] = 7
    slot.upload()
    assert slot.d["ids"].tolist() == list(range(8)) and slot.d["mine"].tolist() == [7] * 4
    if device == "cpu":
        assert slot.d["ids"].data_ptr() == slot.t["ids"].data_ptr()  # nothing was copied
    else:
        assert "tokens" not in slot.d


def test_slots_share_one_copy_of_which_a_part_can_be_renewed(device: str) -> None:
    r = StepRing(LAYOUT, [("mine", 4)], torch.device(device), device != "cpu", front=[("words", 20)], copied=True)
    assert (r.front_words, r.own_words) == (32, 48)
    first, second = r.slots[:2]
    assert first.t["words"].storage_offset() == 0 and first.t["mine"].storage_offset() == 32
    for value, slot in ((1, first), (2, second)):
        for name in ("words", "mine", "ids"):
            slot.a[name][:] = value
    first.upload()
    assert [int(second.d[name][0]) for name in ("words", "mine", "ids")] == [1, 1, 1]
    second.upload(r.front_words)
    assert [int(first.d[name][0]) for name in ("words", "mine", "ids")] == [2, 1, 1]
    second.upload(r.own_words)
    assert [int(first.d[name][0]) for name in ("words", "mine", "ids")] == [2, 2, 1]
    assert first.d["ids"].data_ptr() == second.d["ids"].data_ptr() != first.t["ids"].data_ptr() and "tokens" not in first.d
    assert [set(fields) for fields in r.registration()] == [{name for name, _ in LAYOUT}] * 3


def test_a_ring_needs_three_slots() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        StepRing(LAYOUT, [], torch.device("cpu"), False, slots=2)


def test_header_reads_a_step_beyond_32_bits() -> None:
    words = torch.zeros(64, dtype=torch.int32).numpy()
    words[:16] = [3, -2, 1, 30, 4, 2, 3, 5, 0, 0, 0, 2, 28, 99, 0, 1]
    h = Header.read(words)
    assert (h.kind, h.step) == (3, (1 << 32) | 0xFFFFFFFE)
    assert (h.rows, h.seqs, h.decodes, h.samples, h.deltas, h.admitted) == (30, 4, 2, 3, 5, 2)
    assert (h.max_q, h.max_len, h.prompt_logprobs) == (28, 99, 1)


def two_groups(device: str) -> KVCache:
    first = PagedGroup(8, (Source(("k", "v"), 8, (2, 4), torch.float32), Source(("pooled",), 4, (3,), torch.bfloat16)))
    second = PagedGroup(4, (Source(("w",), 4, (5,), torch.float32),))
    return KVCache([first, second], [6, 11], [StateGroup(stored=10, dropped=6, replicas=1)], 4, torch.device(device))


def test_kv_tensors_follow_the_declared_groups(device: str) -> None:
    kv = two_groups(device)
    assert {n: tuple(t.shape) for n, t in kv.tensors.items()} == {
        "k": (6, 8, 2, 4),
        "v": (6, 8, 2, 4),
        "pooled": (6, 4, 3),
        "w": (11, 4, 5),
        "state0": (4, 26),
    }
    assert kv.tensors["pooled"].dtype == torch.bfloat16
    assert state_bytes(StateGroup(stored=10, dropped=6, replicas=1)) == 26


def test_a_large_pool_on_a_cpu_takes_memory_only_where_it_is_written() -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = zeros((1 << 14, 1 << 16), torch.bfloat16, torch.device("cpu"))  # 2 GiB
    pool[77, 5] = 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10  # KiB
    assert pool.data_ptr() % 64 == 0 and pool[77, 4:7].tolist() == [0, 1, 0] and pool[-1, -1] == 0


def test_clone_blocks_copies_within_the_named_group_only(device: str) -> None:
    kv = two_groups(device)
    for t in kv.tensors.values():
        t.copy_(torch.arange(t.numel(), device=device).view(t.shape) % 251)
    before = {n: t.clone() for n, t in kv.tensors.items()}
    kv.clone_blocks(torch.tensor([[0, 1, 3], [1, 2, 9], [1, 5, 10], [0, 2, 4]], dtype=torch.int32, device=device))
    for name, moves in {"k": [(1, 3), (2, 4)], "v": [(1, 3), (2, 4)], "pooled": [(1, 3), (2, 4)], "w": [(2, 9), (5, 10)]}.items():
        want = before[name]
        for src, dst in moves:
            want[dst] = want[src]
        assert torch.equal(kv.tensors[name], want)
    assert torch.equal(kv.tensors["state0"], before["state0"])


def test_state_rows_are_copied_and_cleared(device: str) -> None:
    kv = two_groups(device)
    kv.states[0].copy_(torch.arange(4, device=device).view(4, 1).expand(4, 26))
    kv.clone_states(torch.tensor([[1, 3]], dtype=torch.int32, device=device))
    kv.zero_states(torch.tensor([2], dtype=torch.int32, device=device))
    assert kv.states[0][:, 0].tolist() == [0, 1, 0, 1]


def test_a_tensor_name_is_declared_once() -> None:
    group = PagedGroup(8, (Source(("k", "k"), 8, (1,), torch.float32),))
    with pytest.raises(ValueError, match="'k'"):
        KVCache([group], [2], [], 2, torch.device("cpu"))


def test_block_table_after_deltas_equals_the_master(device: str) -> None:
    r = ring(device)
    inputs = InputBatch(5, 6, 16, [SlotMap(0, 16, 16)], torch.device(device))
    master = torch.zeros(5, 6, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        slot = r.slots[step % 3]
        cells = torch.randperm(30, generator=generator)[:9]
        pages = torch.randint(1, 100, (9,), generator=generator, dtype=torch.int32)
        rows, columns = cells // 6, cells % 6
        slot.t["table_delta"][:27] = torch.stack([rows, columns, pages], 1).reshape(-1).to(torch.int32)
        master[rows, columns] = pages
        slot.a["header"][7] = 9
        slot.upload()
        inputs.apply_deltas(slot, Header.read(slot.a["header"]))
        assert torch.equal(inputs.table.cpu(), master)


def test_forward_batch_holds_only_the_rows_of_the_step(device: str) -> None:
    slot = ring(device).slots[0]
    inputs = InputBatch(5, 6, 16, [SlotMap(0, 16, 16)], torch.device(device))
    inputs.table.copy_(torch.arange(30, device=device).view(5, 6))
    a = slot.a
    a["header"][:14] = [3, 1, 0, 4, 2, 1, 0, 0, 0, 0, 0, 0, 3, 40]
    a["ids"][:], a["pos"][:], a["slots0"][:] = range(8), range(10, 18), [5, 6, -1, 8, 0, 0, 0, 0]
    a["cu_q"][:3], a["seq_len"][:2], a["state_row"][:2] = [0, 1, 4], [40, 3], [4, 2]
    slot.upload()
    batch, _ = inputs.build(slot, Header.read(a["header"]))
    assert batch.ids.tolist() == [0, 1, 2, 3] and batch.pos.tolist() == [10, 11, 12, 13]
    assert batch.slots[0].tolist() == [5, 6, -1, 8] and batch.ids.dtype == batch.pos.dtype == batch.slots[0].dtype == torch.int64
    assert batch.cu_q.tolist() == batch.cu_q_host == [0, 1, 4] and batch.seq_len.tolist() == batch.seq_len_host == [40, 3]
    assert batch.block_table.tolist() == [[24, 25, 26], [12, 13, 14]]  # cut to the three pages that 40 tokens take
    assert (batch.num_decodes, batch.max_q, batch.max_len) == (1, 3, 40)


def test_slots_of_a_whole_sequence_follow_the_ratio_of_each_map() -> None:
    batch = one_sequence(list(range(11)), [8, 4], [2, 4], [(0, 8), (0, 4), (1, 4)], torch.device("cpu"))
    assert batch.slots[0].tolist() == [8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    assert batch.slots[1].tolist() == [-1, 4, -1, 5, -1, 6, -1, 7, -1, 8, -1]
    assert batch.slots[2].tolist() == [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    assert batch.block_table.tolist() == [[1, 2, 1, 2, 3, 0]]
