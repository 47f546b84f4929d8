"""State and Python values that a captured model would not have as the user's loop has them.

Each trap is trained by a plain loop of torch, and by a plan of two stages with two micro-batches on
local ranks. The pipeline has the losses of the loop, or refuses with a sentence that names the trap
and a way on, or says what differs.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from anabranch import launch
from anabranch.errors import AnabranchError
from anabranch.graph.capture import capture
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import take
from anabranch.verification import verify
from anabranch.workload import NamedParameters, Workload
from tests.runtime.small import Built, num_ranks, plan
from tests.runtime.training import LIMIT_S, on_one_device

pytestmark = pytest.mark.dist

SIZE = 8
Between = Callable[[nn.Module, int], None]


def sgd(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batches(**more: Sequence[Any]) -> list[dict[str, Any]]:
    """Three batches of eight samples, with further entries by name, one per batch."""
    made = []
    for i in range(3):
        drawn = torch.Generator().manual_seed(i)
        made.append(
            {
                "x": torch.randn(SIZE, 4, generator=drawn),
                "y": torch.randint(0, 3, (SIZE,), generator=drawn),
                **{name: values[i] for name, values in more.items()},
            }
        )
    return made


def plain_losses(
    module: nn.Module,
    data: Sequence[Mapping[str, Any]],
    *,
    between: Between = lambda module, step: None,
    optimizer: Callable[[NamedParameters], torch.optim.Optimizer] = sgd,
) -> list[float]:
    """Losses of a plain loop over whole batches; the module here stays as it is."""
    module = copy.deepcopy(module)
    made = optimizer([(n, p) for n, p in module.named_parameters() if p.requires_grad])
    losses = []
    for step, batch in enumerate(data):
        between(module, step)
        made.zero_grad()
        result = module(**batch)
        loss = result["loss"] if isinstance(result, dict) else result
        loss = getattr(loss, "loss", loss)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        made.step()
        losses.append(loss.item())
    return losses


@dataclass
class Outcome:
    """What a pipeline made of some batches: losses, or a refusal; and what it said."""

    losses: Sequence[float] = ()
    refusal: str = ""
    said: str = ""


def piped(
    module: nn.Module,
    data: Sequence[Mapping[str, Any]],
    *,
    between: Between = lambda module, step: None,
    optimizer: Callable[[NamedParameters], torch.optim.Optimizer] = sgd,
    num_stages: int = 2,
    replicas: Sequence[int] | None = None,
    example: Mapping[str, Any] | None = None,
    microbatch_size: int = SIZE // 2,
    recompute: bool = False,
) -> Outcome:
    """The same by a pipeline; two stages and two micro-batches by default."""
    workload = Workload(module, example or data[0], optimizer=optimizer)

    def rank() -> tuple[list[float], str, list[str]]:
        losses: list[float] = []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                pipeline = Pipeline(workload, chosen, captured=built.captured, timeout=20.0)
                for step, batch in enumerate(data):
                    between(module, step)
                    losses.append(pipeline.step(batch))
                refusal = ""
            except AnabranchError as error:
                refusal = str(error)
        return losses, refusal, [str(warning.message) for warning in warned]

    try:
        built = Built(capture(module, workload.example), workload)
        chosen = plan(
            built,
            num_stages,
            batch_size=SIZE,
            microbatch_size=microbatch_size,
            replicas=replicas,
            recompute=recompute,
        )
    except AnabranchError as error:
        return Outcome(refusal=str(error))
    ranks = launch.run(rank, num_ranks(chosen), timeout=LIMIT_S)
    said = [text for _, _, texts in ranks for text in texts]
    assert len(said) == len(set(said)), "what is said is said once"
    return Outcome(ranks[0][0], ranks[0][1], "\n".join(said))


class Net(nn.Module):
    """Two layers, the loss of which is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def scores(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())

    def entries(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.scores(x), y, reduction="none")


def agree(outcome: Outcome, expected: Sequence[float]) -> bool:
    return list(outcome.losses) == pytest.approx(list(expected), rel=2e-6)


# A number in the batch


class Counted(Net):
    """Divides by a count that the batch brings along."""

    def forward(self, x: Tensor, y: Tensor, items: Any) -> Tensor:
        count = items.double().mean() if isinstance(items, Tensor) else items
        return self.entries(x, y).sum() / count


