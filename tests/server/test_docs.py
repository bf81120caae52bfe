"""docs/serving.md names every option of the server and every route, and nothing that is not there."""

from __future__ import annotations

import re
from pathlib import Path

from deepinfer.cli.options import ENGINE_OPTIONS
from deepinfer.server.endpoints import ROUTES
from deepinfer.server.settings import about, flag

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def test_every_option_is_described() -> None:
    known = {flag(name) for name in about()}
    assert sorted(f for f in known if f"`{f}" not in TEXT and f"`--no-{f[2:]}" not in TEXT) == []
    known |= {f"--no-{f[2:]}" for f in known}
    engine = {f for o in ENGINE_OPTIONS for f in o.flags or ("--" + o.name.replace("_", "-"),)} | {"--config", "--model"}
    assert sorted(set(re.findall(r"`(--[a-z-]+)", TEXT)) - known - engine) == []


def test_every_route_is_described() -> None:
    assert sorted(r.path for r in ROUTES if r.path.split("{")[0] not in TEXT) == []
