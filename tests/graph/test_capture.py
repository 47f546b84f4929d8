"""From a module that returns its loss to a graph of operators, and every trap on the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from anabranch.errors import CaptureError
from anabranch.graph.capture import Captured, capture
from anabranch.graph.export import CaptureWarning
from anabranch.graph.flat_program import FlatProgram
from anabranch.graph.opgraph import BATCH
from anabranch.graph.split import split
from tests.graph.chain import check_split, eager, gradient_error, run_stages, taken


class Net(nn.Module):
    """Linear, tanh, linear, mean squared error; ``body`` is what a test puts in between."""

    def __init__(self, body: Callable[[Net, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(6, 8)
            self.last = nn.Linear(8, 1)
        self.body = body or (lambda _, h: h)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.body(self, torch.tanh(self.first(x)))
        return F.mse_loss(self.last(h).squeeze(1), y)


def batch(samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 6, generator=generator), torch.randn(samples, generator=generator)


def one_stage(captured: Captured) -> list[list[str]]:
    return [[op.name for op in captured.graph.ops]]


def stage_each(captured: Captured) -> list[list[str]]:
    return [[op.name] for op in captured.graph.ops]


def values_of(program: FlatProgram) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves([node.meta["val"] for node in program.calls])


def devices_of(program: FlatProgram) -> set[torch.device]:
    """The devices that stand in the program as constants."""
    given = [(node.args, node.kwargs) for node in program.calls]
    leaves = torch.utils._pytree.tree_leaves(given)
    return {leaf for leaf in leaves if isinstance(leaf, torch.device)}


class Returns(nn.Module):
    """Returns whatever a function makes of the predictions."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.first = nn.Linear(6, 2)
        self.make = make

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.make(self.first(x))


# What a module may return


@pytest.mark.parametrize(
    ("make", "metrics"),
    [
        (lambda h: h.mean(), ()),
        (lambda h: {"loss": h.mean(), "top": h.max(), "logits": h}, ("top",)),
        (lambda h: SimpleNamespace(loss=h.mean(), size=h.norm(), count=3), ("size",)),
        (lambda h: {"hits": (h > 0).sum(), "loss": h.mean()}, ()),
    ],
    ids=["tensor", "mapping", "object", "integer is no metric"],
)
def test_loss_and_metrics(make: Callable[[torch.Tensor], Any], metrics: tuple[str, ...]) -> None:
    """The loss is the tensor or the entry ``loss``; further scalar floats are metrics."""
    module = Returns(make)
    captured = capture(module, batch())
    loss, found = run_stages(split(captured, one_stage(captured)), batch())
    assert captured.metrics == metrics
    assert tuple(found) == metrics
    out = make(module.first(batch()[0]))
    expected = out if isinstance(out, torch.Tensor) else dict(getattr(out, "__dict__", out))["loss"]
    assert torch.equal(loss, expected)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda h: h, r"shape \(samples, 2\)"),
        (lambda h: {"logits": h}, "returned no loss, but logits"),
        (lambda h: None, "returned no loss, but NoneType"),
        (lambda h: h.argmax(), "int64"),
        (lambda h: h.detach().mean(), "does not depend on any parameter"),
    ],
    ids=["not a scalar", "no loss", "nothing", "not a float", "no gradient"],
)
def test_refuses_what_is_no_loss(make: Callable[[torch.Tensor], Any], complaint: str) -> None:
    """The message says what was returned instead."""
    with pytest.raises(CaptureError, match=complaint):
        capture(Returns(make), batch())


# What a batch may be


