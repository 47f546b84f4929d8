"""Captured models, kept between commands."""

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anabranch.cli.source import ModelSource
from anabranch.files import capture_cache
from anabranch.files.capture_cache import KeptCapture, estimated, load_capture, save_capture
from anabranch.graph import capture as capturing
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Parameter, Value
from anabranch.profile.kernel_trace import Kernel, KernelTrace, TracedModel
from anabranch.workload import Workload

TINY = {"dense_branches": "1", "sparse_branches": "1", "layers": "1"}

MODEL = """
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

    def __init__(
        self, model: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, str] = TINY
    ) -> None:
        self.model, self.options = model, options
        self.captures = 0
        capture = capturing.capture

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.captures += 1
            return capture(*args, **kwargs)

        monkeypatch.setattr(capturing, "capture", counted)

    def __call__(
        self,
        device: str = "v100",
        samples: tuple[int, ...] = (1, 4),
        granularity: str = "layer",
        options: dict[str, str] | None = None,
        **more: Any,
    ) -> Any:
        chosen = self.options if options is None else options
        source = ModelSource(self.model, "small", chosen, granularity)
        settings = [*map(str, chosen.items()), granularity]
        build = partial(source.workload, meta=True)
        return estimated(
            self.model, build, source.capture, device, samples, settings=settings, **more
        )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "captures"


@pytest.fixture
def builtin(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """A built-in model."""
    return Counted("dlrm", monkeypatch)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """A model in a file of the user's."""
    (tmp_path / "own_kept.py").write_text(MODEL.replace("RELU", ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_kept", raising=False)
    return Counted("own_kept:make", monkeypatch, {})


def test_one_capture_serves_every_device_and_batch(builtin: Counted) -> None:
    """A kept capture gives the same profile, and is used for other devices and batches."""
    first = builtin()
    other = builtin("h100", (2, 8, 32))
    assert builtin.captures == 1
    assert first == builtin(keep=False)
    assert other == builtin("h100", (2, 8, 32), keep=False)
    assert builtin.captures == 3


def test_other_options_are_other_captures(builtin: Counted) -> None:
    """Size and granularity make other operators."""
    builtin()
    builtin(granularity="operator")
    builtin(options=TINY | {"layers": "2"})
    assert builtin.captures == 3


def test_nothing_is_kept_without_the_cache(builtin: Counted, cache: Path) -> None:
    """--no-cache neither reads nor writes."""
    builtin(keep=False)
    assert not cache.exists()


def cut_off(path: Path) -> None:
    path.write_text(path.read_text()[:1000])


def changed(path: Path) -> None:
    text = path.read_text()
    assert '"nbytes":' in text
    path.write_text(text.replace('"nbytes":', '"nbytes":1', 1))


@pytest.mark.parametrize("damage", [cut_off, changed])
def test_a_damaged_capture_is_made_again_and_said(
    builtin: Counted, cache: Path, damage: Callable[[Path], None]
) -> None:
    """Half a file, or one with another number in it, is a warning, then a whole one."""
    first = builtin()
    (path,) = cache.iterdir()
    damage(path)
    with pytest.warns(UserWarning, match=r"capture of dlrm is damaged and is made again"):
        assert builtin() == first
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert builtin() == first
    assert builtin.captures == 2


def test_a_pipe_in_place_of_a_capture_is_replaced(builtin: Counted, cache: Path) -> None:
    """Reading it would wait for ever."""
    first = builtin()
    (path,) = cache.iterdir()
    path.unlink()
    os.mkfifo(path)
    assert builtin() == first
    assert path.is_file()


def test_a_folder_that_others_can_write_to_is_not_used(builtin: Counted, cache: Path) -> None:
    """Anybody could have put a capture there."""
    builtin()
    cache.chmod(0o777)
    with pytest.warns(UserWarning, match="is not used: others can write to it"):
        builtin()
    assert builtin.captures == 2


def test_a_folder_that_cannot_be_made_is_no_error(builtin: Counted, cache: Path) -> None:
    """A file in its place costs the next command its time only."""
    cache.parent.mkdir()
    cache.write_text("in the way")
    builtin()
    builtin()
    assert builtin.captures == 2


def test_a_users_model_is_kept_until_its_code_changes(own: Counted, tmp_path: Path) -> None:
    """The operators after the change are those of the new code; a kept one runs no code at all."""
    first = own()
    del sys.modules["own_kept"]
    assert own() == first
    assert own.captures == 1
    assert "own_kept" not in sys.modules
    (tmp_path / "own_kept.py").write_text(MODEL.replace("RELU", ".tanh()"))
    tanh = own()
    assert own.captures == 2
    assert tanh != first
    assert own(options={"width": "16"}) != tanh
    assert own.captures == 3


def test_a_file_that_a_model_reads_is_its_own(own: Counted, tmp_path: Path) -> None:
    """Another scale in it is another model."""
    scale = tmp_path / "scale.txt"
    scale.write_text("2")
    reading = MODEL.replace("RELU", f".repeat(1, int(open({str(scale)!r}).read()))[:, :8]")
    (tmp_path / "own_kept.py").write_text(reading)
    own()
    own()
    assert own.captures == 1
    scale.write_text("3")
    own()
    assert own.captures == 2


def test_a_file_that_is_read_at_import_belongs_to_every_capture(
    own: Counted, tmp_path: Path
) -> None:
    """``plan --rewrite auto`` captures a model twice, and imports its module once; without a flush
    the module is imported before its capture begins.
    """
    scale = tmp_path / "scale.txt"
    scale.write_text("2")
    reading = f"import pathlib\nSCALE = int(pathlib.Path({str(scale)!r}).read_text())\n" + MODEL
    (tmp_path / "own_kept.py").write_text(reading.replace("RELU", ".repeat(1, SCALE)[:, :8]"))
    ModelSource("own_kept:make").workload()
    own()
    own(granularity="operator")
    assert own.captures == 2
    scale.write_text("3")
    del sys.modules["own_kept"]
    own()
    own(granularity="operator")
    assert own.captures == 4


def test_generated_code_is_not_kept(own: Counted, tmp_path: Path, cache: Path) -> None:
    """Nothing says what it will be next time."""
    head, tail = MODEL.replace("RELU", "").split("def make")
    (tmp_path / "own_kept.py").write_text(f"exec({head!r})\ndef make{tail}")
    own()
    assert list(cache.iterdir()) == []


def test_the_least_recently_used_goes(
    builtin: Counted, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two captures one fits."""
    builtin()
    (first,) = cache.iterdir()
    monkeypatch.setattr(capture_cache, "MOST_KEPT", 1)
    builtin(granularity="block")
    (second,) = cache.iterdir()
    assert second != first


def test_a_model_that_refuses_one_sample_is_not_kept(cache: Path) -> None:
    """The warning comes with every command, as without a cache."""
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Flatten(0), _Mean()).to("meta")
    workload = Workload(net, (torch.empty(2, 4, device="meta"),))
    source = ModelSource("normed")
    for _ in range(2):
        with pytest.warns(UserWarning, match="fails with 1 sample"):
            profile = estimated("normed", lambda: workload, source.capture, "v100", (1, 2, 4))
        assert profile.samples == (2, 4)
    assert list(cache.iterdir()) == []


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


GRAPH = OpGraph(
    (Op("a", ("w",), "Linear"), Op("b")),
    (Value(BATCH, (0,), 4, grad=False, name="x"), Value(0, (1,), 8)),
    (Parameter("w", 64),),
    "Net",
    "block",
    "sum",
    ("b.norm",),
)


def traced(n: float = 1.0) -> TracedModel:
    kernels = (
        Kernel("mm", 8.0 * n, ((n, 2.0, 3.0, 1.0),), "float32"),
        Kernel("add", n, (), "x", 2),
    )
    few = KernelTrace(kernels, (0, 1), (0, 1), (16, 0), (8, 24), (0, 8))
    return TracedModel(GRAPH, few, few)


def test_a_capture_comes_back(tmp_path: Path) -> None:
    """Operators, values, kernels with sizes, and the names that comparisons leave out."""
    path = tmp_path / "kept.json"
    kept = KeptCapture(traced(), {"/home/me/net.py": "0f"})
    save_capture(kept, path)
    assert load_capture(path) == kept
    graph = load_capture(path).traced.graph
    assert (graph.name, graph.granularity) == ("Net", "block")
    assert (graph.loss_kind, graph.normalised) == ("sum", ("b.norm",))


def test_a_capture_of_another_key_is_none(tmp_path: Path) -> None:
    """A file that was renamed or copied is not taken for what its name says."""
    save_capture(KeptCapture(traced(), {}), tmp_path / "kept.json")
    (tmp_path / "kept.json").rename(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"checksum in .* is another one"):
        load_capture(tmp_path / "other.json")