def test_a_number_of_the_batch_that_changes_is_refused() -> None:
    """It is fixed when the model is captured; as a tensor it is read from every batch."""
    data = batches(items=[8, 40, 24])
    expected = plain_losses(Counted(), data)
    outcome = piped(Counted(), data)
    assert "items is 40" in outcome.refusal
    assert "in the workload's example 8" in outcome.refusal
    tensors = batches(items=[torch.full((SIZE,), count) for count in (8, 40, 24)])
    outcome = piped(Counted(), tensors)
    assert agree(outcome, expected), outcome
    with pytest.raises(AnabranchError, match="items is 40"):
        verify(Workload(Counted(), data[0]), 2, batch=data[1], timeout=LIMIT_S)


# Two results


class LossAndAccuracy(Net):
    """A pair that is no numerator and denominator."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        scores = self.scores(x)
        accuracy = (scores.argmax(1) == y).float().mean()
        return nn.functional.cross_entropy(scores, y), accuracy


class Result(NamedTuple):
    loss: Tensor
    accuracy: Tensor


class Named(LossAndAccuracy):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return Result(*super().forward(x, y))


def test_a_loss_and_a_metric_are_no_fraction() -> None:
    """A denominator depends on nothing that is learned; an entry named loss comes first."""
    expected = plain_losses(LossAndAccuracy(), batches())
    outcome = piped(LossAndAccuracy(), batches())
    assert '{"loss": ..., "accuracy": ...}' in outcome.refusal
    outcome = piped(Named(), batches())
    assert agree(outcome, expected), outcome


# A branch on the number of samples


class Branching(Net):
    """Another factor for many samples than for few."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.entries(x, y).mean() * (2 if x.shape[0] > 5 else 1)


class Summed(Net):
    """Factors that follow the number of samples in one way are right in slices as well."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.entries(x, y).mean() * len(x) + self.entries(x, y).sum() / int(x.shape[0])


@pytest.mark.parametrize(("samples", "size"), [(2, 2), (8, 4)])
def test_a_factor_that_branches_on_the_number_of_samples_is_refused(
    samples: int, size: int
) -> None:
    """Slices would take the branch of fewer samples than the batch has, whatever the example is."""
    data = [*batches()[:2], {name: tensor[:7] for name, tensor in batches()[2].items()}]
    example = {name: tensor[:samples] for name, tensor in data[0].items()}
    outcome = piped(Branching(), data, example=example, microbatch_size=size)
    assert "branch on the number of samples" in outcome.refusal
    if samples == 2:
        outcome = piped(Summed(), data, example=example, microbatch_size=size)
        assert agree(outcome, plain_losses(Summed(), data)), outcome


# An attribute that the loop changes


class Scheduled(Net):
    """The weight of a loss, which the training loop changes; a list of parameters, which every step
    changes; and an attribute without meaning.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.weights, self.seen = 1.0, {"aux": 1.0}, 0
        self.decayed = [*self.parameters()]
        self.register_buffer("kept", torch.ones(()))
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        decay = sum(parameter.square().sum() for parameter in self.decayed)
        loss = self.entries(self.drop(x), y).mean()
        return loss * self.weight * self.weights["aux"] * self.kept + decay


def weight(module: Any, step: int) -> None:
    module.weight = 0.5**step


def weights(module: Any, step: int) -> None:
    module.weights["aux"] = 0.5**step


def kept(module: Any, step: int) -> None:
    module.seen = step
    module.kept.fill_(0.5**step)
    module.eval()  # to evaluate by hand
    module.train()


@pytest.mark.parametrize("between", [weight, weights])
def test_an_attribute_that_the_loop_changes_is_refused(between: Between) -> None:
    """It is fixed when the model is captured."""
    outcome = piped(Scheduled(), batches(), between=between)
    assert between.__name__ in outcome.refusal
    assert "register_buffer" in outcome.refusal


def test_a_buffer_may_change_and_what_the_forward_does_not_read() -> None:
    outcome = piped(Scheduled(), batches(), between=kept)
    assert agree(outcome, plain_losses(Scheduled(), batches(), between=kept)), outcome


def test_an_attribute_that_changes_between_evaluations_is_refused() -> None:
    """The program of evaluation would keep it as well."""
    module: Any = Scheduled()
    _, pipeline = on_one_device(module, lambda n: take(batches()[0], 0, n))
    module.drop.eval()  # as all parts are in an evaluation
    assert pipeline.evaluate(batches()[:1]) == pipeline.evaluate(batches()[:1])
    module.weight = 0.5
    with pytest.raises(AnabranchError, match="weight"):
        pipeline.evaluate(batches()[:1])


