"""Estimates by captures that are kept."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anabranch.capture_cache import estimated as home
from anabranch.capture_cache import store
from anabranch.capture_cache.estimated import estimated
from anabranch.graph import capture as capturing
from anabranch.models.names import resolve
from anabranch.workload import Workload

BRANCHES = {"branches": "2"}

MINE = """
import torch
from torch import nn
import anabranch

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x):
        return self.second(self.first(x)RELU).mean()

def make(width="8"):
    return anabranch.Workload(module=Net(int(width)), example={"x": torch.randn(2, int(width))})
"""


class Counted:
    """Estimates of one model, and how often it was captured."""

    def __init__(self, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = model
        self.captures = 0
        capture = capturing.capture

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.captures += 1
            return capture(*args, **kwargs)

        monkeypatch.setattr(capturing, "capture", counted)

    def __call__(self, device: str = "v100", samples: tuple[int, ...] = (1, 4), **more: Any) -> Any:
        how: dict[str, Any] = {"preset": "small", "options": {}, "granularity": "layer"} | more
        named = how["preset"], how["options"]

        def build() -> Workload:
            return resolve(self.model, preset=named[0], options=named[1], meta=True)

        return estimated(self.model, build, device, samples, **how)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "captures"


@pytest.fixture
def candle(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """A built-in model."""
    return Counted("candle-uno", monkeypatch)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """A model in a file of the user's; the rest of what pytest has loaded is left out of sight."""
    (tmp_path / "mine_kept.py").write_text(MINE.replace("RELU", ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine_kept", raising=False)
    seen = home.own_modules
    monkeypatch.setattr(
        home,
        "own_modules",
        lambda loaded: seen({k: m for k, m in loaded.items() if k.startswith("mine")}),
    )
    return Counted("mine_kept:make", monkeypatch)


def test_one_capture_serves_every_device_and_batch(candle: Counted) -> None:
    """What is kept is equal to what was captured, and estimates for a GPU do not capture again."""
    first = candle()
    other = candle("h100", (2, 8, 32))
    assert candle.captures == 1
    assert first == candle(keep=False)
    assert other == candle("h100", (2, 8, 32), keep=False)
    assert candle.captures == 3


def test_whether_a_capture_was_kept_is_told(candle: Counted) -> None:
    """The user learns that nothing was captured."""
    told: list[str] = []
    candle(on_kept=lambda: told.append("first"))
    candle(on_kept=lambda: told.append("second"))
    assert told == ["second"]


def test_other_options_are_other_captures(candle: Counted) -> None:
    """Size and granularity make other operators."""
    candle()
    candle(granularity="operator")
    candle(options={"width": "64"})
    assert candle.captures == 3


def test_nothing_is_kept_without_the_cache(candle: Counted, cache: Path) -> None:
    """--no-cache neither reads nor writes."""
    candle(keep=False)
    assert not cache.exists()


def test_a_damaged_capture_is_made_again_and_said(candle: Counted, cache: Path) -> None:
    """Half a file is a warning, then a whole one."""
    first = candle()
    (path,) = cache.iterdir()
    path.write_text(path.read_text()[:1000])
    with pytest.warns(UserWarning, match=r"capture of candle-uno is damaged and is made again"):
        assert candle() == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert candle() == first
    assert candle.captures == 2


def test_a_users_model_is_kept_until_its_code_changes(mine: Counted, tmp_path: Path) -> None:
    """The operators after the change are those of the new code."""
    first = mine()
    assert mine() == first
    assert mine.captures == 1
    (tmp_path / "mine_kept.py").write_text(MINE.replace("RELU", ".tanh()"))
    del sys.modules["mine_kept"]
    changed = mine()
    assert mine.captures == 2
    assert changed != first
    assert mine(options={"width": "16"}) != changed
    assert mine.captures == 3


def test_a_model_whose_forward_reads_a_file_is_not_kept(
    mine: Counted, tmp_path: Path, cache: Path
) -> None:
    """The next command may find another file."""
    data = tmp_path / "scale.txt"
    data.write_text("2")
    reading = MINE.replace("RELU", f" * float(open({str(data)!r}).read())")
    (tmp_path / "mine_kept.py").write_text(reading)
    mine()
    assert not cache.exists()


def test_a_model_that_refuses_one_sample_is_not_kept(
    candle: Counted, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """What it cannot do is said by every command, as without a cache."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Flatten(0), _Mean()).to("meta")
    workload = Workload(net, (torch.empty(2, 4, device="meta"),))
    how: dict[str, Any] = {"preset": "small", "options": {}, "granularity": "layer"}
    for _ in range(2):
        with pytest.warns(UserWarning, match="fails with 1 sample"):
            found = estimated("normed", lambda: workload, "v100", (1, 2, 4), **how)
        assert found.samples == (2, 4)
    assert not cache.exists()
    assert store.folder() == cache


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()
