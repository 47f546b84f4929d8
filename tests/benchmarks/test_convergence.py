"""The benchmark of convergence: its shortcuts, its statistics, and going on from a file."""

import argparse
import copy
import itertools

import pytest
import torch

from anabranch.weights import TwoBuffers
from anabranch.workload import Workload
from benchmarks.convergence import curves, study, tables
from benchmarks.convergence.__main__ import SECTIONS, main, seeds_of
from benchmarks.convergence.contenders import CONTENDERS, OPTIMIZERS
from benchmarks.convergence.tasks import LAYERS, TASKS, Task
from benchmarks.convergence.training import Run, train
from benchmarks.replay import Replay

SHORT = study.Case("digits", 4, "sgdm", 0.01, 1)


@pytest.fixture
def task() -> Task:
    """Small digits, at the initial weights of seed 0."""
    pytest.importorskip("sklearn")
    made = TASKS["digits"]()
    made.module.reset(0)
    return made


def trained(task: Task, stages: int, microbatches: int) -> list[torch.Tensor]:
    """Weights after 6 updates under 2bw."""
    task.module.reset(0)
    workload = Workload(
        task.module,
        task.gather(task.held_out[:32]),
        optimizer=lambda parameters: OPTIMIZERS["sgdm"](parameters, 0.01),
    )
    replay = Replay(
        workload,
        task.stages(stages),
        TwoBuffers(),
        batch_size=32,
        microbatches=microbatches,
        captured=task.captured,
    )
    list(replay.train(itertools.islice(task.batches(0, 0), 6)))
    return [parameter.detach().clone() for parameter in task.module.parameters()]


def test_stages_have_as_many_layers(task):
    """Eight layers in 1, 4 and 8 stages."""
    for count in (1, 4, 8):
        assert [len(names) for names in task.stages(count)] == [LAYERS // count] * count


def test_double_buffers_are_alike_however_the_model_is_cut(task):
    """All stages read the version before the last, so one stage may stand for eight."""
    for one, eight in zip(trained(task, 1, 1), trained(task, 8, 8), strict=True):
        torch.testing.assert_close(one, eight)


def test_synchronous_is_a_plain_loop(task):
    """The contender called synchronous is what anybody would write."""
    ours = train(SHORT.run("synchronous", 3))
    task.module.reset(3)
    module = copy.deepcopy(task.module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    losses = []
    for batch in task.batches(3, 0):
        optimizer.zero_grad()
        loss = module(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert ours["updates"] == len(losses) == 44
    assert ours["loss"] == [pytest.approx(sum(losses) / len(losses), rel=1e-6)]


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_every_contender_runs(task, optimizer, monkeypatch):
    """Each is for every optimizer or says so; on five mini-batches here."""
    whole = Task.batches
    monkeypatch.setattr(Task, "batches", lambda *at: itertools.islice(whole(*at), 5))
    for name in CONTENDERS:
        run = Run("digits", 4, optimizer, 0.001, name, 1, 2)
        if name in study.Case("digits", 4, optimizer, 0.001, 2).contenders:
            found = train(run)
            assert found["updates"] == 10
            assert len(found["accuracy"]) == len(found["loss"]) == 2
        else:
            with pytest.raises(ValueError, match=f"{name} is not for {optimizer}"):
                train(run)


def test_runs_repeat(task):
    """The same seed gives the same figures, another one others."""
    runs = [SHORT.run("pipeoptim", seed) for seed in (0, 0, 1)]
    one, again, other = map(train, runs)
    assert one == again != other


def test_goes_on_from_a_file(tmp_path, monkeypatch):
    """What a file has is not trained again, and the rate is that which other seeds like best."""
    trained_runs: list[Run] = []

    def pretend(run: Run) -> dict[str, object]:
        trained_runs.append(run)
        likes = run.seed >= 1000 and run.lr == 0.03
        return {"accuracy": [0.9 + 0.05 * likes - 0.001 * run.seed % 7], "loss": [1.0]}

    monkeypatch.setattr(study, "train", pretend)
    first = study.searched(SHORT, study.Runs(tmp_path / "runs.jsonl"), range(2), CONTENDERS)
    assert {row["lr"] for row in first} == {0.03}
    assert len(trained_runs) == len(SHORT.contenders) * (3 * 2 + 2)
    assert study.searched(SHORT, study.Runs(tmp_path / "runs.jsonl"), range(2), CONTENDERS) == first
    assert len(trained_runs) == len(SHORT.contenders) * (3 * 2 + 2)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_trains_and_shows(section, tmp_path, monkeypatch, capsys):
    """A short case with two seeds: a row per contender, and a page of curves."""
    pytest.importorskip("sklearn")
    whole, page = Task.batches, tmp_path / "page.svg"
    monkeypatch.setattr(Task, "batches", lambda *at: itertools.islice(whole(*at), 2))
    monkeypatch.setattr(study, "CASES", {str(SHORT): SHORT})
    command = f"convergence --only {section} --seeds 0-1 --policies synchronous stash --curves"
    monkeypatch.setattr("sys.argv", [*command.split(), str(page)])
    main()
    shown = capsys.readouterr().out
    assert f"## {section}: digits-4-sgdm" in shown
    assert "| stash | 0.0" in shown
    assert page.exists()


def test_seeds_by_name():
    """A range or one; those on which rates and options were chosen say nothing about them."""
    assert [seeds_of(text) for text in ("20-29", "7")] == [range(20, 30), range(7, 8)]
    for text in ("9-5", "999-1000"):
        with pytest.raises(argparse.ArgumentTypeError, match="no range of seeds below 1000"):
            seeds_of(text)


def test_differences_are_those_of_pairs():
    """By hand: differences 1, 2, 3 have mean 2 and t = 2 sqrt(3), so p = .0742 with 2 degrees of
    freedom.
    """
    found = tables.difference([91.0, 94.0, 97.0], [90.0, 92.0, 94.0])
    assert found.mean == pytest.approx(2)
    assert found.p == pytest.approx(0.0742, abs=1e-4)
    assert found.margin == pytest.approx(4.303 / 3**0.5, abs=1e-3)
    assert tables.difference([90.0], [89.0]).p == 1
    assert tables.difference([90.0, 91.0], [90.0, 91.0]).p == 1


def test_tables_and_curves(tmp_path):
    """A run that has not learned is counted; a page is drawn."""
    rows = [
        {"contender": name, "lr": 0.1, "accuracy": last, "curves": [[0.1, a / 100] for a in last]}
        for name, last in (("synchronous", [90.0, 92.0]), ("stash", [80.0, 10.0]))
    ]
    shown = tables.show(rows)
    assert "| stash | 0.1 | 45.00 | 49.50 | -46.00 | 10.0 | 1 |" in shown
    curves.draw({"mnist": rows}, tmp_path / "page.svg")
    assert "held-out accuracy" in (tmp_path / "page.svg").read_text()
