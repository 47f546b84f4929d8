"""An examination: what it finds in models with one trait each."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.cluster import Cluster
from anabranch.schedule import glossary
from anabranch.training.doctor import Examination, examine, report
from anabranch.workload import NamedParameters, Workload
from tests.losses import Contrastive, Masked, RootMean, Tokens, batch
from tests.short_searches import shorten

CLUSTER = Cluster.preset("summit:1x2")


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def examined(module: nn.Module) -> Examination:
    return examine(Workload(module, batch(4)), CLUSTER, 8)


class Everything(Contrastive):
    """Batch normalisation, dropout, a tied layer, a frozen one, and one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.1)
        self.again = self.left[0]
        self.right[0].requires_grad_(False)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> dict[str, Tensor]:
        return super().forward(self.drop(x), self.norm(y), label)


def test_every_trait_is_named() -> None:
    """With the module or parameter that has it, and what becomes of it."""
    found = examined(Everything())
    assert found.capturable
    assert found.loss == "coupled"
    told = "\n".join(found.findings)
    for words in (
        "42 of 187 parameters are frozen",
        "tied weights: left.0.weight = again.weight",
        "samples depend on each other from matmul",
        "batch normalisation in norm",
        "random numbers are drawn",
        "no gradient reaches idle.weight, idle.bias",
    ):
        assert words in told


class FrozenTie(nn.Module):
    """A table that two layers share and nobody trains, and one with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sparse = nn.Linear(6, 6), nn.Embedding(9, 6, sparse=True)
        self.again, self.head = self.first, nn.Linear(6, 1)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        both = self.again(self.first(x)) + self.sparse(row)
        return self.head(both).square().mean()


def test_an_optimizer_that_cannot_train_the_model_is_named() -> None:
    """AdamW takes no sparse gradients. A tie of frozen layers has no gradients to be summed. Data
    that differs from the example is named as well.
    """
    example = {"x": torch.rand(4, 6), "row": torch.arange(4)}
    workload = Workload(FrozenTie(), example, data=lambda *_: [{**example, "x": torch.rand(4, 7)}])
    told = "\n".join(examine(workload, CLUSTER, 8).findings)
    assert "it cannot be trained: batch 0 of epoch 0 differs from the workload's example" in told
    assert "it cannot be trained: AdamW, as it is set, cannot update this model" in told
    assert "tied weights" not in told


def test_samples_depend_on_each_other_from_the_first_operator_on() -> None:
    """In the order of the graph, a normalisation over the whole batch before the loss."""
    together = Everything()
    together.norm = nn.SyncBatchNorm(6)
    (said,) = (text for text in examined(together).findings if text.startswith("samples depend"))
    assert "from batch_norm in norm on: right.0, matmul will" in said
    (said,) = (text for text in examined(RootMean()).findings if text.startswith("samples depend"))
    assert "in the loss alone: whole_batch_loss will have" in said


def test_a_plan_and_the_memory_of_its_devices() -> None:
    """Two towers of equal work and a loss of many small operations: the way is shorter than all."""
    found = examined(Contrastive())
    assert found.branches is not None
    assert 1.1 < found.branches.width < 2
    assert found.plan is not None
    assert [device for device, *_ in found.peaks] == [0, 1]
    assert all(0 < weights < peak for _, _, weights, peak in found.peaks)
    text = report(found)
    assert f"torch {torch.__version__}" in text
    assert "the first plan to try, for summit:1x2" in text
    assert glossary(found.plan) in text


def test_a_chain_has_nothing_to_gain() -> None:
    """Its longest path is all of it."""
    found = examined(Masked())
    assert found.branches is not None
    assert found.branches.width == pytest.approx(1)
    assert "a chain" in report(found)


def _no_optimizer(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD([dict(parameters)["top.weight"]], lr=0.1)


def _lbfgs(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([parameter for _, parameter in parameters])


def _no_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ({"optimizer": _no_optimizer}, ("optimizer recipe", "KeyError: 'top.weight'")),
        ({"scheduler": _no_scheduler}, ("scheduler recipe", "'milestones'")),
    ],
)
def test_a_recipe_that_raises_is_named(recipe: dict[str, Any], words: tuple[str, str]) -> None:
    """Before training, with the user's line; the model can be captured and planned all the same."""
    found = examine(Workload(Masked(), batch(4), **recipe), CLUSTER, 8)
    (said,) = (text for text in found.findings if text.startswith("it cannot be trained"))
    assert all(word in said for word in (*words, "test_doctor.py"))
    assert found.capturable
    assert found.plan is not None


def test_an_optimizer_that_no_step_can_drive_is_named() -> None:
    """One that evaluates the loss itself."""
    found = examine(Workload(Masked(), batch(4), optimizer=_lbfgs), CLUSTER, 8)
    assert any(t.startswith("it cannot be trained: LBFGS") for t in found.findings)


class Asking(Tokens):
    """Needs the value of a tensor."""

    def forward(self, x: Tensor, y: Tensor, label: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        return self.scores(x).square().mean()


def test_the_line_that_stops_the_capture_is_named() -> None:
    found = examined(Asking())
    assert not found.capturable
    assert "if x.sum() > 0:" in found.error
    assert "cannot be captured" in report(found)
