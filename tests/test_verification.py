"""The comparison itself: it says equal where things are, and finds what is not."""

from collections import UserDict
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from anabranch.errors import InfeasiblePlanError
from anabranch.graph.capture import capture
from anabranch.runtime.compute.options import Dropout
from anabranch.runtime.reference import reference
from anabranch.verification import even_plan, verify
from anabranch.verification.even import in_several, workable
from anabranch.verification.result import CAPTURED, VerifyResult, largest_error
from anabranch.workload import Workload
from tests.profile.tiny import Normed
from tests.runtime.small import Built, TwoBranch, batch, built, plan

LIMIT_S = 60.0


@pytest.mark.dist
def test_exact_plans_are_bitwise_equal() -> None:
    """A table crosses whole; other models are in ``test_transparency``."""
    model = built("Shared")
    chosen = plan(model, 3, batch_size=10, schedule="1f1b-deep")
    result = verify(
        model.workload, chosen, batch=batch(10, 3), captured=model.captured, timeout=LIMIT_S
    )
    assert result.bitwise
    assert result.exact
    assert result.max_gradient_error == 0
    assert result.num_parameters == len(list(model.module.parameters()))
    assert "bitwise equal" in result.summary()
    rounding = "right: gradient error 0, where less than 0.0001 is rounding"
    assert result.summary().startswith(rounding)


@pytest.mark.dist
def test_replicas_are_equal_up_to_rounding() -> None:
    """The plan does not allow exact mode; the reference runs over the slices of the replicas that
    make the loss.
    """
    model = built("TwoBranch")
    chosen = plan(model, 2, replicas=[1, 2])
    result = verify(
        model.workload, chosen, batch=batch(16), captured=model.captured, timeout=LIMIT_S
    )
    assert not result.exact
    assert 0 < result.max_gradient_error < 1e-5
    assert result.worst in dict(model.module.named_parameters())


@pytest.mark.dist
def test_sparse_gradients_of_tables_are_compared() -> None:
    """As a plan has them; one process adds up the whole table."""
    model = built("TwoBranch")
    sgd = replace(model.workload, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, fused=False))
    chosen = replace(plan(model, 2, replicas=[2, 1]), sparse_embeddings=True)
    result = verify(sgd, chosen, batch=batch(16), captured=model.captured, timeout=LIMIT_S)
    assert result.max_gradient_error < 1e-5


class Doubled(TwoBranch):
    """Behaves otherwise after it was captured."""

    factor = 1.0

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> dict[str, Tensor]:
        return super().forward(x * self.factor, word, label)


@pytest.mark.dist
def test_a_model_that_is_not_what_was_captured_is_found() -> None:
    """The captured program has the factor that was true then."""
    module = Doubled()
    captured = capture(module, batch(4))
    module.factor = 2.0
    workload = Workload(module, batch(4))
    result = verify(workload, even_plan(captured.graph, 2, 4), captured=captured, timeout=LIMIT_S)
    assert not result.bitwise
    assert result.max_gradient_error > 0.01
    assert result.loss != result.reference_loss


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"loss": 2.0, "exact": True}, ("loss and gradients", "reads in Python", "--devices 1")),
        ({"loss": 1.0}, ("loss is right", "a backward", "mylib::fused", "without --plan")),
        ({"loss": 1.0, "max_gradient_error": 0.0, "whole_batch_error": 0.5}, ("mylib::fused",)),
    ],
)
def test_a_difference_has_likely_causes_and_a_way_on(
    result: dict[str, float], words: tuple[str, ...]
) -> None:
    """By what differs: the loss as well, gradients alone, or the whole batch alone."""
    common = VerifyResult(1.0, 1.0, 0.5, "head.bias", False, False, 2, 2, foreign=("mylib::fused",))
    text = replace(common, **result).why()
    assert all(word in text for word in words), text
    assert "whole batch" in text or "most the gradient of head.bias" in text


class Noisy(TwoBranch):
    """Adds noise, which is no dropout."""

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> dict[str, Tensor]:
        return super().forward(x + torch.randn_like(x), word, label)


class LeavesOut(TwoBranch):
    """Leaves out samples, as timm's DropPath does, by an operation with an argument ``p``."""

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> dict[str, Tensor]:
        return super().forward(x * x.new_empty(len(x), 1).bernoulli_(0.5), word, label)


@pytest.mark.dist
@pytest.mark.parametrize("draws", [Noisy, LeavesOut])
def test_random_numbers_are_told_apart_from_errors(draws: type[TwoBranch]) -> None:
    """Noise is drawn by sample, and compared; as each stage draws it, it differs, and the summary
    says why.
    """
    workload = Workload(draws(), batch(4))
    result = verify(workload, 2, batch=batch(8), timeout=LIMIT_S)
    assert result.bitwise
    assert result.against == CAPTURED
    result = verify(workload, 2, batch=batch(8), timeout=LIMIT_S, dropout="stage")
    assert result.is_random
    assert not result.bitwise
    assert "--dropout sample" in result.summary()
    assert result.summary().startswith("not verified: ")
    assert "on 2 devices" in result.summary()


