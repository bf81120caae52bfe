"""What differs between devices: variables that choose them, targets of kernels, streams, page-locked memory. With fakes for a GPU."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer.errors import CapacityError, ConfigError
from deepinfer.platforms import check_visible_devices, get_platform, host_memory
from deepinfer.platforms.cpu import CpuPlatform
from deepinfer.platforms.cuda import NO_WORKSPACE, CudaPlatform, cublas_workspace
from deepinfer.platforms.host_memory import LockedLater, register_host, unregister_host
from deepinfer.platforms.targets import DEFAULT_TARGET, set_default_target
from deepinfer.platforms.visible import ASCEND, CONTAINER, CUDA

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {CUDA: "0,1"},
        {ASCEND: "3"},
        {CONTAINER: "none"},
        {CUDA: "0,1", ASCEND: "0,1"},
        {CUDA: "0, 1", ASCEND: "00,1"},
        {CUDA: "2,-1,3", ASCEND: "2"},
        {CUDA: "", ASCEND: "-1"},
        {CUDA: "5", CONTAINER: "all"},
        {CUDA: "5", CONTAINER: "void"},  # as the runtime writes when it has put devices in by another way
        {CUDA: "5", CONTAINER: ""},
        {CUDA: "", CONTAINER: "none"},
        {CUDA: "0,1", CONTAINER: "6,7"},  # the container counts its own from 0
        {CUDA: "1", CONTAINER: "GPU-aa,GPU-bb"},
        {CUDA: "GPU-b", CONTAINER: "GPU-aa,GPU-bb"},
        {CUDA: "GPU-cc", CONTAINER: "0,1"},  # no telling which UUIDs those are
        {CUDA: "MIG-1", CONTAINER: "MIG-1"},
    ],
    ids=str,
)
def test_variables_that_agree(variables: dict[str, str]) -> None:
    check_visible_devices(variables)


@pytest.mark.parametrize(
    "variables",
    [
        {CUDA: "0,1", ASCEND: "0"},
        {CUDA: "0,1", ASCEND: "1,0"},  # the same devices in another order are other devices
        {CUDA: "", ASCEND: "0"},
        {CUDA: "0", CONTAINER: "none"},
        {CUDA: "2", CONTAINER: "6,7"},
        {CUDA: "GPU-cc", CONTAINER: "GPU-aa,GPU-bb"},
    ],
    ids=str,
)
def test_variables_that_disagree_are_both_named(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as error:
        check_visible_devices(variables)
    for name, value in variables.items():
        assert f"{name}={value!r}" in str(error.value)
    for name in (CUDA, ASCEND, CONTAINER):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for device in ("auto", "cuda", "cuda:0"):
        with pytest.raises(ConfigError, match=CUDA):
            get_platform(device)
    assert get_platform("cpu").name == "cpu"


def test_the_target_of_kernels_is_said_outright(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DEFAULT_TARGET, raising=False)
    before = torch.get_num_threads()
    CpuPlatform().prepare(before)
    import os

    assert json.loads(os.environ[DEFAULT_TARGET]) == {"kind": "c"}
    set_default_target({"kind": "cuda", "arch": "sm_90a"})
    assert json.loads(os.environ[DEFAULT_TARGET]) == {"kind": "c"}, "what is there is the user's choice"


@pytest.mark.parametrize(("capability", "arch"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a")])
def test_the_target_of_a_gpu_is_its_own(capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert CudaPlatform(1).kernel_target == {"kind": "cuda", "arch": arch}


def test_streams_have_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append(device) or SimpleNamespace(cuda_stream=77))
    assert CudaPlatform(1).stream_handle() == 77 and asked == [torch.device("cuda", 1)]
    assert CpuPlatform().stream_handle() == 0


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """A GPU that can be prepared for; the function says whether CUDA has started. What is set of the process is put back."""
    started = False

    def start(value: bool) -> None:
        nonlocal started
        started = value

    for name in (*NO_WORKSPACE, DEFAULT_TARGET):
        monkeypatch.setenv(name, "")  # noted, and put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield start


def test_cublas_gets_no_workspace_before_cuda_starts(fake_gpu: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "4096")  # somebody's own value, which would cost invariance
    CudaPlatform().prepare(None)
    assert {name: os.environ[name] for name in NO_WORKSPACE} == NO_WORKSPACE == {
        "CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0",
    }  # fmt: skip
    fake_gpu(True)
    CudaPlatform().prepare(None)
    for name in NO_WORKSPACE:
        with monkeypatch.context() as other:
            other.setenv(name, "64")
            with pytest.raises(ConfigError, match=r"CUBLAS_WORKSPACE_CONFIG=:0:0 and CUBLASLT_WORKSPACE_SIZE=0, which batch invariance"):
                CudaPlatform().prepare(None)


def test_without_batch_invariance_cublas_keeps_its_own_workspace_or_the_users(
    fake_gpu: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    CudaPlatform().prepare(None, batch_invariant=False)
    assert not set(NO_WORKSPACE) & set(os.environ) and cublas_workspace() == 32 << 20
    CudaPlatform().prepare(None)
    assert cublas_workspace() == 0
    CudaPlatform().prepare(None, batch_invariant=False)  # what the engine before this one has set is taken back
    assert not set(NO_WORKSPACE) & set(os.environ)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    CudaPlatform().prepare(None, batch_invariant=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and cublas_workspace() == 0
    CudaPlatform().prepare(None)
    fake_gpu(True)
    assert not caplog.records
    CudaPlatform().prepare(None, batch_invariant=False)  # too late, and no error: products are right without
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":0:0" and "without workspace" in caplog.text


def test_batch_invariance_cannot_be_had_once_cuda_has_started_without(fake_gpu: Callable[[bool], None]) -> None:
    CudaPlatform().prepare(None, batch_invariant=False)
    fake_gpu(True)
    with pytest.raises(ConfigError, match="batch invariance needs"):
        CudaPlatform().prepare(None)


class FakeDriver:
    """The driver's two functions for memory of the host, answering with ``code``."""

    def __init__(self) -> None:
        self.code = 0
        self.calls: list[tuple[Any, ...]] = []

    def cuMemHostRegister_v2(self, address: Any, nbytes: Any, flags: int) -> int:
        self.calls.append(("register", address.value, nbytes.value, flags))
        return self.code

    def cuMemHostUnregister(self, address: Any) -> int:
        self.calls.append(("unregister", address.value))
        return self.code

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    found = FakeDriver()
    monkeypatch.setattr(host_memory, "_driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=lambda: None))
    yield found


def test_existing_memory_is_registered_in_place(fake: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    host = torch.zeros(3, 5, dtype=torch.float32)
    assert register_host(host, GPU)
    unregister_host(host, GPU)
    assert fake.calls == [("register", host.data_ptr(), 60, 3), ("unregister", host.data_ptr())] and caplog.records == []


def test_memory_that_is_registered_already_is_no_news(fake: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    host = torch.zeros(4)
    fake.code = 712
    assert register_host(host, GPU)
    fake.code = 713
    unregister_host(host, GPU)
    assert caplog.records == []


def test_every_other_refusal_is_warned_of_each_time(fake: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    host = torch.zeros(4)
    fake.code = 2
    with caplog.at_level(logging.WARNING):
        assert [register_host(host, GPU) for _ in range(3)] == [False] * 3
        unregister_host(host, GPU)
        fake.code = 713
        assert not register_host(host, GPU)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 5 and all("CUDA_ERROR_OUT_OF_MEMORY (" in line and "16 bytes" in line for line in said)
    assert len(set(said[:3])) == 1 and "release" in said[3]


def test_nothing_is_registered_for_a_cpu(fake: FakeDriver) -> None:
    assert not register_host(torch.zeros(4), torch.device("cpu")) and not register_host(torch.zeros(0), GPU)
    unregister_host(torch.zeros(4), torch.device("cpu"))
    assert fake.calls == []


def test_memory_is_locked_while_others_go_on(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    go, seen = threading.Event(), []

    def lock(host: torch.Tensor, device: torch.device) -> int:
        go.wait(10)
        seen.append((tuple(host.shape), device, int(host.sum())))
        return 0

    monkeypatch.setattr(host_memory, "_lock", lock)
    memory = LockedLater((3, 5), GPU, "victims", "lower swap_space_gib")
    assert not memory.ready and not seen
    go.set()
    host = memory.get()
    assert memory.ready and seen == [((3, 5), GPU, 0)] and tuple(host.shape) == (3, 5) and memory.get() is host
    memory.close()
    assert memory.ready and not caplog.records


@pytest.mark.parametrize("fault", [2, RuntimeError("CUDA error: initialization error")], ids=["code", "raised"])
def test_memory_that_cannot_be_locked_names_what_to_lower(
    fault: int | Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lock(host: torch.Tensor, device: torch.device) -> int:
        if isinstance(fault, Exception):
            raise fault
        return fault

    monkeypatch.setattr(host_memory, "_lock", lock)
    memory = LockedLater((1 << 20, 7), GPU, "victims", "lower swap_space_gib")
    for _ in range(2):
        with pytest.raises(CapacityError, match=rf"page-lock 0\.01 GiB of host memory for victims \(error {fault}\); lower swap_space_gib"):
            memory.get()
    assert not memory.ready and len(caplog.records) == 1 and "swap_space_gib" in caplog.text


def test_locking_can_be_stopped(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Between pieces: a process that ends does not wait for some GiB."""
    touched, go = [], threading.Event()
    zero = torch.Tensor.zero_

    def slow(piece: torch.Tensor) -> torch.Tensor:
        touched.append(piece.numel())
        go.wait(10)
        return zero(piece)

    monkeypatch.setattr(torch.Tensor, "zero_", slow)
    monkeypatch.setattr(host_memory, "_TOUCHED", 1000)
    monkeypatch.setattr(host_memory, "_lock", lambda host, device: pytest.fail("it was stopped before"))
    memory = LockedLater((10, 450), GPU, "victims", "lower swap_space_gib")
    stopping = threading.Thread(target=memory.close)
    stopping.start()
    while not memory._stopped.is_set():
        time.sleep(0.001)
    go.set()
    stopping.join(10)
    assert not stopping.is_alive() and sum(touched) <= 2000 and not memory.ready and not caplog.records
    with pytest.raises(CapacityError):
        memory.get()


@pytest.mark.gpu
def test_memory_locked_later_is_pinned_to_torch() -> None:
    memory = LockedLater((1 << 10, 1 << 12), GPU, "victims", "lower swap_space_gib")
    host = memory.get()
    assert memory.ready and host.is_pinned() and host[5:9].is_pinned() and not host.any()
    there = torch.arange(1 << 12, device="cuda").to(torch.uint8)
    host[7].copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(host[7], there.cpu())


@pytest.mark.gpu
def test_registered_memory_is_pinned_to_torch_and_failures_leave_nothing_behind() -> None:
    torch.zeros(1, device="cuda")
    host = torch.zeros(1 << 20)
    assert not host.is_pinned()
    assert register_host(host, GPU) and register_host(host, GPU) and host.is_pinned()
    assert torch.equal(host.to("cuda", non_blocking=True).cpu(), host), "the second registration is no error of the next launch"
    unregister_host(host, GPU)
    unregister_host(host, GPU)
    assert not host.is_pinned() and int(torch.ones(8, device="cuda").sum()) == 8
