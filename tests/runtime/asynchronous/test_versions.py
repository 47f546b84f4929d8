"""One stage's weights: what parameters are inside and between passes, and which storages exist."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, RMSprop
from torch.optim.lr_scheduler import StepLR

from anabranch.runtime.asynchronous.versions import VersionedWeights
from anabranch.weights import (
    POLICIES,
    Naive,
    PipeOptim,
    PredictStash,
    Rotation,
    SpecTrain,
    Stash,
    TwoBuffers,
    TwoBuffersFeedback,
    versions_held,
)
from benchmarks.replay import Replay
from tests.runtime.asynchronous.models import batches, cut


class Stage:
    """One weight that every update lowers by 1, so that version n is the number -n."""

    def __init__(self, policy: Any, in_flight: int) -> None:
        self.weight = nn.Parameter(torch.zeros(1))
        self.versions = VersionedWeights(
            {"weight": self.weight},
            # The momentum buffer is 1 after every update.
            SGD([self.weight], lr=1.0, momentum=0.5, dampening=0.5),
            policy,
            in_flight=in_flight,
            deepest=in_flight,
        )
        self.read: dict[str, float] = {}
        self.storages: set[int] = set()

    def look(self, name: str) -> None:
        self.read[name] = -self.weight.item()
        self.storages.add(self.weight.data_ptr())

    def forward(self, n: int) -> None:
        with self.versions.forward(n):
            self.look(f"F{n}")
        self.look("")

    def backward(self, n: int) -> None:
        with self.versions.backward(n):
            self.look(f"B{n}")
        self.weight.grad = torch.ones(1)
        self.versions.update()
        self.look("")

    def run(self, units: int, in_flight: int, first: int = 0) -> dict[str, float]:
        """1F1B from a fill to its drain."""
        self.versions.fill(first)
        for n in range(first, first + units + in_flight - 1):
            if n < first + units:
                self.forward(n)
            if n >= first + in_flight - 1:
                self.backward(n - in_flight + 1)
        return self.read


def test_naive_reads_what_is_there():
    """Backwards read newer weights than forwards, in one storage."""
    stage = Stage(Naive(), 3)
    read = stage.run(6, 3)
    assert [read[f"F{n}"] for n in range(6)] == [0, 0, 0, 1, 2, 3]
    assert [read[f"B{n}"] for n in range(6)] == [0, 1, 2, 3, 4, 5]
    assert len(stage.storages) == stage.versions.peak_versions == 1


def test_stash_reads_the_same_twice():
    """In as many storages as mini-batches are in flight, however long it runs."""
    stage = Stage(Stash(), 3)
    read = stage.run(30, 3)
    assert [read[f"F{n}"] for n in range(6)] == [0, 0, 0, 1, 2, 3]
    assert all(read[f"F{n}"] == read[f"B{n}"] for n in range(30))
    assert len(stage.storages) == stage.versions.peak_versions == 3
    assert stage.versions.peak_bytes == 3 * 4


def test_pipeoptim_reads_ahead_and_then_what_is_there():
    """In the forward two updates on, where these updates are as predicted: every one lowers by 1
    once there is a momentum. The live storage stays where it is.
    """
    stage = Stage(PipeOptim(), 3)
    read = stage.run(8, 3)
    assert [read[f"F{n}"] for n in range(8)] == [0, 0, 0, 3, 4, 5, 6, 7]
    assert [read[f"B{n}"] for n in range(8)] == list(range(8))
    assert len(stage.storages) == 1
    assert stage.versions.peak_versions == 2


def test_after_a_drain_predictions_look_as_far_as_there_are_updates():
    """The first mini-batch after it is not stale, the second by one update."""
    stage = Stage(PipeOptim(), 3)
    stage.run(5, 3)
    assert stage.versions.version == 5
    read = stage.run(4, 3, first=5)
    assert [read[f"F{n}"] for n in (5, 6, 7, 8)] == [5, 6, 7, 8]


def test_predict_stash_keeps_its_predictions():
    """Also where they turn out wrong."""
    stage = Stage(PredictStash(), 3)
    read = stage.run(8, 3)
    assert [read[f"F{n}"] for n in range(8)] == [0, 0, 0, 3, 4, 5, 6, 7]
    assert all(read[f"F{n}"] == read[f"B{n}"] for n in range(8))
    assert stage.versions.peak_versions == 4


def test_spectrain_reads_one_version_twice():
    """A stage next to the sink of a pipeline of five looks one further ahead, both times."""
    weight = nn.Parameter(torch.zeros(1))
    versions = VersionedWeights(
        {"w": weight},
        SGD([weight], lr=1.0, momentum=0.5, dampening=0.5),
        SpecTrain(),
        in_flight=2,
        deepest=5,
    )
    read = []
    versions.forward(0)
    for n in range(1, 6):
        with versions.forward(n):
            ahead = -weight.item()
        with versions.backward(n - 1):
            read.append((ahead, -weight.item()))
        weight.grad = torch.ones(1)
        versions.update()
    # F1 B0, F2 B1, ...: F(n) aims at n + 1, and so does B(n); nothing is known at first.
    assert read == [(0, 0), (3, 2), (4, 3), (5, 4), (6, 5)]


def test_two_buffers_read_the_version_before_the_last():
    """Of several micro-batches all read the same one, though an update falls between them."""
    stage = Stage(TwoBuffers(), 2)
    versions = stage.versions
    for n in range(4):
        for _ in range(2):
            with versions.forward(n):
                assert -stage.weight.item() == max(0, n - 1)
        if n == 0:
            with versions.forward(1):
                assert stage.weight.item() == 0
        for _ in range(2):
            with versions.backward(n):
                assert -stage.weight.item() == max(0, n - 1)
        stage.weight.grad = torch.ones(1)
        versions.update()
    assert versions.peak_versions == 2


@pytest.mark.parametrize("name", ["stash", "vertical-sync", "predict-stash"])
def test_what_a_forward_has_read_is_not_written(name):
    """Views that autograd has saved still hold the forward's numbers when the backward comes."""
    stage = Stage(POLICIES[name](), 4)
    saved: dict[int, tuple[Tensor, Tensor]] = {}
    for n in range(20):
        with stage.versions.forward(n):
            view = stage.weight.data.view(-1)
            saved[n] = view, view.clone()
        if n >= 3:
            with stage.versions.backward(n - 3):
                view, then = saved.pop(n - 3)
                assert torch.equal(view, then)
                assert view.data_ptr() == stage.weight.data_ptr()
            stage.weight.grad = torch.ones(1)
            stage.versions.update()


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_copies_are_what_the_walk_says(name, in_flight):
    """Measured against ``versions_held``, and 2BW with as many mini-batches as micro-batches
    allow.
    """
    policy = POLICIES[name]()
    lag = 2 if policy.microbatches else in_flight
    stage = Stage(policy, lag)
    stage.run(20, lag)
    stage.run(20, lag, first=20)
    held = versions_held(policy, in_flight=lag, deepest=lag)
    assert stage.versions.peak_versions == held


