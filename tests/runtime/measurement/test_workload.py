"""A workload is measured as it is trained; reading is the median without the loader's start."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from anabranch import measure_workload
from anabranch.errors import TrainingError, WorkloadError
from anabranch.profile.profile import UpdateCost
from anabranch.runtime.measurement.workload import (
    MeasurementSizes,
    fit,
    measure_reading,
    measure_update,
    reading_s,
)
from anabranch.workload import Batch, Workload
from tests.runtime.small import batch, built, with_options

SIZES = "anabranch.runtime.measurement.workload.SIZES"


def test_all_that_a_step_takes_is_measured() -> None:
    """Operators, its own optimizer's updates, and batches where it has data."""
    model = built("TwoBranch")
    workload = with_options(model, data=lambda size, epoch: [dict(batch(size, 0))] * 2)
    profile = measure_workload(workload, (2, 4), captured=model.captured, repeats=0)
    assert profile.samples == (2, 4)
    assert profile.update is not None
    assert profile.update.seconds(4, 1000) > 0
    assert profile.read_sample_s > 0
    without = with_options(model, data=None)
    assert measure_workload(without, (2, 4), repeats=0).read_sample_s == 0


def test_the_median_of_what_follows_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that takes 8 s to start, then 2 s, 1 s and 3 s a batch: 2 s."""
    clock = [0.0]
    monkeypatch.setattr(SIZES, MeasurementSizes(budget_s=100.0))
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def batches() -> Iterator[Batch]:
        for seconds in (8.0, 2.0, 1.0, 3.0):
            clock[0] += seconds
            yield torch.zeros(1)

    assert reading_s(batches()) == 2.0
    assert reading_s(()) == 0.0


def test_random_numbers_stay_and_broken_data_is_for_training_to_report() -> None:
    """A profile must not change what is trained, nor fail where only training would."""
    linear = nn.Linear(1, 1)

    def shuffled(batch_size: int, epoch: int) -> Iterator[Batch]:
        while True:
            yield torch.rand(batch_size, 1)

    def broken(batch_size: int, epoch: int) -> Iterator[Batch]:
        raise OSError("no such file")

    plain = Workload(linear, torch.zeros(2, 1))
    state = torch.random.get_rng_state()
    assert measure_reading(replace(plain, data=shuffled), 4) > 0
    assert torch.equal(torch.random.get_rng_state(), state)
    assert measure_reading(replace(plain, data=broken), 4) == 0.0
    assert measure_reading(plain, 4) == 0.0


def test_a_loader_that_blocks_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It held ``plan`` up for ever."""
    monkeypatch.setattr(SIZES, MeasurementSizes(patience_s=0.05))
    over = threading.Event()

    def blocked(batch_size: int, epoch: int) -> Iterator[Batch]:
        yield torch.zeros(batch_size, 1)
        over.wait()

    workload = Workload(nn.Linear(1, 1), torch.zeros(2, 1), data=blocked)
    try:
        with pytest.warns(UserWarning, match=r"has not yielded 8 batches within 0\.05 s"):
            assert measure_reading(workload, 4) == 0.0
    finally:
        over.set()


# Updates


def test_number_and_bytes_are_told_apart():
    """Times that are 1 + 2 * tensors + 3 * bytes give these figures back."""
    rows = [(1.0, 1.0, 4.0), (1.0, 2.0, 8.0), (1.0, 4.0, 100.0)]
    found = fit(rows, [row[0] + 2 * row[1] + 3 * row[2] for row in rows])
    assert found.fixed_s == pytest.approx(1)
    assert found.tensor_s == pytest.approx(2)
    assert found.byte_s == pytest.approx(3)


