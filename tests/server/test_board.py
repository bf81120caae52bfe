"""The Grafana board: every expression parses, and names metrics that a server has after a run that moves them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import promql_parser
import pytest
import torch
import yaml

from deepinfer.worker.expert_loads import ExpertLoads
from metrics_kit import Samples, read
from server_kit import serving

PACKAGING = Path(__file__).resolve().parent.parent.parent / "packaging"
BOARD = json.loads((PACKAGING / "grafana" / "deepinfer.json").read_text(encoding="utf-8"))
VARIABLES = {"$__rate_interval": "5m", "$model": ".*", "$engine": ".*", "$job": ".*"}

STILL = {
    # What this run does not do, each with what would move it.
    "deepinfer:engine_restarts_total": "an engine process that ends",
    "deepinfer:failed_steps_total": "a fault",
    "deepinfer:fetched_tokens_total": "a second engine",
    "deepinfer:ghost_rows_total": "an answer that stops on an id",
    "deepinfer:grammar_screened_out_total": "an absurd schema",
    "deepinfer:grammar_so_failed_total": "a matcher that fails",
    "deepinfer:grammar_timeouts_total": "a hostile schema",
    "deepinfer:grammar_workers_killed_total": "a hostile schema",
    "deepinfer:kvstore_dropped_total": "a store that is too slow",
    "deepinfer:kvstore_failed_total": "a store that fails",
    "deepinfer:kvstore_faults_total": "a store that fails",
    "deepinfer:kvstore_fetched_total": "a second engine",
    "deepinfer:kvstore_host_tokens_total": "an agent",
    "deepinfer:kvstore_lost_total": "a store that forgets",
    "deepinfer:kvstore_store_tokens_total": "a second engine",
    "deepinfer:misuse_total": "a fault",
    "deepinfer:rerun_tokens_total": "a model with windows",
    "deepinfer:row_waits_total": "a full pool",
    "deepinfer:snapshots": "a model with windows",
    "deepinfer:swap_in_pages_total": "a swap",
    "deepinfer:swap_out_pages_total": "a swap",
    "deepinfer:swaps_refused_total": "a swap",
    "deepinfer:waiting": "a scrape while something waits",
    "deepinfer:window_starts_total": "a model with windows",
}


COUNTED = ExpertLoads([torch.zeros(2, dtype=torch.int64)]).counts()
EXPERTS = {f"deepinfer:moe_{name}" + ("" if name.endswith("_ratio") else "_total") for name in COUNTED}
"""Of models with experts, which the one of this run is not; that they are shown is `test_every_number_of_a_snapshot_is_shown`."""


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression of the board, with its panel."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def filled(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def selectors(node: Any) -> Iterator[Any]:
    """Every vector selector below a node."""
    match node:
        case promql_parser.VectorSelector():
            yield node
        case promql_parser.MatrixSelector():
            yield from selectors(node.vector_selector)
        case promql_parser.BinaryExpr():
            yield from selectors(node.lhs)
            yield from selectors(node.rhs)
        case promql_parser.Call():
            for argument in node.args:
                yield from selectors(argument)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr() | promql_parser.UnaryExpr() | promql_parser.SubqueryExpr():
            yield from selectors(node.expr)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return
        case _:
            raise AssertionError(f"{type(node).__name__}: not known here")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Of a server after a run: hits, drafts, several answers, mistakes, a client that leaves, preemptions, a KV store."""
    store = tmp_path_factory.mktemp("store")
    more = ("--num-kv-blocks", "40", "--speculative", "ngram", "--kv-store", f"dir:{store}")
    key = {"authorization": "Bearer k"}
    with serving(None, "--served-model-name", "tiny", "--api-key", "k", *more) as server:
        before = {"model": "tiny", "prompt": "again and again " * 10, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        for _ in range(2):
            server.events("/v1/completions", before | {"stream": True}, headers=key)
        server.post("/v1/completions", before | {"n": 6, "temperature": 1, "prompt": "different " * 12, "max_tokens": 100}, headers=key)
        server.post("/v1/completions", before | {"temperature": -1}, headers=key)
        for regex in ("[0-9]{3}", "[0-9]{3}", "[0-9"):
            server.post("/v1/completions", before | {"ignore_eos": False, "structured_outputs": {"regex": regex}}, headers=key)
        server.get("/v1/models", headers={"authorization": "Bearer another"})
        long = before | {"stream": True, "max_tokens": 300, "n": 6, "temperature": 1}
        for _ in range(2):  # the first one leaves before its end, the second one runs while everything is counted
            with httpx.stream("POST", server.url + "/v1/completions", json=long, timeout=60, headers=key) as answer:
                lines = answer.iter_lines()
                next(lines)
                page = server.get("/metrics").text
            time.sleep(0.6)
        return read(page)


def test_every_expression_parses_and_names_what_a_server_has(samples: Samples) -> None:
    sums: dict[str, float] = {}
    labels: dict[str, set[str]] = {}
    for (name, key), value in samples.items():
        sums[name] = sums.get(name, 0.0) + abs(value)
        labels.setdefault(name, set()).update(label for label, _ in key)
    problems = []
    named = set()
    for title, expression in expressions():
        found = list(selectors(promql_parser.parse(filled(expression))))
        assert found, (title, expression)
        for selector in found:
            named.add(selector.name)
            wanted = {m.name for m in selector.matchers.matchers} - {"job"}  # of the scraper
            if selector.name in EXPERTS:
                continue
            if selector.name not in sums:
                problems.append(f"{title}: {selector.name} is no metric")
            elif not wanted <= labels[selector.name]:
                problems.append(f"{title}: {selector.name} has no labels {wanted - labels[selector.name]}")
            elif not sums[selector.name] and selector.name not in STILL:
                problems.append(f"{title}: {selector.name} did not move")
    assert not problems, "\n".join(problems)
    assert named >= STILL.keys() | EXPERTS, "left out of the board"


def test_panels_stand_beside_each_other_and_have_words() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    variables = {"datasource", *(name[1:] for name in VARIABLES if not name.startswith("$__"))}
    assert {v["name"] for v in BOARD["templating"]["list"]} == variables


@pytest.mark.parametrize("file", ["datasource.yaml", "dashboards.yaml"])
def test_provisioning_is_read(file: str) -> None:
    assert yaml.safe_load((PACKAGING / "grafana" / file).read_text(encoding="utf-8"))["apiVersion"] == 1
