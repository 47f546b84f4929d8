"""The benchmark of training without a flush: every section measures something small."""

import sys

import pytest

from benchmarks.asynchronous import __main__, flow, prediction, sleeps
from benchmarks.gpu import transformer as gpu_transformer


@pytest.mark.dist
@pytest.mark.parametrize("name", __main__.SECTIONS)
def test_a_section_measures_and_shows(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """With ``--quick``, small stages, and one optimizer."""
    monkeypatch.setattr(sleeps, "POLICIES", ("stash", "2bw"))
    monkeypatch.setattr(sleeps, "STAGES", 2)
    monkeypatch.setattr(flow, "SETTLE", 4)
    monkeypatch.setattr(sleeps, "FORWARD_S", 1e-4)
    monkeypatch.setattr(sleeps, "BACKWARD_S", 2e-4)
    monkeypatch.setattr(prediction, "CASES", prediction.CASES[:1])
    monkeypatch.setattr(prediction, "SIZES", prediction.SIZES | gpu_transformer.SMALL)
    monkeypatch.setattr(sys, "argv", ["asynchronous", "--quick", "--only", name])
    __main__.main()
    table = capsys.readouterr().out.split(f"## {name}\n")[1]
    assert len(table.strip().splitlines()) > 2
    assert "nan" not in table