def test_autograd_does_not_mind():
    """Backwards of products whose weights were updated in place, by all policies."""
    for name in POLICIES:
        layer = nn.Linear(3, 3)
        versions = VersionedWeights(
            dict(layer.named_parameters()),
            SGD(layer.parameters(), lr=0.1, momentum=0.9),
            POLICIES[name](),
            in_flight=2,
            deepest=2,
        )
        outputs = []
        for n in range(5):
            with versions.forward(n):
                outputs.append(layer(torch.ones(2, 3, requires_grad=True)).sum())
            if n:
                with versions.backward(n - 1):
                    outputs[n - 1].backward()
                versions.update()


def test_a_failing_pass_leaves_the_newest_version():
    """Whatever a pass raises, parameters are what they were."""
    for policy in (Stash(), PipeOptim(), PredictStash()):
        stage = Stage(policy, 3)
        stage.run(5, 3)
        stage.versions.fill(5)
        stage.forward(5)
        with pytest.raises(RuntimeError, match="out of memory"), stage.versions.forward(6):
            raise RuntimeError("out of memory")
        assert stage.weight.item() == -5


def test_passes_of_another_order_are_refused():
    """The policy's numbers would be wrong."""
    stage = Stage(Stash(), 2)
    stage.forward(0)
    with pytest.raises(AssertionError, match="when it has been drained"):
        stage.versions.fill(1)
    stage.forward(1)
    with pytest.raises(AssertionError, match="mini-batch 2 at version 0"):
        stage.versions.forward(2)


