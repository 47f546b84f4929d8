"""The benchmark of GPUs, where there is none: what it says, and that its cases run and fail as
rows.
"""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from anabranch.graph.capture import capture
from anabranch.models.transformer import PRESETS
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import case, host, operators, subject, transformer
from benchmarks.gpu.case import Case
from tests.benchmarks import forked
from tests.benchmarks.small import small_two_branch


def test_without_a_device_it_says_what_would_run(monkeypatch, capsys):
    """And ends well: every section with its minutes, which are those that were asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu", "--minutes", "10"])
    gpu.main()
    told = capsys.readouterr().out
    assert told.startswith("no CUDA device: what would run")
    rows = [line.split(" | ") for line in told.splitlines() if line.startswith("| ")][2:]
    assert [row[0].removeprefix("| ") for row in rows] == list(gpu.MINUTES)
    assert sum(float(row[1]) for row in rows) == pytest.approx(10, abs=0.3)
    assert all(len(row[2]) > 20 for row in rows)


@pytest.mark.parametrize("name", ["probe/no-such-case", "nonsense"])
def test_unknown_sections_are_refused(name: str, monkeypatch, capsys):
    """Also those that only a GPU can run, in a rehearsal."""
    monkeypatch.setattr(sys, "argv", ["gpu", "--rehearse", "--only", name])
    with pytest.raises(SystemExit):
        gpu.main()
    assert f"no section {name.partition('/')[0]}" in capsys.readouterr().err


@pytest.mark.dist
@pytest.mark.parametrize(
    "name",
    [
        *("hang/lazy", "one-rank/plain", "host/transformer", "operators/two-branch"),
        *("transformer/race", "memory/pressure 64 MiB", "memory/communicators"),
    ],
)
def test_a_section_is_rehearsed(name: str, tmp_path: Path, monkeypatch, capsys):
    """The sections that run on a CPU, with one layer, and one plan by hand beside PyTorch's."""
    monkeypatch.setattr(case, "subprocess", forked)
    monkeypatch.setattr(operators, "build", small_two_branch)
    monkeypatch.setitem(PRESETS, "small", replace(PRESETS["small"], layers=1))
    monkeypatch.setattr(host, "MICROBATCHES", 2)
    monkeypatch.setitem(subject.SIZES, "cpu", subject.SIZES["cpu"] | {"layers": "1"})
    monkeypatch.setattr(subject, "TIMED", 1)
    workload = subject.workload_on(torch.device("cpu"), "cpu")
    capture(workload.module, workload.example)  # once, rather than in every rank
    by_hand = transformer.plans_by_hand
    monkeypatch.setattr(
        transformer, "plans_by_hand", lambda model: dict(list(by_hand(model).items())[:1])
    )
    once = partial(transformer.rank_times, turns=1, steps=1, warm=1)
    monkeypatch.setattr(transformer, "rank_times", once)
    command = ["gpu", "--rehearse", "--only", name, "--out", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", command)
    gpu.main()
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert rows
    assert not [row for row in rows if "failed" in row]
    assert f"## {name.partition('/')[0]}" in capsys.readouterr().out


@pytest.mark.dist
def test_a_rehearsal_writes_a_document_and_a_table(tmp_path: Path, monkeypatch, capsys):
    """Two ranks with stages on the CPU equal one process, and each says so in a row."""
    monkeypatch.setattr(case, "subprocess", forked)
    out = tmp_path / "found.json"
    command = ["gpu", "--rehearse", "--only", "shared-gpu/stages", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    gpu.main()
    document = json.loads(out.read_text())
    assert document["card"] == "rehearsal"
    assert document["torch"] == torch.__version__
    assert sorted(row["rank"] for row in document["rows"]) == [0, 1]
    assert all(row["agrees"] for row in document["rows"])
    assert list(tmp_path.iterdir()) == [out]  # the lines went into the document
    table = capsys.readouterr().out
    assert "## shared-gpu" in table
    assert "| stages | 0 | True |" in table


def test_a_case_that_fails_is_a_row(tmp_path: Path):
    """With its last words, of which one line is shown; here before torch is loaded."""
    lines = tmp_path / "rows.jsonl"
    case.run("nowhere", Case("plain"), "cpu", lines, 100.0)
    (row,) = case.read(lines)
    words = "ModuleNotFoundError: No module named 'benchmarks.gpu.nowhere'"
    assert row["failed"] == f"rank 0 ended with 1: {words}"
    assert "Traceback" in row["output"]
    assert words in gpu.show([row])


def test_a_case_that_hangs_is_killed_and_is_a_row(tmp_path: Path):
    """Its section has no time left."""
    lines = tmp_path / "rows.jsonl"
    case.run("one-rank", Case("plain"), "cpu", lines, 0.1)
    assert [row["failed"] for row in case.read(lines)] == ["rank 0 was killed after 0 s"]


def test_half_a_line_of_a_rank_that_was_killed_is_left_out(tmp_path: Path):
    """What came before it counts."""
    lines = tmp_path / "rows.jsonl"
    case.write(lines, {"section": "probe"})
    with lines.open("a") as file:
        file.write('{"section": "pro')
    assert case.read(lines) == [{"section": "probe"}]
