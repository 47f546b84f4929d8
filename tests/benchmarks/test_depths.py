"""The benchmark of depths: stacked models are those of a pipeline, and its runs are kept."""

import json
from dataclasses import replace

import pytest
import torch
from torch.optim import NAdam, Optimizer

from anabranch.workload import Workload
from benchmarks.convergence import depths
from benchmarks.convergence.contenders import OPTIMIZERS
from benchmarks.convergence.depths import METHODS, TRIALS, Method, Stacked, orthogonal, stage_of
from benchmarks.convergence.tasks import Task, charlm
from benchmarks.replay import Replay

SEEDS = (3, 4)

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.fixture(scope="module")
def task() -> Task:
    """Few characters and a narrow model."""
    return charlm(width=8, steps=12, batch_size=2)


def optimizer(name: str, parameters: object) -> Optimizer:
    if name == "asyncpp":
        return NAdam(parameters, lr=0.003, betas=(0.99, 0.999))
    return OPTIMIZERS["adam"](parameters, 0.003)


@pytest.mark.parametrize("name", ["stash", "pipeoptim", "predict-stash", "asyncpp", "2bw-ef"])
def test_stacked_models_are_those_of_pipelines(task, name):
    """Every seed by itself in eight stages, version for version; 2bw in one stage, as it is the
    same at any depth. Sums are made in another order, so numbers are close, not equal.
    """
    count = 1 if name == "2bw-ef" else 8
    with torch.random.fork_rng(devices=[]):
        stacked = Stacked(task, SEEDS, METHODS[name], 0.003, 8)
    orders = [list(task.epoch(seed, 0).split(2)) for seed in SEEDS]
    for rows in zip(*orders, strict=True):
        batch = task.gather(torch.cat(rows))
        stacked.train(*(batch[key].unflatten(0, (2, 2)) for key in ("x", "label")))
    for place, seed in enumerate(SEEDS):
        task.module.reset(seed)
        task.module.zero_grad()
        replay = Replay(
            Workload(
                task.module,
                task.gather(task.held_out[:2]),
                optimizer=lambda parameters: optimizer(name, parameters),
            ),
            task.stages(count),
            METHODS[name].policy,
            batch_size=2,
            captured=task.captured,
        )
        assert len(list(replay.train(task.batches(seed, 0)))) == 12
        for key, parameter in task.module.named_parameters():
            if key.endswith("qkv.bias"):
                continue  # the gradient of a key's bias is rounding alone, which Adam blows up
            mine = stacked.weights[key][place]
            torch.testing.assert_close(mine, parameter, rtol=1e-3, atol=2e-4)


def test_a_flush_reads_the_newest_weights(task):
    """Synchronous training is stashing without a lag."""
    plain = Stacked(task, SEEDS, METHODS["synchronous"], 0.003, 8)
    other = Stacked(task, SEEDS, replace(METHODS["stash"], flush=True), 0.003, 8)
    batch = task.gather(torch.arange(4))
    for _ in range(3):
        for models in (plain, other):
            models.train(*(batch[key].unflatten(0, (2, 2)) for key in ("x", "label")))
    assert all(map(torch.equal, plain.weights.values(), other.weights.values()))


def test_stages_of_every_depth():
    """At 32 stages every linear layer has its own, with the norm in front of it; the embedding is
    in the first stage, the head in the last.
    """
    names = ["embedding.weight", "layers.0.before.bias", "layers.0.qkv.weight", "layers.0.out.bias"]
    names += ["layers.0.between.weight", "layers.0.up.bias", "layers.7.down.weight", "head.weight"]
    assert [stage_of(name, 32) for name in names] == [0, 0, 0, 1, 2, 2, 31, 31]
    assert [stage_of(name, 8) for name in names] == [0, 0, 0, 0, 0, 0, 7, 7]


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (3, 5, 4)])
def test_a_step_of_muon_has_singular_values_of_about_one(shape):
    """Wide, tall and stacked."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonal(matrix))
    assert ((values > 0.3) & (values < 1.3)).all()


def test_it_goes_on_from_a_file_and_shows(tmp_path, monkeypatch, capsys):
    """A second call trains nothing that the file has; the table compares with synchronous runs."""
    trained: list[tuple[Method, int]] = []

    def pretend(trial, method, depth, seeds):
        trained.append((method, depth))
        return [50.0 + seed - depth / 8 for seed in seeds]

    monkeypatch.setattr(depths, "run", pretend)
    kept = tmp_path / "depths.jsonl"
    words = ["depths", "--into", str(kept), "--tasks", "rows", "--depths", "8", "16"]
    words += ["--methods", "synchronous", "stash", "--seeds", "0-2"]
    for _ in range(2):
        monkeypatch.setattr("sys.argv", words)
        depths.main()
    assert [(method.flush, depth) for method, depth in trained] == [
        (True, 8),
        (False, 8),
        (False, 16),
    ]
    assert [json.loads(line)["depth"] for line in kept.read_text().splitlines()] == [0, 8, 16]
    assert "-1.00 +- 0.00" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["basis-rotation", "2bw-ef, Muon", "a third of the updates"])
def test_methods_run(name):
    """Three updates on both tasks."""
    for trial in ("charlm", "rows"):
        short = replace(TRIALS[trial], updates=3)
        assert len(depths.run(short, METHODS[name], 16, SEEDS)) == 2