def test_what_is_loaded_between_runs_counts():
    """A checkpoint written into the parameters, in place or as other tensors."""
    stage = Stage(Stash(), 2)
    stage.run(3, 2)
    with torch.no_grad():
        stage.weight.copy_(torch.tensor([50.0]))
    assert stage.run(2, 2, first=3)["F3"] == -50
    stage.weight.data = torch.tensor([70.0])
    assert stage.run(2, 2, first=100)["F100"] == -70
    assert stage.versions.version == 102


def test_a_skipped_update_is_a_version():
    """Numbers go on, weights, optimizer and schedule stay."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = SGD([weight], lr=1.0, momentum=0.5)
    scheduler = StepLR(optimizer, 1)
    versions = VersionedWeights(
        {"w": weight}, optimizer, Stash(), in_flight=1, deepest=1, scheduler=scheduler
    )
    versions.forward(0)
    weight.grad = torch.full((1,), torch.inf)
    versions.update(skip=True)
    assert (versions.version, weight.item(), weight.grad, scheduler.last_epoch) == (1, 0, None, 0)
    versions.forward(1)
    weight.grad = torch.ones(1)
    versions.update()
    assert (versions.version, weight.item(), scheduler.last_epoch) == (2, -1, 1)


@pytest.mark.parametrize("make", [partial(SGD, momentum=0.9), Adam, RMSprop])
def test_a_parameter_without_a_gradient_is_predicted_to_stay(make):
    """It was left where it was by the last update, whatever the optimizer remembers."""
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = make([used, unused], lr=0.1)
    versions = VersionedWeights(
        {"used": used, "unused": unused}, optimizer, PipeOptim(), in_flight=2, deepest=2
    )
    versions.forward(0)
    for n in range(1, 4):
        before = unused.detach().clone()
        with versions.forward(n):
            there = used.detach().clone(), unused.detach().clone()
        # The last update had a gradient for both after n = 1, for one of them after that.
        if n > 1:
            assert not torch.equal(there[0], used)
        assert torch.equal(there[1], unused) == (n != 2)
        assert torch.equal(unused, before)
        used.grad = torch.ones(2)
        unused.grad = torch.ones(2) if n == 1 else None
        versions.update()


def test_a_stage_without_trainable_parameters():
    """Counts versions, holds nothing; without an optimizer others are refused."""
    versions = VersionedWeights({}, None, PipeOptim(), in_flight=2, deepest=2)
    versions.fill(0)
    for n in range(3):
        with versions.forward(n):
            pass
        if n:
            versions.update()
    assert versions.version == 2
    assert versions.peak_bytes == 0
    with pytest.raises(ValueError, match="parameter w is trained by no optimizer"):
        VersionedWeights({"w": nn.Parameter(torch.ones(1))}, None, Stash(), **dict(PLACE))


PLACE = {"in_flight": 2, "deepest": 2}


class Saved:
    """A checkpoint of these entries, in memory."""

    def __init__(self, entries: dict[str, Tensor]) -> None:
        self.entries = entries

    def keys(self, prefix: str) -> list[str]:
        found = (key.partition("/") for key in self.entries)
        return [name for what, _, name in found if what == prefix]

    def tensor(self, key: str, like: Tensor | None = None) -> Tensor:
        return self.entries[key]


@pytest.mark.parametrize(
    ("optimizer", "policy"),
    [
        *((name, PredictStash(ramp=10, clip=1.5)) for name in ("momentum", "adam", "nadam")),
        ("adam", Rotation(every=4)),
        ("adam", TwoBuffersFeedback(share=0.5)),
    ],
)
def test_a_resumed_run_predicts_as_if_it_had_not_stopped(optimizer, policy):
    """From the state of the optimizers and of the corrections, and the last updates, when
    drained.
    """

    def fresh() -> Replay:
        model = cut("chain 3", optimizer)
        return Replay(
            model.workload,
            model.operators,
            policy,
            batch_size=4,
            microbatches=4 if policy.microbatches else 1,
            captured=model.captured,
        )

    data = batches(12)
    whole = fresh()
    list(whole.train(data[:6]))
    module = copy.deepcopy(whole._captured.module.state_dict())
    state = [(copy.deepcopy(w._optimizer.state_dict()), w.entries()) for w in whole.weights]
    expected = list(whole.train(data[6:]))

    resumed = fresh()
    resumed._captured.module.load_state_dict(module)
    for weights, (optimizers, versions) in zip(resumed.weights, state, strict=True):
        weights._optimizer.load_state_dict(optimizers)
        weights.load(Saved(versions))
    resumed.updates = 6
    assert list(resumed.train(data[6:])) == expected


def clipped(gradients: list[float]) -> list[float]:
    """Gradients of a stage as its optimizer gets them, clipped to twice the usual norm."""
    weight = nn.Parameter(torch.zeros(1))
    versions = VersionedWeights(
        {"w": weight},
        SGD([weight], lr=1.0, momentum=0.0, dampening=0.0),
        PredictStash(clip=2.0),
        in_flight=1,
        deepest=1,
    )
    steps = []
    for n, gradient in enumerate(gradients):
        versions.forward(n)
        weight.grad = torch.tensor([gradient])
        before = weight.item()
        versions.update(skip=gradient == float("inf"))
        steps.append(before - weight.item())
    return steps


def test_clipping_is_by_the_stages_own_usual_norm():
    """The first gradient sets it; an outlier is cut to twice the running norm, which it raises only
    by what is left of it.
    """
    # Running norms before each: 1, 1, 1.05, 1.155.
    assert clipped([1.0, 1.5, 100.0, float("inf"), 1.0]) == pytest.approx([1.0, 1.5, 2.1, 0.0, 1.0])


def test_gradients_that_begin_with_zero_are_not_clipped_to_zero():
    """A last layer that starts at zero gives the stages before it no gradient at first; the first
    one that is not zero is usual.
    """
    assert clipped([0.0, 0.0, 1.0, 5.0]) == pytest.approx([0.0, 0.0, 1.0, 2.0])


def test_sparse_gradients_are_clipped_by_what_they_add_up_to():
    """A row that was looked up twice has its gradient twice: the norm is 2, and then 10 of 4."""
    weight = nn.Parameter(torch.zeros(3, 1))
    versions = VersionedWeights(
        {"w": weight},
        SGD([weight], lr=1.0),
        PredictStash(clip=2.0),
        in_flight=1,
        deepest=1,
    )
    for n, gradient in enumerate([1.0, 5.0]):
        versions.forward(n)
        twice = torch.full((2, 1), gradient)
        rows = torch.tensor([[1, 1]])
        weight.grad = torch.sparse_coo_tensor(rows, twice, (3, 1), check_invariants=True)
        versions.update()
    assert weight.flatten().tolist() == [0.0, -2.0 - 4.0, 0.0]
