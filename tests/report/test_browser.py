"""The page of a run in a real browser, where one is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from anabranch.plans.stages import Stage, StageGraph
from anabranch.record import save_run
from anabranch.record.figures import told
from anabranch.report.html import page as page_of
from tests.record.test_figures import STEPS, on_page
from tests.report.examples import STEP, TWO_TOWERS, chain, plan, timeline

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on the path")


def opened(page: Path, width: int = 480) -> tuple[str, list[str]]:
    """The document after its script has run, and what the console said."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"),
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


def branches(count: int, depth: int) -> StageGraph:
    """Chains side by side, and a stage that joins them."""
    join = count * depth
    stages = [Stage((f"operator{s}",), (s,), 2, in_flight=1) for s in range(join + 1)]
    edges = [(s, s + 1 if (s + 1) % depth else join) for s in range(join)]
    return StageGraph(tuple(stages), tuple(sorted(edges)), batch_size=4)


GRAPHS = {
    4: chain(4),
    16: branches(3, 5),
    33: branches(4, 8),
    64: chain(64),
}

MEASURE = """<script>
const box = document.querySelector('.stages').getBoundingClientRect();
const shown = [...document.querySelectorAll('.stages svg')].filter(p => p.getClientRects().length);
const cards = [...shown[0].querySelectorAll('.card')].map(c => c.getBoundingClientRect());
const numbers = [...shown[0].querySelectorAll('text')].map(t => t.getBoundingClientRect().height);
const inside = r => r.left >= box.left && r.right <= box.right && r.bottom <= box.bottom;
console.log('stages', shown.length, cards.length, cards.every(inside), box.right <= innerWidth,
            Math.min(...numbers) > 9);
</script></body>"""


@pytest.mark.parametrize("width", [1400, 480])
@pytest.mark.parametrize("stages", GRAPHS)
def test_the_stage_graph_is_whole_and_can_be_read(tmp_path: Path, stages: int, width: int) -> None:
    """One picture is shown, with every stage inside of its box and the box inside of the window,
    and no text of it is smaller than nine pixels.
    """
    graph = GRAPHS[stages]
    file = tmp_path / "page.html"
    text = page_of(plan(graph), []).replace("</body>", MEASURE)
    file.write_text(text, encoding="utf-8")
    _, said = opened(file, width)
    (line,) = said
    assert f"stages 1 {len(graph)} true true true" in line


def test_stages_are_coloured_by_the_share_that_they_compute(tmp_path: Path) -> None:
    """In both pictures, from the last timeline of the plan: 4 and 4.9 of 8.5 ms."""
    text = page_of(plan(), [("predicted", timeline(STEP))])
    assert len(TWO_TOWERS) == 3
    for share in (4 / 8.5, 4.9 / 8.5):
        assert f"busy {share:.0%}" in text
    levels = [float(level) for level in re.findall(r'fill-opacity="([\d.]+)"', text)]
    expected = [0.75 * 4 / 8.5, 0.75 * 4 / 8.5, 0.75 * 4.9 / 8.5]
    assert levels[:3] == pytest.approx(expected, abs=0.006)