def test_parts_that_the_loop_replaces_and_their_modes_are_noticed() -> None:
    """A captured program has the tensors and layers of then, in the modes of then."""
    module: Any = Scheduled()
    reads = capture(module, batches()[0]).programs.exporter.reads
    assert not reads.changed()
    module.eval()  # the whole, to be evaluated by hand
    assert not reads.changed()
    module.train()
    module.drop.eval()
    assert reads.changed() == ["drop.training (was True, now False)"]
    module.train()
    reads.accept()  # as after the comparison that the first step begins with
    module.kept = torch.ones(())
    module.head.bias = nn.Parameter(torch.ones(3))
    module.body = nn.Identity()
    assert reads.changed() == ["kept", "body", "body.weight", "body.bias", "head.bias"]


class NoisyCounter(Net):
    """Counts its calls, and draws random numbers, so that gradients cannot be compared."""

    calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return self.entries(x + torch.randn_like(x), y).mean() * self.calls


class NormedCounter(Net):
    """Counts its calls, and has other statistics in micro-batches."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return self.entries(self.norm(x), y).mean() * self.calls


def test_a_counter_beside_batch_normalisation_is_refused() -> None:
    """A comparison by micro-batches does not call the module on the whole batch."""
    with pytest.raises(AnabranchError, match="sets calls"):
        verify(Workload(NormedCounter(), batches()[0]), 2, batch=batches()[0], timeout=LIMIT_S)


def test_a_counter_beside_random_numbers_is_refused() -> None:
    """The module is called twice with the same numbers, in training and by ``verify``."""
    workload, pipeline = on_one_device(NoisyCounter(), lambda n: take(batches()[0], 0, n))
    with pytest.raises(AnabranchError, match="sets calls"):
        pipeline.step(batches()[0])
    with pytest.raises(AnabranchError, match="sets calls"):
        verify(workload, 2, batch=batches()[0], timeout=LIMIT_S)


# Writes that tracing drops


class Codebook(Net):
    """A mean of what it has seen, by .data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.body(x).tanh() + self.seen
        self.seen.data.copy_(0.5 * self.seen.data + 0.5 * hidden.detach().mean(0))
        return nn.functional.cross_entropy(self.head(hidden), y)


class Shrunk(Net):
    """Makes a weight smaller at every call, by .data."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.head.weight.data.mul_(0.9)
        return self.entries(x, y).mean()


class Assigned(Codebook):
    """The same by an assignment."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.body(x).tanh() + self.seen
        self.seen.data = 0.5 * self.seen + 0.5 * hidden.detach().mean(0)
        return nn.functional.cross_entropy(self.head(hidden), y)


class Borrowed(Codebook):
    """The same through numpy, of which tracing knows nothing; nothing reads it yet."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            self.seen.numpy()[0] += 1
        return self.entries(x, y).mean() + 0 * self.seen.sum()


@pytest.mark.parametrize("kind", [Codebook, Assigned])
def test_a_buffer_is_written_through_data(kind: type[nn.Module]) -> None:
    """It is once per micro-batch, and said; with one micro-batch all is as in the loop."""
    expected = plain_losses(kind(), batches())
    outcome = piped(kind(), batches(), microbatch_size=SIZE)
    assert agree(outcome, expected), outcome
    outcome = piped(kind(), batches())
    assert not outcome.refusal
    assert "changes seen: once per micro-batch" in outcome.said


@pytest.mark.parametrize(("kind", "name"), [(Shrunk, "head.weight"), (Borrowed, "seen")])
def test_a_write_that_is_lost_is_refused(kind: type[nn.Module], name: str) -> None:
    outcome = piped(kind(), batches())
    assert not agree(outcome, plain_losses(kind(), batches()))
    assert name in outcome.refusal


# Optimizers that are not torch's


class ByNorm(torch.optim.Optimizer):
    """Steps of one length, over all parameters together."""

    def __init__(self, parameters: NamedParameters) -> None:
        super().__init__([p for _, p in parameters], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for parameter in held:
            parameter.sub_(0.3 * parameter.grad / norm)


def test_an_optimizer_that_is_not_torchs_is_told() -> None:
    """Each rank has one of its own stages' parameters."""
    expected = plain_losses(Net2(), batches(), optimizer=ByNorm)
    outcome = piped(Net2(), batches(), optimizer=ByNorm)
    assert not agree(outcome, expected)
    assert "ByNorm" in outcome.said
    assert "clip_norm" in outcome.said
    assert "SGD" not in piped(Net2(), batches()).said