def test_an_unknown_kind_of_dropout_is_no_failure_of_a_rank() -> None:
    """The argument is the caller's, so it is refused before any rank starts."""
    model, unknown = built("Shared"), cast("Dropout", "none")
    with pytest.raises(ValueError, match="dropout 'none' is none of"):
        verify(model.workload, plan(model, 2), captured=model.captured, dropout=unknown)


@pytest.mark.dist
def test_dropout_is_switched_off_on_both_sides() -> None:
    """So a model with dropout is compared with the user's own module, bit for bit."""
    model = built("Dropout")
    result = verify(model.workload, plan(model, 2), captured=model.captured, timeout=LIMIT_S)
    assert result.bitwise
    assert not result.is_random


@pytest.mark.dist
def test_random_numbers_by_sample_can_be_compared() -> None:
    """Two stages draw what one device draws, so all gradients are equal in every bit; the losses of
    two seeds differ, so that something is drawn.
    """
    model, losses = built("Dropout"), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        result = verify(
            model.workload,
            plan(model, 2),
            captured=model.captured,
            timeout=LIMIT_S,
            dropout="sample",
        )
        assert result.bitwise
        assert result.against == CAPTURED
        assert not result.is_random
        losses.append(result.loss)
    assert losses[0] != losses[1]


@pytest.mark.dist
def test_a_model_on_the_meta_device_is_compared() -> None:
    """The one process makes all the values of which each rank makes its own."""
    with torch.device("meta"):
        module = TwoBranch()
    captured = capture(module, batch(4))
    workload = Workload(module, batch(4))
    result = verify(workload, even_plan(captured.graph, 2, 4), captured=captured, timeout=LIMIT_S)
    assert result.bitwise
    assert result.num_parameters == len(list(module.parameters()))


def test_an_even_plan_has_a_stage_per_device() -> None:
    """Runs of the topological order; edges are those of the values."""
    graph = built("TwoBranch").captured.graph
    chosen = even_plan(graph, 3, 12).stage_graph
    names = [name for stage in chosen.stages for name in stage.operators]
    assert names == [op.name for op in graph.ops]
    assert chosen.devices == (0, 1, 2)
    assert chosen.stages[0].microbatch_size == 2


def test_more_devices_than_operators() -> None:
    graph = built("Chain").captured.graph
    with pytest.raises(InfeasiblePlanError, match=f"{len(graph)} operators do not fill 99 devices"):
        even_plan(graph, 99, 4)


def test_the_reference_weights_slices_by_samples_and_leaves_no_trace() -> None:
    """4 + 4 + 2 samples make the mean over 10; gradients, buffers and the mode are put back."""
    model = built("Norm")
    module = model.module
    module.eval()
    kept = {n: b.clone() for n, b in module.named_buffers()}
    marker = torch.ones_like(next(module.parameters()))
    next(module.parameters()).grad = marker
    result = reference(module, batch(10), [(0, 4), (4, 8), (8, 10)])
    assert not module.training
    assert next(module.parameters()).grad is marker
    assert all(torch.equal(b, kept[n]) for n, b in module.named_buffers())
    module.train()
    module.zero_grad()
    losses = [
        module(**{k: v[a:b] for k, v in batch(10).items()}) for a, b in [(0, 4), (4, 8), (8, 10)]
    ]
    assert result.loss == pytest.approx(
        sum(w * x.item() for w, x in zip((0.4, 0.4, 0.2), losses, strict=True))
    )
    for name, buffer in module.named_buffers():
        buffer.copy_(kept[name])


def test_positional_batches_and_losses_of_any_form() -> None:
    """A tuple is passed as positional arguments, a tensor as the only one; a bare scalar is the
    loss.
    """
    layer = nn.Linear(2, 1)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
            y = self.layer(x)
            return (y if scale is None else y * scale).mean()

    x = torch.ones(2, 2)
    assert reference(Mean(), x, [(0, 2)]).loss == reference(Mean(), (x, x), [(0, 1), (1, 2)]).loss
    assert replace(reference(Mean(), [x], [(0, 2)]), loss=0.0).metrics == {}


@pytest.mark.dist
@pytest.mark.parametrize(("samples", "size"), [(4, 2), (5, 5)])
def test_an_even_cut_has_micro_batches_that_the_model_takes(samples: int, size: int) -> None:
    """Not of one sample, also not at the end of a batch of 5."""
    torch.manual_seed(0)
    workload = Workload(Normed(), {"x": torch.randn(samples, 4)})
    captured = capture(workload.module, workload.example)
    chosen = workable(captured, even_plan(captured.graph, 2, samples))
    assert [stage.microbatch_size for stage in chosen.stage_graph.stages] == [size, size]
    assert verify(workload, 2, captured=captured, timeout=LIMIT_S).bitwise