def test_no_figure_is_negative():
    """Noise must not make an update of more parameters take less; what is left fits as it can."""
    assert fit([(1.0, 1.0, 4.0)], [2.0]) == UpdateCost(0.0, 0.0, 0.5)
    found = fit([(1.0, 1.0, 4.0), (1.0, 9.0, 90.0)], [2.0, 1.0])
    assert min(found.fixed_s, found.tensor_s, found.byte_s) >= 0
    assert found.seconds(9, 90) > 0


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_model_is_left_as_it_was(clip_norm):
    """Only copies are updated, of what is trained; gradients and weights stay."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    module[0].weight.requires_grad_(False)
    before = [p.detach().clone() for p in module.parameters()]
    workload = Workload(module, (torch.zeros(2, 4),), clip_norm=clip_norm)
    assert measure_update(workload).seconds(3, 40) > 0
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert all(p.grad is None for p in module.parameters())


def test_nothing_to_train_costs_nothing():
    """A frozen model has no update."""
    module = nn.Linear(2, 1).requires_grad_(False)
    assert measure_update(Workload(module, (torch.zeros(2, 2),))) == UpdateCost(0.0, 0.0, 0.0)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_complex_parameters_are_timed(clip_norm):
    """Their gradients have a norm as well."""
    module = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.cfloat))])
    assert measure_update(Workload(module, (), clip_norm=clip_norm)).seconds(1, 24) > 0


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_an_optimizer_of_tables_alone_is_timed(clip_norm):
    """By gradients of rows; it refuses others."""
    tables = nn.ModuleList(nn.Embedding(5, 3, sparse=True) for _ in range(2))
    workload = Workload(tables, (), optimizer=sparse_adam, clip_norm=clip_norm)
    assert measure_update(workload).seconds(2, 120) > 0


def test_an_optimizer_of_ones_own_gets_the_rows_of_tables():
    """Of several optimizers in one, each is given the gradients that a backward has: rows for the
    table with sparse gradients, all elements for other parameters.
    """
    module = nn.ModuleDict({"table": nn.Embedding(5, 3, sparse=True), "head": nn.Linear(3, 1)})
    assert measure_update(Workload(module, (), optimizer=TablesAndRest)).seconds(3, 76) > 0


def test_an_optimizer_that_raises_is_named():
    """In an update, by the line."""
    with pytest.raises(
        WorkloadError, match=r"optimizer of the Workload raised in .*test_workload.py"
    ):
        measure_update(Workload(nn.Linear(2, 2), (), optimizer=Failing))


def test_an_optimizer_that_needs_a_closure_is_refused_before_it_misses_one():
    """As training refuses it, with what to take."""
    workload = Workload(
        nn.Linear(2, 2), (), optimizer=lambda named: torch.optim.LBFGS(dict(named).values())
    )
    with pytest.raises(TrainingError, match="take an optimizer whose step needs no closure"):
        measure_update(workload)


def sparse_adam(named):
    return torch.optim.SparseAdam([p for _, p in named])


class TablesAndRest(torch.optim.Optimizer):
    """SparseAdam for the table and Adam for the rest, which take nothing else."""

    def __init__(self, named):
        tables, rest = ([p for n, p in named if n.startswith("table") is t] for t in (True, False))
        kinds = (torch.optim.SparseAdam, tables), (torch.optim.Adam, rest)
        self.parts = [kind(parameters) for kind, parameters in kinds if parameters]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure=None):
        for part in self.parts:
            part.step()


class Failing(torch.optim.SGD):
    """Makes no update."""

    def step(self, closure=None):
        raise RuntimeError("by hand")


@pytest.mark.parametrize(
    ("make", "of_all", "of_largest"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), 0, 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True), 0, 0),
        (lambda p: torch.optim.Adam(p, fused=True), 0, 0),
        (lambda p: torch.optim.Adam(p, foreach=True), 1, 0),
        (lambda p: torch.optim.Adam(p, foreach=False), 0, 3),
        (lambda p: torch.optim.RMSprop(p, foreach=False), 0, 2),
    ],
    ids=["sgd", "momentum", "fused", "foreach", "one by one", "rmsprop"],
)
def test_temporaries_of_an_update(make, of_all, of_largest):
    """Adam's denominators: of all parameters at once, or of one after the other, whose own and the
    one before are alive with the root that they are made from. In place there are none.
    """
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(6)))
    cost = measure_update(Workload(module, (torch.zeros(2, 64),), optimizer=make))
    assert cost.all_temporary == pytest.approx(of_all, abs=0.01)
    assert cost.largest_temporary == pytest.approx(of_largest, abs=0.05)


class Averaging(torch.optim.SGD):
    """Keeps what it has where nobody looks."""


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), 0),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), 1),
        (torch.optim.Adam, 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
        (lambda p: torch.optim.Adafactor(w for _, w in p), (64 + 64) / 64**2),
        (lambda p: Averaging(p, 0.1), 2),
    ],
    ids=["sgd", "momentum", "adam", "amsgrad", "adafactor", "of the user"],
)
def test_state_of_an_optimizer(make, state):
    """Per byte of parameters, without counts of steps; the user's own may keep more elsewhere, so
    it has at least that of Adam.
    """
    module = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(3)))
    workload = Workload(module, (torch.zeros(2, 64),), optimizer=make)
    assert measure_update(workload).state == state
