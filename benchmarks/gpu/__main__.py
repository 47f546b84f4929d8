"""What only a GPU can tell, in 20 minutes. Without a CUDA device it says what it would run.

python -m benchmarks.gpu [--only probe one-rank/bf16] [--minutes 9] [--out FILE] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

from benchmarks.gpu import case as cases
from benchmarks.gpu.case import ROOT, Row
from benchmarks.planners.common import table

MINUTES = {
    "hang": 2.0,
    "probe": 2.0,
    "one-rank": 4.0,
    "host": 4.0,
    "shared-gpu": 4.0,
    "operators": 4.0,
}
"""Section -> its share of 20 minutes, in the order in which they run; what one leaves is for those
after it.
"""

LATER = {"memory": 8.0, "nccl": 6.0, "tests": 5.0, "transformer": 6.0}
"""Sections that run after them where there are more than 20 minutes, and their share of 25."""

ALL = MINUTES | LATER
MORE_MINUTES = 20.0

REHEARSED = ("hang", "one-rank", "host", "shared-gpu", "operators", "transformer", "memory")
"""Sections that also run on a CPU."""


def main() -> None:
    """Run the sections, then print tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="SECTION[/CASE]", help=f"of {', '.join(ALL)}")
    parser.add_argument("--minutes", type=float, default=20.0, help="for everything (default 20)")
    parser.add_argument("--out", type=Path, help="the JSON file; by default one in results/")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny, on the CPU; the figures mean nothing"
    )
    arguments = parser.parse_args()
    asked = ALL if arguments.minutes > MORE_MINUTES else MINUTES
    chosen = arguments.only or (REHEARSED if arguments.rehearse else tuple(asked))
    allowed = REHEARSED if arguments.rehearse else tuple(ALL)
    if unknown := {name.partition("/")[0] for name in chosen} - set(allowed):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(allowed)}")
    if not arguments.rehearse and not torch.cuda.is_available():
        print(without_device(arguments.minutes))
        return
    device = "cpu" if arguments.rehearse else "cuda"
    about = _about(device)
    out = arguments.out or _default_out(about["card"])
    document = run(chosen, device, arguments.minutes * 60, about, out)
    if arguments.json:
        print(json.dumps(document, indent=2))
        return
    for name, seconds in document["seconds"].items():
        found = [row for row in document["rows"] if row["section"] == name]
        print(f"\n## {name} ({seconds:.0f} s)\n\n{show(found)}")
    print(f"\n{out}")


def run(chosen: Sequence[str], device: str, seconds: float, about: Row, out: Path) -> Row:
    """Run sections, or single cases of them, and keep what they find.

    Args:
        chosen: names of sections, or of cases as ``section/case``.
        device: ``cuda``, or ``cpu`` to rehearse.
        seconds: for everything.
        about: what stands at the head of the document.
        out: where it is written, after every section; beside it the rows as they come.

    Returns:
        The document.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = out.with_suffix(".jsonl")
    lines.unlink(missing_ok=True)
    sections = [name for name in ALL if any(c.partition("/")[0] == name for c in chosen)]
    end, spent = time.monotonic() + seconds, dict[str, float]()
    document = about
    for i, name in enumerate(sections):
        begun = time.monotonic()
        share = ALL[name] / sum(ALL[left] for left in sections[i:])
        _section(name, chosen, device, lines, begun + share * (end - begun), about)
        spent[name] = time.monotonic() - begun
        document = about | {"seconds": spent, "rows": cases.read(lines)}
        out.write_text(json.dumps(document, indent=2) + "\n")
    lines.unlink(missing_ok=True)
    return document


def _section(
    name: str, chosen: Sequence[str], device: str, lines: Path, end: float, about: Row
) -> None:
    for case in cases.section_named(name).cases(device):
        if name not in chosen and f"{name}/{case.name}" not in chosen:
            continue
        left = end - time.monotonic()
        if left < SHORTEST_S and not case.left_out:
            told = {"section": name, "case": case.name}
            cases.write(lines, told | {"left_out": "the section's time was spent"})
            continue
        print(f"{name}: {case.name}", file=sys.stderr, flush=True)
        before = len(cases.read(lines))
        cases.run(name, case, device, lines, left)
        # Each answer stands by itself, in case that nothing follows.
        for row in cases.read(lines)[before:]:
            line = {"question": _first_sentence(name), **row, "environment": about}
            print(json.dumps(line, default=str), file=sys.stderr, flush=True)


SHORTEST_S = 10.0
"""Less is not enough for any case: an interpreter with PyTorch and CUDA takes half of it."""


def without_device(minutes: float) -> str:
    """What would run, and why it does not."""
    build = torch.version.cuda
    reason = f"PyTorch {torch.__version__} is built " + (
        f"for CUDA {build} and finds no GPU" if build else "without CUDA"
    )
    scale = minutes / sum(MINUTES.values())
    rows = [
        [name, f"{scale * share:.1f}", _first_sentence(name)] for name, share in MINUTES.items()
    ]
    later = ", ".join(LATER)
    return (
        f"no CUDA device: what would run ({reason})\n\n"
        f"{table(['section', 'minutes', 'what'], rows)}\n\n"
        f"With --minutes 45 also {later}. "
        "--rehearse runs some of them on the CPU, with figures that mean nothing."
    )


def _first_sentence(section: str) -> str:
    text = " ".join((cases.section_named(section).__doc__ or "").split("\n\n")[0].split())
    return text.removesuffix(".")


def show(rows: Sequence[Row]) -> str:
    """A table of rows, with a column for every figure that one of them has; seconds from 1 s on."""
    hidden = ("section", "output", "losses", "sync_lines", "lost_at")
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in hidden))
    shown = [row for row in rows if row.keys() & set(columns) - {"case", "rank"}]
    return table(columns, [[_cell(key, row.get(key)) for key in columns] for row in shown])


def _cell(key: str, value: object) -> str:
    if value is None:
        return ""
    if key.endswith("_bytes"):
        return f"{float(str(value)) / 2**20:.1f} MiB"
    if isinstance(value, float):
        return f"{value * 1e3:.3g} ms" if key.endswith("_s") and value < 1 else f"{value:.3g}"
    return str(value).replace("|", "/").replace("\n", " ")


def _about(device: str) -> Row:
    card = torch.cuda.get_device_name() if device == "cuda" else "rehearsal"
    return {
        "date": date.today().isoformat(),
        "card": card,
        "cards": torch.cuda.device_count(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "commit": _output("git", "rev-parse", "HEAD"),
    }


def _output(*command: str) -> str:
    """The first line that a program prints; empty if there is no such program."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.partition("\n")[0].strip()


def _default_out(card: str) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")
    return Path(__file__).parent / "results" / f"{date.today().isoformat()}-{name}.json"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends its ranks on the way
    main()