class Net2(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.entries(x, y).mean()


# State that the forward changes


class Teacher(Net):
    """A mean of the student's weights over steps, which the loss compares it with."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, weight in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
                mean.mul_(0.9).add_(weight, alpha=0.1)
        distance = (self.teacher(x) - self.body(x)).square().mean()
        return self.entries(x, y).mean() + 100 * distance


class Other(Teacher):
    """A teacher that begins far from the student."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher.weight.neg_()


class Queue(Net):
    """Keys of batches before, as in MoCo: each batch takes the place of the oldest."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.randn(8, 2 * SIZE))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        keys = self.body(x)
        similar = keys @ self.queue.clone()
        with torch.no_grad():
            place = int(self.place)
            self.queue[:, place : place + len(x)] = keys.T
            self.place[0] = (place + len(x)) % self.queue.shape[1]
        return self.entries(x, y).mean() + similar.logsumexp(1).mean()


class Standardised(Net):
    """Inputs by running means that the forward keeps itself, over whole batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.entries(x - self.mean, y).mean()


class Balanced(Net):
    """A loss by its running mean, which is assigned anew after it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.entries(x, y).mean()
        balanced = loss / self.running
        self.running = 0.9 * self.running + 0.1 * loss.detach()
        return balanced


class Followed(Net):
    """A loss by its running mean, which follows through ``.data``, in place and with a gradient, as
    the vectors of VQ-VAE-2 do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.ones(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.entries(x, y).mean()
        self.running.data.mul_(0.9).add_(loss, alpha=0.1)
        return loss / self.running


@pytest.mark.parametrize(
    ("kind", "recompute", "num_stages"),
    [
        (Balanced, False, 2),
        (Followed, True, 1),
        (Other, False, 2),
        (Other, True, 1),
        (Queue, True, 2),
        (Standardised, False, 2),
    ],
)
def test_state_that_one_micro_batch_changes_is_that_of_the_loop(
    kind: type[nn.Module], recompute: bool, num_stages: int
) -> None:
    """Neither the check before the first step nor a forward that is repeated changes it again, and
    a repeated forward reads what the first one read; so does a backward.
    """
    expected = plain_losses(kind(), batches())
    outcome = piped(
        kind(), batches(), num_stages=num_stages, microbatch_size=SIZE, recompute=recompute
    )
    assert agree(outcome, expected), outcome


def test_state_is_changed_between_a_forward_and_its_backward() -> None:
    """Forwards of two micro-batches come before the first backward."""
    assert len(piped(Balanced(), batches()).losses) == 3


def test_state_that_follows_the_whole_batch_can_be_verified() -> None:
    """One process runs the same micro-batches, by the means of the whole batch."""
    result = verify(Workload(Standardised(), batches()[0]), 2, timeout=LIMIT_S)
    assert result.is_good, result.why()
    assert "one process ran the captured model on the same micro-batches" in result.summary()


class Spectral(Net):
    """A weight by its largest singular value, which a power iteration per forward follows."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.head)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.entries(x, y).mean()


class Counter(Net):
    """The number of forwards, as a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.count += 1
        return {"loss": self.entries(x, y).mean(), "count": self.count.clone()}


class Instances(Net):
    """Running means, which nothing but the evaluation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.entries(self.norm(x.reshape(-1, 2, 2)).flatten(1), y).mean()


CHANGED = {
    Teacher: "teacher.weight",
    Spectral: "head.parametrizations.weight.0._u",
    Counter: "count",
    Instances: "norm.running_mean",
}


@pytest.mark.parametrize("kind", CHANGED)
def test_state_that_the_forward_changes_is_told(kind: type[nn.Module]) -> None:
    """It changes once per micro-batch, as running means do."""
    outcome = piped(kind(), batches())
    assert len(outcome.losses) == 3, outcome
    expected = plain_losses(kind(), batches())
    assert kind in (Counter, Instances) or not agree(outcome, expected)
    assert CHANGED[kind] in outcome.said
    assert "once per micro-batch" in outcome.said
    if kind is Counter:
        result = verify(Workload(kind(), batches()[0]), 2, timeout=LIMIT_S)
        assert any(CHANGED[kind] in note for note in result.notes)


# Weights that the batch changes


class Renormed(nn.Module):
    """Rows of a table are cut to a norm when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(3, 4, max_norm=0.5)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.words(y) + x), y)


def test_a_table_with_max_norm_has_no_replicas() -> None:
    """Copies would be cut by other samples; with one replica nothing is wrong."""
    expected = plain_losses(Renormed(), batches())
    outcome = piped(Renormed(), batches(), replicas=[2, 1])
    assert "words.weight" in outcome.refusal
    assert "replica" in outcome.refusal
    outcome = piped(Renormed(), batches())
    assert agree(outcome, expected), outcome
