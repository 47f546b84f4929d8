"""The page of a run in a real browser, where one is installed."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from anabranch.plans.stages import Stage, StageGraph
from anabranch.record import save_run
from anabranch.record.figures import shown_figures
from anabranch.report.html import page as page_of
from anabranch.report.timeline_layout import ShownTimeline
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
    """The script has run (its buttons are there), and the figures that are shown are those of the
    document. At 480 pixels pictures and tables scroll in their boxes; the page does not. Said by a
    script that the test adds; else the console is silent.
    """
    save_run(STEPS, tmp_path / "run")
    page = tmp_path / "run" / "report.html"
    probe = "<script>console.log('wide', document.documentElement.scrollWidth)</script></body>"
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", probe), encoding="utf-8")
    html, said = opened(page)
    (line,) = said
    (wide,) = re.findall(r"wide (\d+)", line)
    assert int(wide) <= 500  # headless windows have a least width
    assert re.search(r'<span id="zoom"(?! hidden)>', html)
    tiles = on_page(html)
    assert {name: tiles[name] for name in tiles if name != "depth"} == {
        figure.name: figure.line
        for figure in shown_figures(json.loads(json.dumps(STEPS.figures())))
    }


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
console.log(location.pathname.split('/').pop(), shown.length, cards.length, cards.every(inside),
            box.right <= innerWidth, Math.min(...numbers) > 9);
</script></body>"""


def test_stage_graphs_are_whole_and_can_be_read(tmp_path: Path) -> None:
    """One picture is shown, with every stage inside of its box and the box inside of the window,
    and no text of it is smaller than nine pixels. In frames as wide as windows: a browser takes
    longer to start than all of them.
    """
    cases, frames = [(4, 480), (16, 1400), (33, 480), (64, 480), (64, 1400)], ""
    for stages, width in cases:
        text = page_of(plan(GRAPHS[stages]), []).replace("</body>", MEASURE)
        (tmp_path / f"{stages}-{width}.html").write_text(text, encoding="utf-8")
        frames += f"<iframe src='{stages}-{width}.html' width={width} height=900></iframe>"
    (tmp_path / "frames.html").write_text(frames, encoding="utf-8")
    _, said = opened(tmp_path / "frames.html", 1500)
    found = sorted(re.findall(r'CONSOLE:\d+\] "([^"]*)', "\n".join(said)))
    assert found == sorted(f"{n}-{width}.html 1 {n} true true true" for n, width in cases)


def test_stages_are_coloured_by_the_share_that_they_compute(tmp_path: Path) -> None:
    """In both pictures, from the last timeline of the plan: 4 and 4.9 of 8.5 ms."""
    text = page_of(plan(), [ShownTimeline("predicted", timeline(STEP), TWO_TOWERS)])
    assert len(TWO_TOWERS) == 3
    for share in (4 / 8.5, 4.9 / 8.5):
        assert f"busy {share:.0%}" in text
    levels = [float(level) for level in re.findall(r'fill-opacity="([\d.]+)"', text)]
    expected = [0.75 * 4 / 8.5, 0.75 * 4 / 8.5, 0.75 * 4.9 / 8.5]
    assert levels[:3] == pytest.approx(expected, abs=0.006)


def probed(page: Path, text: str, script: str, width: int = 1400) -> list[str]:
    """What a script that is added to a page says, in words."""
    probe = f"""<script>
    const one = (css) => document.querySelector(css);
    const all = (css) => [...document.querySelectorAll(css)];
    const canvas = one('#timeline canvas');
    const send = (kind, x, y, element = canvas) => {{
      const area = element.getBoundingClientRect();
      const place = {{clientX: area.left + x, clientY: area.top + y, bubbles: true}};
      element.dispatchEvent(new PointerEvent(kind, {{pointerType: 'mouse', ...place}}));
    }};
    const press = (key, element = one('#timeline')) =>
      element.dispatchEvent(new KeyboardEvent('keydown', {{key, bubbles: true}}));
    // Colours from left to right in the middle of a row, each once in a row.
    const colours = (y) => {{
      const ratio = canvas.width / canvas.clientWidth;
      const row = canvas.getContext('2d').getImageData(0, y * ratio, canvas.width, 1).data;
      const names = {{}};
      for (const name of ['forward', 'backward', 'lane']) {{
        const value = getComputedStyle(document.documentElement).getPropertyValue('--' + name);
        names[parseInt(value.slice(1), 16)] = name;
      }}
      const seen = [];
      for (let i = 0; i < row.length; i += 4) {{
        const name = names[(row[i] << 16) + (row[i + 1] << 8) + row[i + 2]];
        if (name && name !== seen.at(-1)) seen.push(name);
      }}
      return seen.join(',');
    }};
    {script}
    </script></body>"""
    page.write_text(text.replace("</body>", probe), encoding="utf-8")
    _, lines = opened(page, width)
    return [re.findall(r'CONSOLE:\d+\] "(.*)", source', s)[0] for s in lines if "Canvas2D" not in s]


