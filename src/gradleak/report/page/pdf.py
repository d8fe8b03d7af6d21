"""A page as PDF, printed by Chromium: its page breaks are those of the page's print style."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from gradleak.records.errors import RecordError
from gradleak.records.files import write_whole

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
OFFLINE = (
    "--headless=new --disable-gpu --disable-dev-shm-usage --no-first-run --disable-background-networking --disable-sync "
    "--disable-component-update --disable-extensions --disable-default-apps --no-pdf-header-footer"
).split()
PATIENCE = 120  # seconds


def find_browser() -> str:
    """Chromium, or one of its kind; refused with what to do where there is none."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise RecordError(
            "A PDF is printed by Chromium, and there is none on the PATH. Install it (Debian, Ubuntu: apt install chromium), "
            "or write the HTML page and print it from any browser."
        )
    return found


def pdf(page: str) -> bytes:
    """The page, printed. It lies in a private folder while the browser reads it."""
    browser = find_browser()
    with tempfile.TemporaryDirectory(prefix="gradleak-") as folder:
        source, printed = Path(folder) / "page.html", Path(folder) / "page.pdf"
        write_whole(source, page)
        words = [browser, *OFFLINE, f"--user-data-dir={folder}/profile", f"--print-to-pdf={printed}"]
        words += ["--no-sandbox"] if os.name == "posix" and os.geteuid() == 0 else []  # root cannot have Chromium's sandbox
        try:
            done = subprocess.run([*words, source.as_uri()], capture_output=True, text=True, timeout=PATIENCE, check=False)
        except subprocess.TimeoutExpired as error:
            raise RecordError(f"{browser} did not print the page within {PATIENCE} s. Print the HTML page yourself.") from error
        if not printed.is_file():
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise RecordError(f"{browser} could not print the page and said: {said}. Print the HTML page from any browser.")
        return printed.read_bytes()
