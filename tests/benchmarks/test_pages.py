"""The benchmark of pages."""

import shutil
from pathlib import Path

import pytest

from anabranch.report.html import page
from anabranch.report.timeline_layout import ShownTimeline
from benchmarks.pages.__main__ import PROBE, seconds
from tests.report.examples import STEP, TWO_TOWERS, plan, timeline

BROWSER = shutil.which("chromium")


@pytest.mark.skipif(BROWSER is None, reason="no chromium on the path")
def test_opening_and_zoom_are_measured(tmp_path: Path) -> None:
    """The zoom is part of what comes after the opening."""
    assert BROWSER is not None
    file = tmp_path / "page.html"
    text = page(plan(), [ShownTimeline("predicted", timeline(STEP), TWO_TOWERS)])
    file.write_text(text.replace("</body>", PROBE), encoding="utf-8")
    opened, zoomed, elements = seconds(file, BROWSER)
    assert opened > 0
    assert zoomed > 0
    assert elements > 100