ALIKE = StageGraph((Stage(("one", "two"), (0, 1), 2, in_flight=2),), (), batch_size=4)
BOTH = timeline("0: 0F0 0-1 | 0F1 1-2 | 0B0 4-6\n1: 0F0 0-1 | 0F1 1-2 | 0B0 4-6")


def test_a_timeline_is_drawn_on_a_canvas(tmp_path: Path) -> None:
    """Replicas are written once, and the canvas zooms, pans and shows what is under the pointer."""
    script = """
    console.log('whole', colours(50));
    one('[data-zoom=in]').click();
    console.log('zoomed', colours(50));
    one('[data-zoom=back]').click();
    one('[data-zoom=back]').click();
    console.log('earlier', colours(50));
    send('pointermove', canvas.clientWidth * 0.45, 50);
    console.log('tip', one('#tip').firstChild.textContent);
    """
    text = page_of(plan(ALIKE), [ShownTimeline("predicted", BOTH, ALIKE)])
    (data,) = re.findall(r'id="timeline-data">(.*?)</script>', text)
    rows = json.loads(data)["panels"][0]["rows"]
    assert (len(rows[0]), rows[1]) == (3, 0)
    assert probed(tmp_path / "page.html", text, script) == [
        "whole forward,lane,backward",
        "zoomed lane,backward",
        "earlier forward,lane,backward",
        "tip stage 0 \u00b7 forward \u00b7 micro-batch 1",
    ]


def test_replicas_that_do_the_same_are_one_lane(tmp_path: Path) -> None:
    """By default; a click on its name shows every device, so do the switch and Enter on the chosen
    stage. Replicas that do not do the same are shown as they are.
    """
    script = """
    const rows = () => canvas.clientHeight;
    const folded = rows();
    send('click', 30, 50);
    const open = rows();
    one('[data-switch=replicas]').click();
    one('[data-switch=replicas]').click();
    console.log('folds', open > folded, rows() === folded);
    press('ArrowDown');
    console.log('says', one('#said').textContent);
    press('Enter');
    console.log('opens', rows() === open);
    console.log('path', one('[data-switch=path]').hidden);
    """
    text = page_of(plan(ALIKE), [ShownTimeline("predicted", BOTH, ALIKE)])
    same = "2 devices that do the same; Enter opens it"
    expected = [
        "folds true true",
        f"says stage 0 \u00b7 devices 0-1 \u00b7 one, two \u00b7 {same}",
        "opens true",
        "path true",
    ]
    assert probed(tmp_path / "page.html", text, script) == expected
    other = timeline("0: 0F0 0-1 | 0B0 4-6\n1: 0F0 2-3 | 0B0 4-6")
    text = page_of(plan(ALIKE), [ShownTimeline("predicted", other, ALIKE)])
    says = "press('ArrowDown'); console.log(one('#said').textContent);"
    (line,) = probed(tmp_path / "page.html", text, says)
    assert line.endswith("2 devices that do the same, within 23.5% of the whole; Enter folds it")


def test_stage_lane_and_row_are_linked(tmp_path: Path) -> None:
    """Whichever is pointed at, the others are lit, in the memory too, which has the same cursor;
    a click or a key chooses; the search leaves the rows with its words.
    """
    script = """
    const lit = () => all('.lit').map(e => e.tagName).sort().join() + all('.lane-mark').length;
    send('pointerenter', 1, 1, all('table[data-graph] tbody tr')[2]);
    console.log('row', lit());
    send('pointerenter', 1, 1, all('.stages [data-stage="0"]')[0]);
    console.log('stage', lit());
    send('pointermove', 500, 50);
    const cursors = all('.cursor').map(c => c.hidden + c.style.left);
    console.log('lane', lit(), cursors.join());
    console.log('memory', one('#tip').lastChild.textContent.startsWith('memory 1.0 MiB at'));
    press('Enter', all('.stages [data-stage="1"]')[1]);
    console.log('chosen', one('#said').textContent, all('.chosen').length);
    one('#search').value = 'text.1';
    one('#search').dispatchEvent(new Event('input'));
    const rows = all('table[data-graph] tbody tr').map(r => r.hidden);
    console.log('search', rows.join(), one('#matches').textContent);
    const named = all('g[role=button][aria-label]').length;
    console.log('names', canvas.getAttribute('aria-label'), named);
    const path = one('[data-switch=path]');
    path.click();
    console.log('path', path.hidden, path.getAttribute('aria-pressed'));
    """
    spans = [s for s in timeline(STEP).spans if s.action.kind.is_compute][:1]
    text = page_of(plan(), [ShownTimeline("predicted", timeline(STEP), TWO_TOWERS, spans)])
    text = text.replace("3145728", "1048576")
    assert probed(tmp_path / "page.html", text, script) == [
        "row TR,g,g2",
        "stage TR,g,g2",
        "lane TR,g,g2 false500px,false500px",
        "memory true",
        "chosen stage 1 \u00b7 device 1 \u00b7 image.0 3",
        "search false,true,true 1 operator in 1 stage",
        "names Timeline of one training step: predicted 6",
        "path false true",
    ]
