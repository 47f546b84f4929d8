"""Captured modules: any number of samples, evaluation, and the module left as it was."""

from typing import Any

import pytest
import torch
from torch import nn

from anabranch.errors import CaptureError
from anabranch.graph.capture import capture
from anabranch.graph.cutting.split import split
from anabranch.graph.module_state import evaluated, in_mode
from tests.graph.chain import check_split, eager, gradient_error, run_stages, taken
from tests.graph.nets import Net, batch, one_stage, stage_each

# Any number of samples


def test_example_of_one_sample_serves() -> None:
    """The example is repeated, so that the samples can be told from sizes of 1."""
    captured = capture(Net(), batch(1))
    assert captured.programs.samples == 2
    assert all(value.batched for value in captured.graph.values)
    loss, _ = run_stages(split(captured, one_stage(captured)), batch(5))
    assert torch.equal(loss, Net()(*batch(5)).detach())


def test_model_that_refuses_a_symbolic_batch_is_exported_for_each_size() -> None:
    """``len`` and ``view(2, -1)`` need the number; even sizes work, odd ones are an error."""
    halves = lambda _, h: torch.cat(h.view(2, len(h) // 2, 8).unbind(0))  # noqa: E731
    captured = capture(Net(halves), batch(4))
    assert check_split(captured, batch(6), stage_each(captured), exact=True) == 0.0
    with pytest.raises(CaptureError, match=r"with 5 samples: .*test_capture.py:\d+ .*view"):
        captured.programs.at(5)


def test_number_that_is_computed_of_the_samples_is_one_of_each_size() -> None:
    """The tracer fixes it, but not the number of samples: each size is exported, in the same way,
    as for the hardest quarter of pixels (``loss.topk(int(0.25 * loss.numel()))``).
    """
    hardest = lambda _, h: h[:, 1:] * h.flatten().topk(int(0.25 * h.numel()))[0].sum()  # noqa: E731
    module = Net(hardest)
    module.last = nn.Linear(7, 1)
    captured = capture(module, batch(4))
    assert check_split(captured, batch(6), one_stage(captured), exact=True) == 0.0


@pytest.mark.parametrize(
    "body",
    [
        lambda net, h: torch.stack([row * 2 for row in h]),
        lambda net, h: h * 2 if h.shape[0] % 2 else h.exp(),
    ],
    ids=["loop", "branch"],
)
def test_operations_that_depend_on_the_number_of_samples_are_refused(body: Any) -> None:
    """A Python loop or branch over the samples gives other operators for other micro-batches."""
    with pytest.raises(CaptureError, match=r"Net runs other operations for \d sample"):
        capture(Net(body), batch(4)).programs.at(5)


def test_meta_module_can_be_captured() -> None:
    """Published sizes are planned without memory for them."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(10**5, 10**5), nn.Linear(10**5, 1))
    captured = capture(MeanOf(module), torch.ones(2, 10**5))
    assert [op.name for op in captured.graph.ops] == ["module.0", "module.1"]
    assert captured.graph.parameter_bytes["module.0.weight"] == 4 * 10**10


def test_meta_module_may_make_tensors_without_naming_a_device() -> None:
    """Timesteps and labels made on the CPU, which a data-sheet estimate needs elsewhere."""

    def body(net: Net, h: torch.Tensor) -> torch.Tensor:
        return torch.cat([h[:, :7] * torch.arange(7.0), torch.zeros(len(h), 1)], 1)

    graphs = [capture(Net(body).to(device), batch(4)).graph for device in ("cpu", "meta")]
    here, meta = ([op.name for op in graph.ops] for graph in graphs)
    assert here == meta


class MeanOf(nn.Module):
    """The mean of another module's output is the loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x).mean()


# The module is the user's


def test_module_is_left_as_it_was() -> None:
    """Modes, buffers and gradients are untouched, and a frozen normalisation stays frozen."""
    module = Net(lambda net, h: net.late(net.norm(h)))
    module.norm, module.late = nn.BatchNorm1d(8).eval(), nn.BatchNorm1d(8)
    captured = capture(module, batch())
    assert module.training
    assert not module.norm.training
    assert module.norm.num_batches_tracked == module.late.num_batches_tracked == 0
    assert all(p.grad is None for p in module.parameters())
    run_stages(split(captured, one_stage(captured)), batch())
    assert module.norm.num_batches_tracked == 0
    assert module.late.num_batches_tracked == 1


# Evaluation


def test_evaluation_has_the_operators_of_training() -> None:
    """Running statistics instead of the batch's, idle dropout, the same parameters and stages."""
    module = Net(lambda net, h: net.drop(net.norm(net.more(h))))
    module.norm, module.drop, module.more = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8)
    captured = capture(module, batch(), granularity="operator")
    evaluation = captured.evaluation()
    assert not evaluation.training
    assert module.training
    assert [op.name for op in evaluation.graph.ops] == [op.name for op in captured.graph.ops]
    assert not any(value.grad for value in evaluation.graph.values)
    dropout = [node for node in evaluation.programs.at(4).calls if "dropout" in str(node.target)]
    assert [node.args[1:] for node in dropout] == [(0.5, False)]
    module.norm.running_mean += 1
    loss, _ = run_stages(split(evaluation, stage_each(captured)), batch(3), backward=False)
    assert torch.equal(loss, module.eval()(*batch(3)).detach())
    assert module.norm.num_batches_tracked == 0


def test_operator_that_does_nothing_in_evaluation_disappears() -> None:
    """The others keep their names, so a training plan cuts the evaluation graph as well."""

    def body(net: Net, h: torch.Tensor) -> torch.Tensor:
        return net.noise(h) if net.training else h

    module = Net(body)
    module.noise = nn.Linear(8, 8)
    captured = capture(module, batch())
    evaluation = captured.evaluation()
    assert [op.name for op in captured.graph.ops] == ["first", "noise", "last"]
    assert [op.name for op in evaluation.graph.ops] == ["first", "last"]


class Adapter(nn.Linear):
    """A frozen layer and two small ones, merged for evaluation as loralib does."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight.requires_grad = False
        self.down, self.up = nn.Parameter(torch.ones(1, 8)), nn.Parameter(torch.ones(8, 1))
        self.merged = False

    def train(self, mode: bool = True) -> "Adapter":
        super().train(mode)
        if self.merged == mode:
            self.weight.data += self.up @ self.down * (-1 if mode else 1)
            self.merged = not mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = super().forward(x)
        return result if self.merged else result + x @ self.down.T @ self.up.T


def test_weights_are_not_merged_for_evaluation() -> None:
    """Steps change them later, and on other ranks they have no memory; the result is the same. What
    was merged before is no longer, so that training has gradients.
    """
    module = Net(lambda net, h: net.adapter(h))
    module.adapter = Adapter()
    before = module.adapter.weight.clone()
    captured = capture(module.eval(), batch())
    torch.testing.assert_close(module.train().adapter.weight, before)
    assert check_split(captured, batch(), one_stage(captured), exact=True) == 0.0
    before = module.adapter.weight.clone()
    evaluation = captured.evaluation()
    assert torch.equal(module.adapter.weight, before)
    assert not module.adapter.merged
    with torch.no_grad():
        module.adapter.up.mul_(2)
    loss, _ = run_stages(split(evaluation, stage_each(captured)), batch(3), backward=False)
    torch.testing.assert_close(loss, module.eval()(*batch(3)).detach())


class Folded(nn.Linear):
    """A layer that makes its weights once for evaluation, as equivariant convolutions do."""

    weights: torch.Tensor | None = None

    def train(self, mode: bool = True) -> "Folded":
        if self.training and not mode:
            self.weights = torch.zeros_like(self.weight).add_(self.weight.detach())
        self.weights = None if mode else self.weights
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.weight if self.weights is None else self.weights
        return nn.functional.linear(x, weights, self.bias)


def test_weights_made_for_evaluation_have_the_values_of_the_parameters() -> None:
    """Training afterwards is by the parameters."""
    module = Net(lambda net, h: net.folded(h))
    module.folded = Folded(8, 8)
    loss, _ = run_stages(
        split(capture(module, batch()).evaluation(), [["first", "folded", "last"]]),
        batch(3),
        backward=False,
    )
    assert module.folded.weights is None
    torch.testing.assert_close(loss, module.eval()(*batch(3)).detach())


def test_a_module_prepares_itself_for_an_evaluation_of_its_own() -> None:
    """And goes back, with the modes that its parts had."""
    module = nn.Sequential(Folded(8, 8), nn.BatchNorm1d(8).eval())
    with evaluated(module):
        weights = module[0].weights
    assert torch.equal(weights, module[0].weight)
    assert module[0].weights is None
    assert [part.training for part in module.modules()] == [True, True, False]


def test_parameters_without_memory_of_their_own_do_not_hinder_evaluation() -> None:
    """Sparse ones, and those whose sizes the first call tells."""
    module = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    module[1].table = nn.Parameter(torch.eye(2).to_sparse())
    with in_mode(module, training=False):
        assert not module[1].training
    assert module[1].training


def test_granularity_is_checked() -> None:
    """A wrong argument is a ValueError."""
    with pytest.raises(ValueError, match="'fine' is none of operator, layer, block"):
        capture(Net(), batch(), granularity="fine")  # type: ignore[arg-type]


def test_gradient_error_sees_a_wrong_gradient() -> None:
    """The yardstick of these tests is not blind: a missing use shows."""
    module = Net()
    _, want = eager(module, batch())
    (Net.forward(module, *batch()) * 2).backward()
    assert gradient_error(taken(module), want) == pytest.approx(1.0)
