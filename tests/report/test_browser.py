"""The report as a browser shows it: what a reader sees, that filters work, and that no request
leaves the page."""

import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gradleak.records.schema import Record
from gradleak.records.store import write_record
from gradleak.report.page import build_report
from gradleak.report.page.forms import write_html

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
    " --disable-background-networking --disable-component-update --disable-sync"
    " --disable-extensions --disable-default-apps"
).split()
# The browser asks its maker for the time
OWN = re.compile(rb"^\w+ (?:https?://)?[\w.-]*\.(?:google|googleapis|gvt1)\.com\b")
Make = Callable[..., Record]


@pytest.fixture(scope="module")
def browser() -> str:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        assert os.environ.get("CI") != "true", "CI must have a browser: apt-get install chromium."
        pytest.skip("no chromium here; apt-get install chromium")
    return found


@pytest.fixture
def page(tmp_path: Path, make_record: Make) -> str:
    """The page of two attacks, one of them under a defense."""
    one = make_record(("tag", "dlg"), 0.5, kept=True)
    noise = {**one.spec, "defenses": [{"name": "gaussian_noise", "std": 0.1}]}
    write_record(tmp_path, one)
    write_record(
        tmp_path, replace(make_record(("tag",), 0.1, kept=True, flags=("near_chance",)), spec=noise)
    )
    return write_html(build_report(tmp_path, lambda record: {}))


def shown(browser: str, folder: Path, page: str, script: str = "", proxy: str = "") -> str:
    """The page as it stands after the script, which plays the reader."""
    path = folder / "page.html"
    path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    words = [
        browser,
        *QUIET,
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=2000",
        "--dump-dom",
    ]
    words += [f"--proxy-server={proxy}"] if proxy else []
    done = subprocess.run(
        [*words, path.as_uri()], capture_output=True, text=True, timeout=60, check=False
    )
    assert "<main>" in done.stdout, done.stderr
    return done.stdout


def visible(dom: str) -> list[str]:
    """The attacks of the guesses that are not hidden, in their order."""
    items = re.findall(r'<li data-attack="([^"]+)"[^>]*>', dom)
    whole = re.findall(r'<li data-attack="[^"]+"[^>]*>', dom)
    return [attack for attack, item in zip(items, whole, strict=True) if " hidden" not in item]


def test_verdict_heat_map_and_redacted_gallery_are_there(
    browser: str, page: str, tmp_path: Path
) -> None:
    dom = shown(browser, tmp_path, page)
    assert "1 of 2 settings leak" in dom
    heat = dom[dom.index('id="heat"') : dom.index('id="heat-table"')]
    assert heat.count('fill="#') == 3
    assert sorted(visible(dom)) == ["dlg", "tag", "tag"]
    assert "3 of 3 shown" in dom
    assert "4471" not in dom
    assert "▇▇▇" in dom


def test_the_reader_can_filter_and_sort_guesses(browser: str, page: str, tmp_path: Path) -> None:
    choose = (
        "const pick=(name,value)=>{const"
        " one=document.getElementById('gallery-'+name);one.value=value;one.dispatchEvent(new"
        " Event('change'))};"
    )
    dom = shown(browser, tmp_path, page, choose + "pick('defense','gaussian_noise:std=0.1')")
    assert visible(dom) == ["tag"]
    assert "1 of 3 shown" in dom
    dom = shown(browser, tmp_path, page, choose + "pick('order','least')")
    assert re.findall(r'data-score="([^"]+)"', dom) == ["0.1", "0.5", "0.5"]


@contextmanager
def listener() -> Iterator[tuple[str, list[bytes]]]:
    """A proxy that answers nobody and notes what it is asked for."""
    heard: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(1)
                heard.append(connection.recv(400))

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.getsockname()[1]}", heard
    server.close()


def test_no_request_leaves_the_page(browser: str, page: str, tmp_path: Path) -> None:
    script = "document.querySelectorAll('details').forEach(one => one.open = true)"
    with listener() as (proxy, heard):
        shown(browser, tmp_path, page, script, proxy)
        assert [one for one in heard if not OWN.search(one)] == []
        talks = '<main><img src="http://leak.example/x.png"></main></body>'
        shown(browser, tmp_path, talks, proxy=proxy)
        assert any(b"leak.example" in one for one in heard)  # the listener would have noticed


def test_on_a_phone_nothing_is_cut_and_no_column_is_out_of_sight(
    browser: str, page: str, tmp_path: Path
) -> None:
    """A browser's window cannot be as narrow as a phone; a frame can."""
    inside = page.replace("&", "&amp;").replace('"', "&quot;")
    outside = (
        '<main></main><iframe id="phone" style="width:390px;height:800px;border:0"'
        f' srcdoc="{inside}"></iframe></body>'
    )
    script = (
        "addEventListener('load', () => {const inner ="
        " document.getElementById('phone').contentDocument;const cells ="
        " [...inner.querySelectorAll('#settings td[data-label=verdict]')];const right ="
        " cells.map(one => one.getBoundingClientRect().right);document.title ="
        " JSON.stringify([inner.documentElement.scrollWidth, right.length, Math.max(...right)])})"
    )
    dom = shown(browser, tmp_path, outside, script)
    width, cells, right = re.findall(r"[\d.]+", re.findall(r"<title>(\[.*?\])</title>", dom)[-1])
    assert float(width) <= 390
    assert int(cells) == 2
    assert float(right) <= 390
