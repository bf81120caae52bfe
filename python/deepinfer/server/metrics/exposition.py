"""Everything a server counts, as the text that Prometheus reads.

Owns: what is on the page and the page's form. Never touches: how anything is counted (see `front`, `engine`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector

from deepinfer.server.metrics import engine, vllm
from deepinfer.server.metrics.engine import PREFIX, Snapshot
from deepinfer.server.metrics.front import FrontMetrics
from deepinfer.server.metrics.snapshots import Snapshots

if TYPE_CHECKING:
    from deepinfer.server.state import ServerState

SHARED = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable that names the folder of the values of several front processes."""


_SYNC = 1.0
"""Seconds between two times that one of several front processes tells the others what is of the moment."""


class Collector(Protocol):
    """Gives metrics when asked."""

    def collect(self) -> Iterable[Metric]:
        """Each with its values of this moment."""


class ServerMetrics:
    """The metrics of one server.

    Args:
        state: of this front process.
        vllm_names: also give the core ones under vLLM's names.
    """

    def __init__(self, state: ServerState, vllm_names: bool = False) -> None:
        self._state, self._vllm_names = state, vllm_names
        disable_created_metrics()  # a second series for each counter, which nothing here reads
        shared = os.environ.get(SHARED)
        own = None if shared else CollectorRegistry(auto_describe=False)
        self.front = FrontMetrics(own, state.model_name)
        self._front: Collector = MultiProcessCollector(CollectorRegistry(), shared) if own is None else own
        self._process = None if shared else ProcessCollector(registry=None)
        self._snapshots = Snapshots(state.llm)
        # Another process may be the one that is scraped.
        self._syncing = asyncio.create_task(self._sync()) if shared else None

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(_SYNC)
            self.front.sync(self._state)

    async def page(self, accept: str = "") -> tuple[bytes, str]:
        """The text and its content type, in the form that ``accept`` asks for."""
        snapshots = await self._snapshots.newest()
        self.front.sync(self._state)
        moment = list(self._moment())
        encode, kind = choose_encoder(accept)
        # Some milliseconds of text that no stream shall wait for.
        return await asyncio.to_thread(lambda: encode(_Page(self._everything(snapshots, moment)))), kind

    def _everything(self, snapshots: Mapping[str, Snapshot], moment: list[Metric]) -> list[Metric]:
        made = [*moment, *self._front.collect(), *engine.families(self._state.model_name, snapshots)]
        if self._vllm_names:
            made += list(vllm.families(made))
        if self._process is not None:
            made += list(self._process.collect())
        return made

    def _moment(self) -> Iterator[Metric]:
        """What no counter has."""
        llm, model = self._state.llm, self._state.model_name
        up = GaugeMetricFamily(PREFIX + "engine_up", "whether the engine serves", labels=["model_name"])
        up.add_metric([model], float(llm.is_running))
        yield up
        restarts = CounterMetricFamily(
            PREFIX + "engine_restarts", "starts of an engine process after its end", labels=["model_name", "engine"]
        )
        for name, count in llm.restarts.items():
            restarts.add_metric([model, name], count)
        yield restarts

    def close(self) -> None:
        """Asks the engine no more, and leaves its counts to the other processes. May be called from another thread."""
        self.front.sync(self._state)
        for task in (*self._snapshots.asking, *([] if self._syncing is None else [self._syncing])):
            task.get_loop().call_soon_threadsafe(task.cancel)


class _Page:
    """What an encoder takes for a registry."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics
