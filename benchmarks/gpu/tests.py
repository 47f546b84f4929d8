"""Tests that need a GPU (``pytest -m gpu``)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.gpu.case import ROOT, Case, Row

NEEDED = ("pytest", "hypothesis")


def cases(device: str) -> list[Case]:
    """All of them in one case."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    reason = f"{' and '.join(missing)} not installed" if missing else ""
    return [Case("pytest", limit_s=300.0, left_out=reason)]


def measure(case: str, device: torch.device) -> Iterator[Row]:
    """One row per test. Only files with such tests are collected: the others may need packages
    that are not here.
    """
    files = sorted(p for p in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in p.read_text())
    with tempfile.TemporaryDirectory(prefix="anabranch-gpu-") as folder:
        report = Path(folder) / "report.xml"
        # The project's own options need plugins that are not needed here.
        options = ["-o", "addopts=", "-W", "default", "-p", "no:cacheprovider", "-v", "-m", "gpu"]
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={report}"]
        subprocess.run([*command, *map(str, files)], cwd=ROOT, check=False)
        for test in ElementTree.parse(report).iter("testcase"):
            problem = next((child for child in test if child.tag in OUTCOMES), None)
            yield {
                "test": f"{test.get('classname')}.{test.get('name')}",
                "outcome": "passed" if problem is None else problem.tag,
                "seconds": float(test.get("time", "0")),
                "message": "" if problem is None else problem.get("message", "")[:300],
                "output": "" if problem is None else (problem.text or "")[-3000:],
            }


OUTCOMES = ("failure", "error", "skipped")
