"""Where Engram tables are for a step changes no bit; on a GPU with ``--device cuda``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepinfer.errors import CapacityError, ConfigError
from deepinfer.models.deepseek_v41 import engram_rows
from deepinfer.models.deepseek_v41.engram_table import EngramTable
from deepinfer.platforms.host_memory import empty_on_host, seen_by_device
from deepinfer.sampling import SamplingParams
from deepseek_v41.test_engine import PROMPTS, engine_of
from engine_kit import generate, make_engine, same_bits, tiny_checkpoint


def test_tables_anywhere_give_the_same_bits(device: str) -> None:
    kinds = [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)] * len(PROMPTS)
    answers = []
    for place in (None, "device", "host"):
        with engine_of("tiny", device, engram_tables=place) as engine:
            answers.append(generate(engine, PROMPTS, kinds))
    for others in answers[1:]:
        assert all(same_bits(a, b) for a, b in zip(others, answers[0], strict=True))


def test_a_place_that_cannot_be_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match="engram_tables must be one of auto, files, device, host, got 'disk'"):
        engine_of("tiny", device, engram_tables="disk")
    with pytest.raises(ConfigError, match="engram_tables is a setting of models with"):
        make_engine(tiny_checkpoint("llama"), device, engram_tables="host")
    if device != "cpu":
        with pytest.raises(ConfigError, match="engram_tables='files' is for a CPU"):
            engine_of("tiny", device, engram_tables="files")


class Memory:
    """A platform with so much free memory."""

    def __init__(self, free: int) -> None:
        self.free = free

    def memory_available(self) -> int:
        return self.free


def table(rows: int) -> EngramTable:
    values = np.arange(rows * 32, dtype=np.int64).reshape(rows, 32).astype(np.uint8)
    return EngramTable(values, np.full((rows, 1), 127, np.uint8), 0)


@pytest.mark.parametrize(("on_device", "on_host", "want"), [(4000, 0, "device"), (3000, 2000, "host"), (3000, 1500, None)])
def test_tables_go_where_they_fit(on_device: int, on_host: int, want: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tables of 25 records of 33 bytes: 1,650 bytes in all."""
    monkeypatch.setattr(engram_rows, "get_platform", lambda name: Memory(on_host if name == "cpu" else on_device))
    copied: list[bool] = []
    monkeypatch.setattr(engram_rows, "_CopiedTable", lambda table, device, host: copied.append(host) or table)
    tables, gpu = [table(25), table(25)], torch.device("cuda")
    if want is None:
        with pytest.raises(CapacityError, match=r"tables take 0\.0 GiB and 0\.0 GiB are free in host memory"):
            engram_rows._placed(tables, gpu, "auto")
    else:
        engram_rows._placed(tables, gpu, "auto")
        assert copied == [want == "host"] * 2


def test_memory_of_the_host_is_read_by_the_device(device: str) -> None:
    where = torch.device(device)
    host = empty_on_host((7, 5), where)
    host.copy_(torch.arange(35, dtype=torch.uint8).view(7, 5))
    seen = seen_by_device(host, where)
    del host  # the view keeps the memory
    assert seen.device.type == where.type
    rows = seen.index_select(0, torch.tensor([6, 0, 6], device=where)).cpu()
    assert rows.tolist() == [list(range(30, 35)), list(range(5)), list(range(30, 35))]