class Anything(nn.Module):
    """Takes any batch and averages what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        total = sum(leaf.float().mean() for leaf in leaves if isinstance(leaf, torch.Tensor))
        scale = 2.0 if kwargs.get("double") else 1.0
        return self.weight * total * scale


@pytest.mark.parametrize(
    ("example", "names"),
    [
        (torch.ones(4, 2), ["batch"]),
        ((torch.ones(4), torch.ones(4, 2)), ["0", "1"]),
        ([torch.ones(4), [torch.ones(4, 2), None]], ["0", "1.0"]),
        ({"b": torch.ones(4), "a": {"x": torch.ones(4, 3)}, "double": True}, ["b", "a.x"]),
        (({"ids": torch.ones(4)}, torch.ones(4)), ["0.ids", "1"]),
    ],
    ids=["tensor", "tuple", "nested list", "dict", "dict in a tuple"],
)
def test_batches(example: Any, names: list[str]) -> None:
    """Leaves are named by their place; what is no tensor is a constant of the program."""
    module = Anything()
    captured = capture(module, example)
    from_batch = [v for v in captured.graph.values if v.producer == BATCH]
    assert [v.name for v in from_batch] == names == list(captured.flatten_batch(example))
    args, kwargs = ((), example) if isinstance(example, dict) else (example, {})
    args = args if isinstance(args, tuple | list) else (args,)
    loss, _ = run_stages(split(captured, one_stage(captured)), example)
    assert torch.equal(loss, module(*args, **kwargs).detach())


def test_batch_values_have_bytes_per_sample() -> None:
    """Six floats of 4 bytes and a label of 4 bytes per sample, never with a gradient."""
    values = {v.name: v for v in capture(Net(), batch()).graph.values if v.producer == BATCH}
    assert (values["0"].nbytes, values["1"].nbytes) == (24, 4)
    assert not values["0"].grad
    assert values["0"].batched


@pytest.mark.parametrize(
    ("example", "complaint"),
    [
        ((torch.ones(4, 2), torch.ones(3)), r"0 \(4, 2\), 1 \(3,\)"),
        ((torch.ones(4), torch.tensor(1.0)), r"1 \(\)"),
        ((torch.ones(0, 2),), "no samples"),
        ((1, None), "holds no tensor"),
    ],
    ids=["other size", "scalar", "empty", "no tensor"],
)
def test_refuses_batches_without_common_samples(example: Any, complaint: str) -> None:
    """The message lists the shapes."""
    with pytest.raises(CaptureError, match=complaint):
        capture(Anything(), example)


def test_batch_of_another_form_is_refused() -> None:
    """Later batches have to be built like the example."""
    captured = capture(Anything(), (torch.ones(4), torch.ones(4)))
    with pytest.raises(ValueError, match=r"example holds 0, 1: it lacks 1;"):
        captured.flatten_batch((torch.ones(4),))


# Any number of samples


@pytest.mark.parametrize("samples", [1, 2, 3, 9])
def test_programs_of_any_size_have_fixed_shapes_and_the_loss_of_the_module(samples: int) -> None:
    """No symbol is left, not even for one sample, which tracers treat as a size of its own."""
    module = Net(lambda _, h: h.view(h.shape[0], 2, 4).flatten(1))
    captured = capture(module, batch(4))
    program = captured.at(samples)
    assert all(type(n) is int for value in values_of(program) for n in value.shape)
    loss, _ = run_stages(split(captured, one_stage(captured)), batch(samples))
    assert torch.equal(loss, module(*batch(samples)).detach())
    assert captured.at(samples) is program


def test_example_of_one_sample_serves() -> None:
    """The example is repeated, so that the samples can be told from sizes of 1."""
    captured = capture(Net(), batch(1))
    assert captured.samples == 2
    assert all(value.batched for value in captured.graph.values)
    loss, _ = run_stages(split(captured, one_stage(captured)), batch(5))
    assert torch.equal(loss, Net()(*batch(5)).detach())


def test_model_that_refuses_a_symbolic_batch_is_exported_for_each_size() -> None:
    """``len`` and ``view(2, -1)`` need the number; even sizes work, odd ones are an error."""
    halves = lambda _, h: torch.cat(h.view(2, len(h) // 2, 8).unbind(0))  # noqa: E731
    captured = capture(Net(halves), batch(4))
    assert check_split(captured, batch(6), stage_each(captured), exact=True) == 0.0
    with pytest.raises(CaptureError, match=r"with 5 samples: .*test_capture.py:\d+ .*view"):
        captured.at(5)


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
        capture(Net(body), batch(4)).at(5)


def test_constructed_tensors_follow_the_device() -> None:
    """Devices are constants in an exported program; a program for another device has none left."""
    positions = lambda _, h: h + torch.arange(8, device=h.device) + torch.tensor(2.0)  # noqa: E731
    captured = capture(Net(positions), batch())
    program = captured.at(4, device="meta")
    assert {value.device.type for value in values_of(program)} == {"meta"}
    assert devices_of(program) == {torch.device("meta")}
    assert devices_of(captured.at(4)) == {torch.device("cpu")}


def test_meta_module_can_be_captured() -> None:
    """Published sizes are planned without memory for them."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(10**5, 10**5), nn.Linear(10**5, 1))
    captured = capture(MeanOf(module), torch.ones(2, 10**5))
    assert [op.name for op in captured.graph.ops] == ["module.0", "module.1"]
    assert captured.graph.parameter_bytes["module.0.weight"] == 4 * 10**10


