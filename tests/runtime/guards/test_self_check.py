"""The comparison with the user's module before the first step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from anabranch.errors import NonFiniteError, TrainingError
from anabranch.graph.capture import capture
from anabranch.runtime.guards.self_check import _digest
from anabranch.runtime.pipeline import Pipeline
from anabranch.verification import even_plan
from anabranch.workload import Workload
from tests.runtime.small import batch, built, plan
from tests.runtime.training import BATCHES, equal, run, train, trained_each

pytestmark = pytest.mark.dist


def test_the_check_before_the_first_step_changes_nothing() -> None:
    """With it and without it, training is the same: buffers, gradients and random numbers are put
    back.
    """

    def work(pipeline: Pipeline) -> list[float]:
        return [pipeline.step(each) for each in BATCHES[:2]]

    for name in ("Norm", "Tied"):
        model = built(name)
        ways = ((work, {"check_gradients": check, "exact": True}) for check in (True, False))
        assert equal(*trained_each(model, plan(model, 2), None, *ways))


def test_the_check_finds_a_gradient_that_is_not_the_modules() -> None:
    """A hook on a parameter is Python that tracing does not see."""
    model = built("TwoBranch")

    def work(pipeline: Pipeline) -> str:
        if dist.get_rank() == 0:
            handle = pipeline._session.captured.module.head.register_forward_hook(
                lambda *a: 2 * a[2]
            )
        with pytest.raises(TrainingError) as caught:
            pipeline.step(BATCHES[0])
        if dist.get_rank() == 0:
            handle.remove()
        return str(caught.value)

    texts = run(model, plan(model, 2), work, check_gradients=True)
    assert texts[0] == texts[1]
    assert "is not the model's" in texts[0]


def test_gradients_of_one_norm_that_differ_are_told_apart() -> None:
    """Behind a softmax the gradients of all scores add up to zero, whatever the columns are, so
    signs that alternate, or repeat with the width, would see nothing.
    """
    row = torch.linspace(0, 1, 16)
    ours, theirs = _digest(torch.stack([row, -row])), _digest(torch.stack([-row, row]).flip(1))
    assert ours[0] == pytest.approx(theirs[0])
    assert abs(ours[1] - theirs[1]) > 1e-2 * ours[0]


def test_replicas_may_outnumber_the_samples_of_a_micro_batch() -> None:
    """One has none of them, which leaves some to compare all the same."""
    model = built("Chain")

    def work(pipeline: Pipeline) -> str:
        pipeline.step(BATCHES[0])
        return pipeline.gradient_verdict

    chosen = plan(model, 1, replicas=[3], microbatch_size=2)
    (verdict,) = set(run(model, chosen, work, check_gradients=True))
    assert "gradients of 2 samples are those of the module" in verdict


class Switched(nn.Module):
    """Sets and reads switches of the backends in its forward, as recurrent models do for second
    derivatives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.backends.cudnn.flags(enabled=False):
            return self.head(self.body(x).relu()).square().mean()


def test_a_model_may_set_switches_of_the_backends() -> None:
    """The check leaves them alone: the old and the new ones for TF32 exclude each other."""
    workload = Workload(Switched(), torch.randn(4, 4))
    captured = capture(workload.module, workload.example)
    chosen = even_plan(captured.graph, 1, 4)
    assert Pipeline(workload, chosen, captured=captured).step(torch.randn(4, 4)) > 0


def test_random_models_are_not_compared() -> None:
    """Dropout differs between the pipeline and one process, and is no fault."""
    model = built("Dropout")
    losses, _ = train(model, plan(model, 2), model.workload, BATCHES[:1], check_gradients=True)
    assert losses[0] > 0


class Noisy(nn.Module):
    """Adds noise, as a diffusion model does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(x + torch.randn_like(x)) - x).square().mean()


def test_a_model_that_draws_noise_is_sent_to_verify() -> None:
    """Which draws the same numbers in one process."""
    workload = Workload(Noisy(), torch.randn(4, 4))
    captured = capture(workload.module, workload.example)
    chosen = even_plan(captured.graph, 1, 4)
    pipeline = Pipeline(workload, chosen, captured=captured)
    pipeline.step(torch.randn(4, 4))
    assert "anabranch verify compares" in pipeline.gradient_verdict


def test_the_check_leaves_a_loss_that_is_not_finite_to_the_step() -> None:
    """Both sides are NaN, which is not a difference between them."""
    model = built("Chain")
    poisoned = batch(16)
    poisoned["x"][0] = float("nan")

    def work(pipeline: Pipeline) -> None:
        with pytest.raises(NonFiniteError, match="micro-batch 0"):
            pipeline.step(poisoned)

    run(model, plan(model, 2), work, check_gradients=True)
