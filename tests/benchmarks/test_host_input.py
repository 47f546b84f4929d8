"""The benchmark of host input: ranks read fewer bytes than the whole data."""

import pytest

from benchmarks.host_input import __main__


@pytest.mark.dist
def test_it_measures_and_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Two steps: a table for a number of ranks, with the share of all together."""
    monkeypatch.setattr(__main__, "STEPS", 2)
    monkeypatch.setattr(__main__, "RANKS", (2,))
    __main__.main()
    shown = capsys.readouterr().out
    shares = [line.split()[3] for line in shown.splitlines() if line.startswith(" all ranks")]
    assert len(shares) == 1
    assert 0 < float(shares[0].rstrip("%")) < 100