class MeanOf(nn.Module):
    """The mean of another module's output is the loss."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x).mean()


# Silent traps of the tracer


class Tripled(torch.autograd.Function):
    """A backward that is not the derivative of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


def test_custom_gradient_is_refused() -> None:
    """The tracer would lose the backward silently; the error names class, file and line."""
    module = Net(lambda _, h: Tripled.apply(h))
    with pytest.raises(CaptureError, match=r"test_capture.py:\d+ .*Tripled.apply.*custom_op"):
        capture(module, batch())
    # Afterwards functions work as before.
    assert Tripled.apply(torch.ones(1)).item() == 2.0


def test_custom_gradient_is_refused_where_only_analysis_can_trace() -> None:
    """NumPy inside the forward needs full analysis, which hides the function from us."""

    def body(net: Net, h: torch.Tensor) -> torch.Tensor:
        scale = torch.from_numpy(h.detach().numpy()).abs().max()
        return Tripled.apply(h) * scale

    with pytest.raises(CaptureError, match=r"Tripled.apply"):
        capture(Net(body), batch())
    plain = lambda net, h: h * torch.from_numpy(h.detach().numpy()).abs().max()  # noqa: E731
    captured = capture(Net(plain), batch())
    assert check_split(captured, batch(3), stage_each(captured), exact=True) == 0.0


