"""Updates of copies of a model's parameters, timed."""

import pytest
import torch
from torch import nn

from anabranch.errors import TrainingError, WorkloadError
from anabranch.profile.profile import UpdateCost
from anabranch.runtime.measurement.update import fit, measure_update
from anabranch.workload import Workload


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
        WorkloadError, match=r"optimizer of the Workload raised in .*test_update.py"
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
