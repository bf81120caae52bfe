"""The page at `/`: its files and rules, and what a person does with it in a real browser."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser_kit import BROWSER, Page, browser
from deepinfer.server.endpoints.page import HEADERS, KINDS, assets
from deepinfer.server.settings import ServerSettings
from metrics_kit import read, total
from server_kit import Served, scripted, serving

KEY = {"authorization": "Bearer the-key"}
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs a browser: apt-get install chromium")


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    """A server that asks for a key."""
    with serving(None, "--served-model-name", "tiny", "--api-key", "the-key") as made:
        yield made


def test_files_come_with_their_rules_and_need_nothing_from_elsewhere(guarded: Served) -> None:
    answer = guarded.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"] == KINDS["html"]
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    again = guarded.get("/", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304 and again.content == b""
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', answer.text))
    for script in ("main.js", "charts.js"):
        named |= set(re.findall(r'from "\./([^"]+)"', assets()[script][0].decode()))
    assert named == assets().keys() - {"index.html"}, "every file is used, and every used one is there"
    for name in named:
        file = guarded.get(f"/page/{name}")
        assert file.status_code == 200 and file.headers["content-type"] == KINDS[name.rpartition(".")[2]]
    everything = b"\n".join(data for data, _, _ in assets().values()).replace(b"http://www.w3.org/2000/svg", b"")
    assert b"://" not in everything and b"innerHTML" not in everything and b"eval(" not in everything
    assert not re.search(rb"<[^>]+ (?:style|on\w+)=", assets()["index.html"][0]), "the rules forbid what is inline"


@pytest.mark.parametrize("name", ["none.js", "../settings.py", "%2e%2e/settings.py", "__init__.py", ""])
def test_no_other_file_is_served(guarded: Served, name: str) -> None:
    assert guarded.get(f"/page/{name}").status_code == 404


def test_no_page_where_none_is_wanted() -> None:
    async def ask(page: bool) -> set[int]:
        async with scripted(ServerSettings(served_model_name=("m",), page=page)) as app:
            return {(await app.send("GET", path).done()).status for path in ("/", "/page/main.js")}

    assert asyncio.run(ask(True)) == {200} and asyncio.run(ask(False)) == {404}


@pytest.fixture(scope="module")
def page(guarded: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page, with the key typed in."""
    with browser(tmp_path_factory.mktemp("browser")) as made:
        made.open(guarded.url + "/")
        made.until("document.querySelector('#state').textContent === 'needs an API key'")
        made.until("document.activeElement.id === 'key'")
        made.type("#key", "the-key")
        made.press_enter()
        made.until("document.querySelector('#state').textContent === 'serving'")
        assert made.value("document.querySelector('#model').textContent") == "tiny"
        yield made


WATCH = """
window.seen = [];
new MutationObserver(() => {
  const answer = document.querySelector('.message.assistant');
  if (answer && !answer.querySelector('.about')) seen.push([performance.now(), answer.textContent.length]);
}).observe(document.querySelector('#messages'), { childList: true, subtree: true, characterData: true });
"""


@needs_browser
def test_an_answer_appears_piece_by_piece_and_the_charts_move(page: Page, guarded: Served, tmp_path: Path) -> None:
    drawn = "[...document.querySelectorAll('.chart path')].map((p) => p.getAttribute('d') ?? '')"
    page.value(WATCH)
    before = page.value(drawn)
    page.type("#max-tokens", "120")
    page.type("#temperature", "0")
    page.type("#prompt", "<b>Say</b> something long.")
    page.press_enter()
    page.until("document.querySelector('.message.assistant .about')")
    seen = page.value("seen")
    sizes = [size for _, size in seen]
    assert sizes == sorted(sizes) and len(set(sizes)) >= 20, sizes
    half = next(at for at, size in seen if size >= sizes[-1] / 2)
    assert seen[0][0] < half < seen[-1][0], "it grew, rather than being there at once"
    about = page.value("document.querySelector('.message.assistant .about').textContent")
    tokens = int(re.match(r"(\d+) tokens · [\d.]+ tokens/s", about)[1])  # type: ignore[index]
    assert 1 < tokens <= 120
    assert page.value("document.querySelector('.message.user .body').textContent") == "<b>Say</b> something long."
    assert page.value("document.querySelectorAll('.message b, .message script').length") == 0
    page.until("document.querySelector('[data-chart=\"Tokens per second\"] .one').textContent !== ''")
    page.until(f"({drawn}).filter((d, i) => d !== {before!r}[i] && d.length > 20).length >= 4")
    page.until(f"({drawn})[0].split(/[ML]/).some((point) => point && Number(point.split(/[ h]/)[1]) < 100)")  # tokens/s left the ground
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
    assert page.problems == []
    assert page.requested and all(url.startswith(guarded.url) for url in page.requested)


@needs_browser
def test_stop_ends_the_answer_here_and_in_the_engine(page: Page, guarded: Served) -> None:
    before = read(guarded.get("/metrics").text)
    page.value("document.querySelector('#max-tokens').value = ''")
    page.value("document.querySelector('#temperature').value = ''")
    page.value("document.querySelector('#clear').click()")
    page.type("#prompt", "Go on for ever.")
    page.click("#send")
    page.until("document.querySelector('.message.assistant').textContent.length > 3")
    page.click("#stop")
    page.until("document.querySelector('.message.assistant .about')?.textContent === 'stopped'")
    assert page.value("document.querySelector('#stop').hidden && !document.querySelector('#send').hidden")
    end = time.monotonic() + 30
    name = "deepinfer:client_disconnects_total"
    while not any(n == name for n, _ in read(guarded.get("/metrics").text)):
        assert time.monotonic() < end
        time.sleep(0.05)
    after = read(guarded.get("/metrics").text)
    assert total(after, name, endpoint="/v1/chat/completions") == 1 and not any(n == name for n, _ in before)
    assert total(after, "deepinfer:requests_in_flight") == 0
    assert page.problems == []


@needs_browser
def test_a_mistake_is_told_and_not_said_again(page: Page) -> None:
    page.value("document.querySelector('#clear').click()")
    page.value("document.querySelector('#temperature').value = '-1'")
    page.type("#prompt", "hot")
    page.press_enter()
    page.until("document.querySelector('.message.failed')")
    assert "temperature" in page.value("document.querySelector('.message.failed').textContent")
    page.value("document.querySelector('#temperature').value = ''")
    page.type("#prompt", "cool")
    page.press_enter()
    page.until("document.querySelectorAll('.message .about').length === 1")
    assert page.problems == []