@torch.library.custom_op("anabranch_test::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


tripled.register_fake(lambda x: torch.empty_like(x))
tripled.register_autograd(lambda ctx, grad: grad * 3)


def test_custom_operator_keeps_its_backward() -> None:
    """What the error above recommends works."""
    captured = capture(Net(lambda _, h: tripled(h)), batch())
    assert check_split(captured, batch(), stage_each(captured), exact=True) == 0.0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_is_dropped_with_a_warning(reentrant: bool) -> None:
    """Gradients stay right, also in the reentrant form, whose gradients the tracer cuts off."""
    module = Net(lambda net, h: checkpoint(lambda t: t.exp().tanh(), h, use_reentrant=reentrant))
    with pytest.warns(CaptureWarning, match=r"test_capture.py:\d+ .*recompute"):
        captured = capture(module, batch())
    assert check_split(captured, batch(), stage_each(captured), exact=True) == 0.0


def test_data_dependent_branch_names_line_cause_and_remedy(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And nothing of the tracer's own output is seen."""

    def body(net: Net, h: torch.Tensor) -> torch.Tensor:
        if h.sum() > 0:
            h = h + 1
        return h

    with pytest.raises(CaptureError) as caught:
        capture(Net(body), batch())
    line = body.__code__.co_firstlineno + 1
    assert f"test_capture.py:{line} (if h.sum() > 0:)" in str(caught.value)
    assert "depends on the data" in str(caught.value)
    assert "torch.where" in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_failing_forward_names_line_and_reason() -> None:
    """A plain bug in the model is reported as such."""
    with pytest.raises(CaptureError, match=r"test_capture.py:\d+ .*raised RuntimeError: .*shape"):
        capture(Net(lambda _, h: h.view(3, 1000)), batch())


def test_assigned_buffer_is_updated() -> None:
    """``self.count = self.count + 1`` is forgotten by the tracer unless it is made a copy."""

    def body(net: Net, h: torch.Tensor) -> torch.Tensor:
        net.count = net.count + 1
        return h * net.count

    module = Net(body)
    module.register_buffer("count", torch.zeros(()))
    captured = capture(module, batch())
    assert module.count == 0
    assert check_split(captured, batch(), stage_each(captured), exact=True) == 0.0
    assert module.count == 1


@pytest.mark.parametrize(
    "body",
    [
        lambda net, h: h + _without_grad(h),
        lambda net, h: h + h.detach(),
        lambda net, h: h * torch.tensor([1.0, 2.0] * 4),
        lambda net, h: _autocast(h),
        lambda net, h: h * h[h[:, 0] > 0].mean(),
    ],
    ids=["no_grad", "detach", "literal", "autocast", "size from data"],
)
def test_regions_and_constants(body: Any) -> None:
    """Gradients are those of eager execution where parts of the forward run under another mode."""
    captured = capture(Net(body), batch(), granularity="operator")
    assert check_split(captured, batch(), stage_each(captured), exact=True) == 0.0


def _without_grad(h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return h.exp()


def _autocast(h: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = h @ h.new_ones(8, 8)
    return h.float()


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


def test_parameters_have_their_own_names() -> None:
    """A parameter under two names goes by its first; frozen and unused ones are marked."""
    module = Net(lambda net, h: net.again(h) @ net.tied.T)
    module.again = nn.Linear(8, 8)
    module.tied = module.again.weight
    module.idle = nn.Linear(2, 2)
    module.first.requires_grad_(False)
    captured = capture(module, batch())
    names = [p.name for p in captured.graph.parameters]
    assert names == ["tied", "first.weight", "first.bias", "last.weight", "last.bias", "again.bias"]
    assert [p.name for p in captured.graph.parameters if not p.trainable] == [
        "first.weight",
        "first.bias",
    ]
    assert captured.unused == ("idle.weight", "idle.bias")


def test_what_only_a_metric_reads_gets_no_gradient() -> None:
    """A parameter may be returned itself; a leaf of the batch may be read by nobody."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.probe = nn.Linear(6, 2), nn.Linear(2, 1)
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            h = self.first(x)
            return {"loss": h.mean(), "scale": self.scale, "probe": self.probe(h).mean()}

    captured = capture(Scaled(), batch())
    assert captured.unused == ("scale", "probe.weight", "probe.bias")
    idle = next(v for v in captured.graph.values if v.name == "1")
    assert idle.consumers == ()
    _, metrics = run_stages(split(captured, stage_each(captured)), batch())
    assert metrics["scale"] == 3.0


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
    dropout = [node for node in evaluation.at(4).calls if "dropout" in str(node.target)]
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


def test_granularity_is_checked() -> None:
    """A wrong argument is a ValueError."""
    with pytest.raises(ValueError, match="'fine' is none of operator, layer, block"):
        capture(Net(), batch(), granularity="fine")  # type: ignore[arg-type]


def test_warns_of_nothing_by_itself() -> None:
    """Deprecations inside the tracer are not the user's concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(Net(), batch())


def test_gradient_error_sees_a_wrong_gradient() -> None:
    """The yardstick of these tests is not blind: a missing use shows."""
    module = Net()
    _, want = eager(module, batch())
    (Net.forward(module, *batch()) * 2).backward()
    assert gradient_error(taken(module), want) == pytest.approx(1.0)
