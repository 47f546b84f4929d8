"""The page of a run in a real browser, where one is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from anabranch.record import save_run
from anabranch.record.figures import told
from tests.record.test_figures import STEPS, on_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on the path")


def opened(page: Path) -> tuple[str, list[str]]:
    """The document after its script has run, and what the console said."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=480,900"),
            *("--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}"),
            *("--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, said


def test_a_browser_opens_the_page_without_an_error(tmp_path: Path) -> None:
    """The script has run (its buttons are there), the console is silent, and the figures that are
    shown are those of the document.
    """
    save_run(STEPS, tmp_path / "run")
    html, said = opened(tmp_path / "run" / "report.html")
    assert said == []
    assert re.search(r'<span id="zoom"(?! hidden)>', html)
    tiles = on_page(html)
    assert {name: tiles[name] for name in tiles if name != "depth"} == {
        figure.name: figure.line for figure in told(json.loads(json.dumps(STEPS.figures())))
    }


def test_a_page_is_no_wider_than_a_narrow_window(tmp_path: Path) -> None:
    """At 480 pixels pictures and tables scroll in their boxes; the page does not. Said by a script
    that the test adds, which also shows that the console is heard.
    """
    save_run(STEPS, tmp_path / "run")
    page = tmp_path / "run" / "report.html"
    probe = "<script>console.log('wide', document.documentElement.scrollWidth)</script></body>"
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", probe), encoding="utf-8")
    _, said = opened(page)
    (line,) = said
    (wide,) = re.findall(r"wide (\d+)", line)
    assert int(wide) <= 500  # headless windows have a least width
