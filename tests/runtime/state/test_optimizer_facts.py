"""What policies have to know of an optimizer, and which optimizers they refuse."""

import warnings
from functools import partial
from itertools import count

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, SparseAdam

from anabranch.errors import PolicyError, TrainingError
from anabranch.graph.capture import capture
from anabranch.runtime.asynchronous.requirements import fitting
from anabranch.runtime.state.optimizer_facts import (
    TakenGradients,
    facts_of,
    optimizer_of,
    require_recipe_updates,
    taken_gradients,
    unlike_torchs,
)
from anabranch.weights import OPTIMIZERS, OptimizerFacts, PipeOptim, PredictStash, SpecTrain, Stash
from anabranch.workload import Workload, updates_by_element


def workload(recipe=None, *, meta: bool = False) -> Workload:
    """A layer with this optimizer."""
    module = nn.Linear(1000, 1000, device="meta" if meta else "cpu")
    options = {} if recipe is None else {"optimizer": recipe}
    return Workload(module, torch.zeros(2, 1000), **options)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize(
    ("recipe", "facts"),
    [
        (None, OPTIMIZERS["adamw"]),
        (partial(SGD, lr=0.1), OPTIMIZERS["sgd"]),
        (partial(SGD, lr=0.1, momentum=0.9), OPTIMIZERS["sgd-momentum"]),
        (partial(Adam, betas=(0.0, 0.9)), OptimizerFacts("Adam", momentum=False, rule="adam")),
        (NAdam, OptimizerFacts("NAdam")),
    ],
)
def test_what_the_recipe_makes(recipe, facts, meta):
    """Also of a model without memory for its parameters."""
    assert optimizer_of(workload(recipe, meta=meta)) == facts


class TwoInOne(torch.optim.Optimizer):
    """Steps of two optimizers, which keep their state to themselves or share it."""

    def __init__(self, parameters, *, share):
        super().__init__(parameters, {"lr": 0.1})
        self.parts = [SGD(parameters, 0.1, momentum=0.9), Adam(parameters)]
        for part in self.parts if share else ():
            part.state = self.state


@pytest.mark.parametrize("share", [False, True])
def test_state_that_a_checkpoint_would_lose_is_told(share):
    """A ``state_dict`` has the state of the optimizer itself alone."""
    said = unlike_torchs(TwoInOne(parameters(), share=share))
    assert ("its state_dict lacks what it keeps in Adam and SGD" in said) is not share


def test_all_of_torchs_own_are_known_as_such():
    """One of them, Muon, is of no file of its own."""
    weights = [torch.nn.Parameter(torch.zeros(2, 2))]
    assert unlike_torchs(torch.optim.Muon(weights)) == unlike_torchs(SGD(weights)) == ""


def test_what_else_an_optimizer_holds_is_left_alone():
    """A number in a tensor has no entries, and no iterator is read, be it without end."""
    optimizer = TwoInOne(parameters(), share=True)
    optimizer.scale, optimizer.turns = torch.tensor(1.0), count()
    optimizer.seeds = iter([1, 2])
    assert "state_dict lacks" not in unlike_torchs(optimizer)
    assert (next(optimizer.turns), next(optimizer.seeds)) == (0, 1)


def test_groups_by_name_dimension_and_type():
    """What recipes ask of parameters is there, and the parameters themselves are not touched."""
    seen = []

    def recipe(parameters):
        seen.extend((name, p.dim(), p.dtype) for name, p in parameters)
        matrices = [p for _, p in parameters if p.dim() > 1]
        vectors = [p for _, p in parameters if p.dim() == 1]
        return SGD([{"params": matrices, "momentum": 0.9}, {"params": vectors}], lr=0.1)

    found = workload(recipe)
    before = [*found.module.parameters()]
    assert optimizer_of(found) == OPTIMIZERS["sgd-momentum"]
    assert seen == [("weight", 2, torch.float32), ("bias", 1, torch.float32)]
    assert [*map(id, found.module.parameters())] == [*map(id, before)]


