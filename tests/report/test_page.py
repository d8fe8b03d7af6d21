"""The page in the order a person reads it, the index over runs, and the PDF."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gradleak.cli import main
from gradleak.records.files import RecordError
from gradleak.records.schema import Record
from gradleak.records.store import write_record
from gradleak.report.page import build_report
from gradleak.report.page import forms as printing
from gradleak.report.page.forms import write_html

Make = Callable[..., Record]
Captured = pytest.CaptureFixture[str]
NEVER_RUN = [{"id": digit * 16, "axes": {"seed": digit}} for digit in "12"]


def noisy(record: Record, std: float = 0.1) -> Record:
    return replace(
        record, spec={**record.spec, "defenses": [{"name": "gaussian_noise", "std": std}]}
    )


@pytest.fixture
def run(tmp_path: Path, make_record: Make) -> Path:
    """A setting that leaks, and one under noise whose search failed."""
    folder = tmp_path / "runs" / "study"
    write_record(folder, make_record(("tag", "dlg"), 0.5))
    write_record(folder, noisy(make_record(("tag",), 0.1, flags=("near_chance", "search_failed"))))
    (folder / "study.json").write_text(
        json.dumps({"schema": "gradleak.study/1", "name": "noise on notes", "cells": []})
    )
    return folder


@pytest.fixture
def page(run: Path) -> str:
    return write_html(build_report(run, lambda record: {}))


def test_the_sentence_comes_first_and_the_threat_model_before_all_guesses(page: str) -> None:
    places = [
        page.index(part)
        for part in ("<h1>", 'id="verdict"', "What was not tried", 'id="threat"', 'id="settings"')
    ]
    assert [*places, page.index('id="guesses"'), page.index('id="glossary"')] == sorted(
        [*places, page.index('id="guesses"'), page.index('id="glossary"')]
    )
    assert re.search(r"<h1>In the setting that leaks most .* were rebuilt", page)


def test_guesses_are_folded(page: str) -> None:
    fold = page.index('<details class="fold"', page.index('id="guesses"'))
    assert fold < page.index('<ul class="gallery"') < page.index("</details>", fold)


def test_a_doubt_stands_beside_the_setting_it_belongs_to_and_nowhere_else(page: str) -> None:
    rows = page[page.index('id="settings"') : page.index('id="heat"')].split("<tbody>")[1:]
    assert ["Why search_failed." in row for row in rows] == [False, True]
    assert "gaussian_noise" in rows[1]
    assert page.count("Why search_failed.") == 1


def test_every_word_that_is_linked_is_explained(page: str) -> None:
    linked, explained = (
        set(re.findall(r'href="#(word-[^"]+)"', page)),
        set(re.findall(r'<dt id="([^"]+)"', page)),
    )
    assert linked and linked <= explained
    assert {
        "word-blind-guess",
        "word-rouge1",
        "word-search_failed",
        "word-could-not-be-judged",
    } <= linked


def test_every_cell_of_a_table_that_phones_stack_says_what_it_is(page: str) -> None:
    for table in re.findall(r'<table[^>]*class="stack".*?</table>', page, re.S):
        cells = re.findall(r"<td([^>]*)>", table)
        assert cells and all("data-label" in cell or "colspan" in cell for cell in cells)


def test_an_index_names_runs_as_people_do_and_links_their_pages(
    run: Path, make_record: Make, capsys: Captured, tmp_path: Path
) -> None:
    runs = run.parent
    alone = replace(
        make_record(("tag",), 0.1, flags=("near_chance", "search_failed")),
        created="2020-01-02T03:04:05+00:00",
    )
    write_record(runs, alone)
    (run / f"{'a' * 16}.failed.txt").write_text("ValueError")
    (run / f"{'b' * 16}.json").write_text("{")
    (run / "report.html").write_text("")
    assert main(["report", str(runs), "--index"]) == 0
    page = (runs / "index.html").read_text(encoding="utf-8")
    assert "<h1>2 runs in" in page
    assert '<a href="study/report.html">noise on notes</a>' in page
    # The latest first
    assert page.index("noise on notes") < page.index("tiny on canaries, no defense, by tag")
    assert "1 cell failed." in page and f"{'b' * 16}.json cannot be read" in page
    assert f"gradleak report {runs}<" in page  # a run without a page says how to get one
    assert "about 50.0 % of the words" in page
    assert (runs / "index.html").stat().st_mode & 0o077 == 0
    assert main(["report", str(runs), "--index", "--show-secrets"]) == 2
    assert main(["report", str(runs), "--index", "--out", str(tmp_path / "elsewhere.html")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty"), "--index"]) == 2
    assert capsys.readouterr().err.count("Error: ") == 3


def test_an_index_says_what_is_missing_and_names_a_map_once(
    run: Path, make_record: Make, tmp_path: Path
) -> None:
    cells = [{"id": path.stem, "axes": {}} for path in run.glob("[0-9a-f]*.json")]
    plan = {"schema": "gradleak.study/1", "name": "half", "cells": [*cells, *NEVER_RUN]}
    (run / "study.json").write_text(json.dumps(plan))
    mapped = tmp_path / "runs" / "map"
    for view in ("query", "key"):
        one = make_record(("span",), 0.5)
        spec = {**one.spec, "view": {"name": "parts", "modules": [view]}}
        write_record(mapped, replace(one, spec=spec))
    (mapped / "map.json").write_text("{}")
    (mapped / f"{'a' * 16}.failed.txt").write_text("ValueError")
    assert main(["report", str(run.parent), "--index"]) == 0
    page = (run.parent / "index.html").read_text(encoding="utf-8")
    assert "<h1>2 runs in" in page and "leak map of tiny on canaries" in page
    assert "2 cells have no record: run the study to its end." in page
    (mapped / "map.json").unlink()
    assert main(["report", str(run.parent), "--index"]) == 0
    page = (run.parent / "index.html").read_text(encoding="utf-8")
    assert "tiny seen through parts:modules=[key] on canaries" in page
    assert "Not every cell of this folder has a record." in page
    assert "could be read" not in page


def test_without_a_browser_a_pdf_is_refused_with_what_to_do(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(printing, "BROWSERS", ("no-such-browser",))
    assert main(["report", str(run), "--format", "pdf"]) == 2
    assert "apt install chromium" in capsys.readouterr().err
    assert not (run / "report.pdf").exists()


def test_a_pdf_has_the_sentence_first_and_its_sections_on_pages(run: Path) -> None:
    try:
        printing.find_browser()
    except RecordError as error:
        pytest.skip(str(error))
    assert main(["report", str(run), "--format", "pdf"]) == 0
    content = (run / "report.pdf").read_bytes()
    pages = len(re.findall(rb"/Type\s*/Page\b", content))
    # verdict, guesses and words begin pages of their own
    assert content.startswith(b"%PDF-") and 3 <= pages <= 9
    assert b"gradleak: study" in content
    reader = shutil.which("pdftotext")
    if reader is None:
        pytest.skip("no pdftotext here, which reads the first line; apt-get install poppler-utils")
    printed = subprocess.run(
        [reader, str(run / "report.pdf"), "-"], capture_output=True, text=True, check=True
    ).stdout
    sheets = [" ".join(sheet.split()) for sheet in printed.split("\f")[:-1]]
    assert sheets[0].startswith(
        "In the setting that leaks most (no defense), about 50.0 % of the words"
    )
    assert len(sheets) == pages
    assert sheets[0].replace(" ", "").endswith(f"1/{pages}")
    assert any(sheet.startswith("Secrets beside guesses") for sheet in sheets)
    assert any(sheet.startswith("Words") for sheet in sheets)
    assert "Why search_failed." in " ".join(sheets)  # what is folded on the page is open on paper