@pytest.mark.dist
def test_a_batch_is_a_tensor_or_a_mapping_of_another_library() -> None:
    """Given beside a number of devices, for which a plan is made first."""
    x = torch.randn(4, 4)
    for samples in (x, UserDict(x=x)):
        assert verify(Workload(Normed(), samples), 2, batch=samples, timeout=LIMIT_S).bitwise


class Centred(nn.Module):
    """Noise, and then values less their means over the batch, before a loss by sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + torch.randn_like(x))
        return self.third(self.second(x - x.mean(0)).tanh()).square().mean()


@pytest.mark.dist
def test_noise_before_what_computes_across_samples_can_be_verified() -> None:
    """One process has the whole batch at once there, though the loss has micro-batches."""
    result = verify(Workload(Centred(), {"x": torch.randn(8, 4)}), 3, timeout=LIMIT_S)
    assert result.is_good, result.why()
    assert result.against == CAPTURED


class Followed(nn.Module):
    """A contrastive loss against keys of a teacher that follows, as MoCo has it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.9).add_(self.enter.weight, alpha=0.1)
        scores = self.enter(x) @ self.teacher(x).T
        return nn.functional.cross_entropy(scores, torch.arange(len(x)))


def test_state_before_a_loss_of_the_whole_batch_moves_once() -> None:
    """Two micro-batches would move it twice, and the module is called once: a right plan of one
    micro-batch was said to be wrong.
    """
    workload = Workload(Followed(), torch.rand(8, 4))
    model = Built(captured := capture(workload.module, workload.example), workload)
    assert (captured.graph.stateful, captured.graph.loss_kind) == (("teacher.weight",), "coupled")
    chosen = plan(model, 2, batch_size=8, microbatch_size=8)
    assert in_several(captured, chosen) == chosen


class TwoNorms(nn.Module):
    """Two batch normalisations, in two stages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.second, self.last_norm, self.head = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.last_norm(self.second(self.norm(self.first(x)).tanh()))
        return self.head(hidden).square().mean()


@pytest.mark.parametrize(("sizes", "replicas"), [([2, 4], [1, 1]), ([4, 4], [2, 1])])
def test_batch_normalisation_has_the_micro_batches_of_its_stage(
    sizes: list[int], replicas: list[int]
) -> None:
    """Those of the loss's stage are other ones; training by such a plan is right."""
    workload = Workload(TwoNorms(), torch.randn(8, 4))
    model = Built(capture(workload.module, workload.example), workload)
    chosen = plan(model, 2, batch_size=8, microbatch_size=sizes, replicas=replicas)
    result = verify(workload, chosen, captured=model.captured, timeout=60.0)
    assert result.is_good, result.summary()


class MaskedNorm(TwoNorms):
    """A masked mean, whose slices one process cannot weigh by their samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.last_norm(self.second(self.norm(self.first(x)).tanh()))
        counts = (x[:, :1] > -0.5).float()
        return ((self.head(hidden) - 1).square() * counts).sum() / counts.sum()


def test_replicas_with_unequal_samples_are_no_error_of_batch_normalisation() -> None:
    """Of 12 samples, 7 and 5 on two replicas: one process has other micro-batches."""
    workload = Workload(MaskedNorm(), torch.randn(12, 4))
    model = Built(capture(workload.module, workload.example), workload)
    chosen = plan(model, 1, batch_size=12, microbatch_size=[7], replicas=[2])
    result = verify(workload, chosen, captured=model.captured, timeout=LIMIT_S)
    assert result.num_devices == 2
    assert result.is_good, result.summary()


class Coarse(nn.Module):
    """Weights of 8 bits, which micro-batches round at other places than the whole batch does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.bfloat16()).tanh()).square().mean()


def test_a_rounding_step_of_half_precision_is_no_coupled_loss() -> None:
    torch.manual_seed(1)
    result = verify(Workload(Coarse(), torch.randn(8, 4)), 2, timeout=60.0)
    assert (result.whole_batch_error or 0.0) > 1e-4
    assert result.is_good, result.why()


def test_the_rounding_of_a_gradient_that_is_zero_on_paper_is_no_error() -> None:
    """Of a bias that adds the same to all scores of a softmax: four steps of the rounding of the
    largest gradient, as a recommender's had.
    """
    reference = {"weight": torch.ones(3), "bias": torch.zeros(3)}
    rounded = {"weight": torch.ones(3), "bias": torch.full((3,), 5e-7)}
    error, worst = largest_error(rounded, reference)
    assert worst == "bias"
    assert error < 1e-4 < largest_error({**rounded, "bias": torch.full((3,), 5e-6)}, reference)[0]
