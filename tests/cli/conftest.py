"""The command line as a user calls it, in this process."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from anabranch import cli
from anabranch.cli.source import ModelSource
from anabranch.files import save_cluster, save_profile
from anabranch.graph import capture as graph_capture
from anabranch.graph.capture import Captured
from anabranch.models import MODELS
from anabranch.profile.profile import Profile
from anabranch.runtime.measurement import workload as whole
from anabranch.workload import Workload
from tests.cli.examples import TOWERS, four
from tests.short_searches import shorten
from tests.simulator.helpers import chain, cluster, cost_model

_WORKLOADS: dict[object, Workload] = {}
_CAPTURED: dict[tuple[int, str, tuple[str, ...]], Captured] = {}
_MEASURED: dict[tuple[int, int, tuple[int, ...], str], Profile] = {}
_PROFILES: list[str] = []
_COMMAND = typer.main.get_command(cli.app)
_CAPTURE = graph_capture.capture


@pytest.fixture(autouse=True)
def _captured_once(monkeypatch):
    """Built-in models and those of this folder are built, captured and measured once for all tests,
    models of a test's own folder once for its commands: these leave them as they were, since what
    trains is a fork. Not where a test has its own ``capture``. The verbs are read once, too, and
    searches are shorter still.
    """
    build, capture = ModelSource.workload, ModelSource.capture
    measure = whole.measure_workload

    def built(model: ModelSource, *, meta: bool = False) -> Workload:
        lasting = model.model in MODELS or model.model.startswith("tests.cli.")
        if meta:
            return build(model, meta=meta)
        folder = "" if lasting else str(Path.cwd())
        key = folder, model.model, model.preset, *model.options.items()
        if key not in _WORKLOADS:
            _WORKLOADS[key] = build(model)
        torch.manual_seed(0)
        return _WORKLOADS[key]

    def captured(model: ModelSource, workload: Workload) -> Captured:
        is_kept = any(workload is kept for kept in _WORKLOADS.values())
        if not is_kept or graph_capture.capture is not _CAPTURE:
            return capture(model, workload)
        key = id(workload), model.granularity, model.rewrites
        if key not in _CAPTURED:
            _CAPTURED[key] = capture(model, workload)
        return _CAPTURED[key]

    def measured(
        workload: Workload, samples: tuple[int, ...], *, device: str = "cpu", **more: Any
    ) -> Profile:
        captured = more.get("captured")
        more = {"repeats": 0} | more  # nobody looks at how long operators take
        if not any(captured is kept for kept in _CAPTURED.values()):
            return measure(workload, samples, device=device, **more)
        key = id(captured), id(workload), samples, device
        if key not in _MEASURED:
            _MEASURED[key] = measure(workload, samples, device=device, **more)
        return _MEASURED[key]

    monkeypatch.setattr("typer.main.get_command", lambda _: _COMMAND)
    shorten(monkeypatch)
    monkeypatch.setattr(whole, "SIZES", replace(whole.SIZES, updates=1))
    monkeypatch.setattr(ModelSource, "workload", built)
    monkeypatch.setattr(ModelSource, "capture", captured)
    monkeypatch.setattr(whole, "measure_workload", measured)


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Call ``anabranch`` in a folder of its own: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")  # tables are tables, however long searches took

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["anabranch", *arguments])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = capsys.readouterr()
        return int(stopped.value.code or 0), out, err

    return call


@pytest.fixture
def run(call):
    """Call it, and have standard error as one line."""

    def folded(*arguments: str) -> tuple[int, str, str]:
        code, out, err = call(*arguments)
        return code, out, " ".join(err.split())

    return folded


@pytest.fixture
def run_file(tmp_path):
    """Write a run file; the words after ``train`` that have it read and its model imported."""

    def write(model: str, **keys: object) -> tuple[str, str]:
        texts = {name: json.dumps(value).replace("NaN", "nan") for name, value in keys.items()}
        lines = [f"{name.replace('_', '-')} = {text}" for name, text in texts.items()]
        (tmp_path / "run.toml").write_text("\n".join([f"model = {model!r}", *lines]))
        return "run.toml", "--trust"

    return write


@pytest.fixture
def document(run):
    """Call it with ``--json`` and read what it prints, which must be all of standard output."""

    def read(*arguments: str) -> dict[str, Any]:
        code, out, err = run(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    return read


@pytest.fixture
def write_chain(tmp_path):
    """Write a chain's profile and a cluster of its own; the arguments that name both."""

    def write(*seconds: float, devices: int = 2, memory_bytes: int = 10**9) -> tuple[str, ...]:
        machines = replace(cluster(devices, memory_bytes=memory_bytes), name="my box")
        times = list(seconds or (1.0, 1.0, 1.0))
        cost = cost_model(
            chain(len(times)), times, times, machines,
            value_bytes=8, parameter_bytes=100, kept_bytes=100,
        )  # fmt: skip
        save_profile(cost.profile, tmp_path / "chain.json")
        save_cluster(machines, tmp_path / "box.json")
        return ("chain.json", "--cluster", "box.json", "--batch-size", "8")

    return write


@pytest.fixture
def four_files(tmp_path) -> tuple[str, ...]:
    """Four equal operators of 1 + 2 s per sample and a cluster of four; arguments for both."""
    save_profile(four().profile, tmp_path / "chain.json")
    save_cluster(four().cluster, tmp_path / "box.json")
    return ("chain.json", "--cluster", "box.json", "--batch-size", "4", "--max-replicas", "1")


@pytest.fixture
def profile(run, tmp_path) -> str:
    """A profile file of the towers, estimated so that it is the same everywhere."""
    path = tmp_path / "profile.json"
    if not _PROFILES:
        options = ("--device", "v100", "--batch-size", "16", "-o", "width=64", "-o", str(path))
        code, _, err = run("profile", TOWERS, *options)
        assert code == 0, err
        _PROFILES.append(path.read_text())
    path.write_text(_PROFILES[0])
    return str(path)