def test_what_cannot_be_known():
    """A recipe for parameters of its own, and a model that learns nothing."""

    def fussy(parameters):
        assert parameters[0][1].shape == (1000, 1000)

    assert optimizer_of(workload(fussy)) is None
    frozen = workload()
    frozen.module.requires_grad_(requires_grad=False)
    assert optimizer_of(frozen) is None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (partial(SGD, lr=0.1), False),
        (partial(SGD, lr=0.1, momentum=0.9), True),
        (partial(Adam, betas=(0.0, 0.9)), False),
        (AdamW, True),
        (NAdam, True),
    ],
)
def test_momentum(make, expected):
    """Whether there is anything to predict with."""
    assert facts_of(make(parameters())).momentum is expected


@pytest.mark.parametrize("make", [Adam, partial(SGD, lr=0.1), NAdam])
def test_spectrain_is_for_momentum_only(make):
    """The message says what fits."""
    with pytest.raises(PolicyError, match="spectrain predicts with the momentum of SGD"):
        fitting(SpecTrain(), make(parameters()), quiet=True)


@pytest.mark.parametrize("policy", [PipeOptim(), PredictStash()])
def test_a_prediction_of_nothing_is_warned_of(policy):
    """SGD without momentum: every prediction is the current weights."""
    with pytest.warns(UserWarning, match="prediction is the current weights; give it a momentum"):
        fitting(policy, SGD(parameters(), lr=0.1), quiet=False)


@pytest.mark.parametrize("make", [partial(SGD, lr=0.1, momentum=0.9), AdamW, NAdam])
def test_what_fits_is_accepted_silently(make):
    """And a policy that predicts nothing asks for nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitting(PipeOptim(), make(parameters()), quiet=False)
        fitting(Stash(), SGD(parameters(), lr=0.1), quiet=False)


class Own(Adam):
    """Perhaps of another rule than its parent."""


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (partial(AdamW, fused=True), True),
        (partial(SGD, lr=0.1, momentum=0.9), True),
        (lambda named: Adafactor([p for _, p in named]), False),
        (Own, False),
        (lambda named: Adam([p for _, p in named if len(p) == 1000]), False),
    ],
)
def test_who_takes_rows_of_parameters(recipe, expected: bool) -> None:
    """Those of PyTorch's that treat each element alone; nothing is known of one's own, nor of what
    a recipe makes that refuses stand-ins.
    """
    assert updates_by_element(workload(recipe), ["weight", "bias"]) is expected


class Embedded(nn.Module):
    """A table with sparse gradients, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, word: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(word)).mean()


def decayed(named):
    """Weight decay of the layer alone."""
    words, *layer = (p for _, p in named)
    return SGD([{"params": [words]}, {"params": layer, "weight_decay": 0.1}], lr=0.1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("recipe", "accepted"),
    [
        (partial(SGD, lr=0.1, momentum=0.9), True),
        (partial(SGD, lr=0.1, weight_decay=0.1), False),
        (decayed, True),
        (partial(SGD, lr=0.1, fused=True), False),
        (partial(Adagrad, lr=0.1), True),
        (AdamW, False),
        (lambda named: SparseAdam([p for _, p in named]), False),
        (lambda named: SparseAdam([named[0][1]]), True),
        (lambda named: Own([p for _, p in named]), True),
    ],
)
def test_sparse_gradients_are_taken_as_torch_takes_them(recipe, accepted: bool) -> None:
    """What is accepted of PyTorch's makes an update; what is refused raises in it."""
    module = Embedded()
    work = Workload(module, {"word": torch.arange(4)}, optimizer=recipe)
    graph = capture(module, work.example).graph
    module(**work.example).backward()
    optimizer = work.make_optimizer(list(module.named_parameters()))
    if not accepted:
        with pytest.raises(TrainingError, match=r"sparse gradients of words.weight"):
            require_recipe_updates(work, graph)
        with pytest.raises(RuntimeError, match=r"sparse|dense"):
            optimizer.step()
        return
    require_recipe_updates(work, graph)
    if type(optimizer) is not Own:  # nothing is known of it
        optimizer.step()


def test_rows_of_momentum_are_not_asked_for() -> None:
    """More of them would be kept with every step, though PyTorch takes them."""
    taken = [taken_gradients(SGD(parameters(), lr=0.1, momentum=m)) for m in (0.0, 0.9)]
    assert taken == [TakenGradients.EITHER, TakenGradients.DENSE]
