"""Pages of plans on many devices in Chromium: bytes, opening, first zoom.

    python -m benchmarks.pages [--devices 128 1024] [--times 5]

A page is that of ``anabranch simulate --report`` for mmt on V100s of four to a node, 16 samples a
device, planned by graphpipe. Opening is from the start of the navigation until the page is laid out
and the pixels of all canvases can be read; the zoom, from a click on the button likewise. Both are
the median of several windows of 1,400 x 900 pixels, each in a browser of its own, without a GPU.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

from anabranch import Cluster, capture, estimate, plan, simulate
from anabranch.models import build
from anabranch.report.html import page
from anabranch.report.timeline_layout import ShownTimeline
from anabranch.simulator.critical_path import critical_path

PROBE = """<script>
const drawn = () => {
  document.body.getBoundingClientRect();
  for (const canvas of document.querySelectorAll('canvas'))
    canvas.getContext('2d').getImageData(0, 0, 1, 1);
  return performance.now();
};
const opened = drawn();
document.querySelector('[data-zoom=in]').click();
const took = drawn() - opened;
console.log('took', opened, took, document.querySelectorAll('*').length);
</script></body>"""


def page_of(devices: int) -> str:
    """The page of a plan on so many devices."""
    workload = build("mmt", meta=True)
    profile = estimate(capture(workload.module, workload.example), "v100", (1, 4, 16, 64, 256))
    cluster = Cluster.preset(f"summit:{devices // 4}x4")
    best = plan(profile, cluster, 16 * devices, planner="graphpipe")
    timeline = simulate(best, profile, cluster)
    path = critical_path(timeline, best.stage_graph)
    return page(best, [ShownTimeline("predicted", timeline, best.stage_graph, path)])


def seconds(file: Path, browser: str) -> tuple[float, float, int]:
    """Opening and zoom of a page in seconds, and its elements."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"]
        command += ["--enable-logging=stderr", f"--user-data-dir={profile}", "--dump-dom"]
        command += [file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    ((opened, zoomed, elements),) = re.findall(r"took ([\d.]+) ([\d.]+) (\d+)", done.stderr)
    return float(opened) / 1e3, float(zoomed) / 1e3, int(elements)


def main() -> None:
    """Print a row for each number of devices."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), "")
    if not browser:
        parser.exit(1, "no chromium on the path\n")
    print("| devices | MB | elements | opening, s | first zoom, s |\n|---:|---:|---:|---:|---:|")
    for devices in options.devices:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "page.html"
            text = page_of(devices)
            file.write_text(text.replace("</body>", PROBE), encoding="utf-8")
            measured = [seconds(file, browser) for _ in range(options.times)]
        opened, zoomed, elements = map(statistics.median, zip(*measured, strict=True))
        size = len(text.encode()) / 1e6
        print(f"| {devices:,} | {size:.2f} | {elements:,.0f} | {opened:.2f} | {zoomed:.2f} |")


if __name__ == "__main__":
    main()
