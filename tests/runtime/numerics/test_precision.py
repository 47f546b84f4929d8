"""Mixed precision: equal to one process under autocast, and the scale to PyTorch's own scaler."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.errors import NonFiniteError
from anabranch.graph.capture import capture
from anabranch.runtime.compute.options import ComputeOptions, Precision
from anabranch.runtime.numerics.precision import LossScale
from anabranch.runtime.ranks.placement import fetched
from anabranch.runtime.reference import call, take
from anabranch.workload import Workload
from tests.runtime.small import Batch, Built, batch, built, plan, slices
from tests.runtime.threads import step, steps_of

HALF: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def alone(
    model: Built, leaves: Batch, parts: Sequence[tuple[int, int]], half: torch.dtype, scale: float
) -> tuple[float, dict[str, Tensor]]:
    """The plain loop under autocast, on the user's own module."""
    module = model.module
    module.zero_grad()
    loss = 0.0
    for start, stop in parts:
        weight = (stop - start) / len(leaves["x"])
        with torch.autocast("cpu", dtype=half):
            each = call(module, take(leaves, start, stop))["loss"]
        (each * weight * scale).backward()
        loss += each.item() * weight
    named = module.named_parameters()
    return loss, {n: p.grad.clone() for n, p in named if p.grad is not None}


class Mixed(nn.Module):
    """Operations that autocast runs in half precision, in full, and in the widest of their inputs;
    what torch.export takes apart (normalisation, attention) among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(3, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.gate, self.last, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        h = self.norm(self.conv(x))
        h = self.layer(h)
        h = h * torch.sigmoid(self.gate(h)) + F.softmax(h, -1)
        h = torch.einsum("nld,d->nld", h, self.scale) + torch.cumsum(h, 1)
        h = torch.cat([h, self.last(h)], 1).pow(2).mean(1)
        return F.cross_entropy(self.out(F.layer_norm(h, (8,))), label)


@cache
def mixed() -> Built:
    torch.manual_seed(0)
    module = Mixed()
    example = {"x": torch.randn(4, 3, 8), "label": torch.tensor([0, 1, 2, 0])}
    return Built(capture(module, example), Workload(module, example))


@pytest.mark.parametrize(
    ("name", "precision"), [("TwoBranch", "fp16"), ("TwoBranch", "bf16"), ("Norm", "bf16")]
)
def test_exact_gradients_are_bitwise_those_of_one_process(name: str, precision: Precision) -> None:
    """One replica per stage, in the same order: nothing may differ, messages included."""
    model = built(name)
    leaves = batch(16)
    before = {n: b.clone() for n, b in model.module.named_buffers()}
    scale = 2.0**16 if precision == "fp16" else 1.0
    options = ComputeOptions(precision=precision)
    loss, gradients = step(model, plan(model, 3), leaves, options, exact=True)
    for n, b in model.module.named_buffers():
        b.copy_(before[n])
    expected, reference = alone(model, leaves, slices(16, 4), HALF[precision], scale)
    for n, b in model.module.named_buffers():
        b.copy_(before[n])
    assert loss == expected
    assert gradients.keys() == reference.keys()
    assert all(torch.equal(gradients[key], reference[key]) for key in reference)


@pytest.mark.parametrize(("precision", "recompute"), [("bf16", False), ("fp16", True)])
def test_every_kind_of_operation_is_cast_as_in_one_process(
    precision: Precision, recompute: bool
) -> None:
    """A stage per operator, so that every value crosses in the type that it has."""
    model = mixed()
    generator = torch.Generator().manual_seed(3)
    leaves = {
        "x": torch.randn(8, 3, 8, generator=generator),
        "label": torch.randint(0, 3, (8,), generator=generator),
    }
    count = len(model.captured.graph)
    assert count >= 4
    chosen = plan(model, count, batch_size=8, recompute=recompute)
    options = ComputeOptions(precision=precision)
    loss, gradients = step(model, chosen, leaves, options, exact=True)
    scale = 2.0**16 if precision == "fp16" else 1.0
    expected, reference = alone(model, leaves, slices(8, 4), HALF[precision], scale)
    assert loss == expected
    assert all(torch.equal(gradients[key], reference[key]) for key in reference)


class Twice(nn.Module):
    """A value in full precision that two products of the next stage read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.first(x).float())
        return (self.left(h) * self.right(h)).mean()


def test_what_arrived_is_no_parameter() -> None:
    """Autocast casts a leaf once for all of its uses, and so adds their gradients in half
    precision; in one process the value is no leaf.
    """
    torch.manual_seed(0)
    module, leaves = Twice(), {"x": torch.randn(16, 8)}
    model = Built(capture(module, leaves, granularity="operator"), Workload(module, leaves))
    graph = model.captured.graph
    chosen = plan(model, 2)
    cut = next(i for i, op in enumerate(graph.ops) if op.name in ("left", "right"))
    first, second = chosen.stage_graph.stages
    names = [op.name for op in graph.ops]
    stages = (
        replace(first, operators=tuple(names[:cut])),
        replace(second, operators=tuple(names[cut:])),
    )
    chosen = replace(chosen, stage_graph=replace(chosen.stage_graph, stages=stages))
    for exact in (False, True):
        _, gradients = step(model, chosen, leaves, ComputeOptions(precision="bf16"), exact=exact)
        _, reference = alone(model, leaves, slices(16, 4), torch.bfloat16, 1.0)
        assert all(torch.equal(gradients[key], reference[key]) for key in reference)


@pytest.mark.parametrize("name", ["TwoBranch", "Shared", "Tied"])
def test_unequal_replicas_train_alike(name: str) -> None:
    """Up to what half precision rounds: sums of replicas are added in another order."""
    model = built(name)
    leaves = batch(11)
    chosen = plan(model, 2, batch_size=11, replicas=[2, 1], microbatch_size=[4, 3])
    loss, gradients = step(model, chosen, leaves, ComputeOptions(precision="bf16"))
    expected, reference = alone(model, leaves, [(0, 11)], torch.bfloat16, 1.0)
    assert loss == pytest.approx(expected, rel=1e-2)
    largest = max(float(g.abs().max()) for g in reference.values())
    for key, gradient in reference.items():
        torch.testing.assert_close(gradients[key], gradient, rtol=3e-2, atol=1e-2 * largest)


def test_values_cross_in_the_type_that_they_have() -> None:
    """Activations of products are half as wide on the wire; parameters stay as they are."""
    model = built("Chain")
    options = ComputeOptions(precision="bf16")
    worker = steps_of(model, plan(model, 2), options)[0].worker(16)
    sent = [a for a in worker.actions if not a.kind.is_compute]
    items = [item for action in sent for item in worker.layout.items(action)]
    assert {item.dtype for item in items} == {torch.bfloat16}
    assert len(items) == 8
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}


class Alone(nn.Module):
    """A product that the model keeps out of autocast, and one in a type of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.full, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            full = self.full(x).cos()
        with torch.autocast("cpu", dtype=torch.float16):
            other = self.other(x)
        return (self.first(full) * other).square().mean()


def test_what_the_model_keeps_out_of_autocast_stays_out() -> None:
    torch.manual_seed(0)
    module, leaves = Alone(), {"x": torch.randn(16, 8)}
    model = Built(capture(module, leaves), Workload(module, leaves))
    options = ComputeOptions(precision="bf16")
    _, gradients = step(model, plan(model, 3), leaves, options, exact=True)
    _, reference = alone(model, leaves, slices(16, 4), torch.bfloat16, 1.0)
    assert all(torch.equal(gradients[key], reference[key]) for key in reference)


def test_autocast_ends_with_the_stage() -> None:
    """The user's own code between steps is not under it."""
    model = built("Chain")
    step(model, plan(model, 1), batch(16), ComputeOptions(precision="bf16"))
    assert not torch.is_autocast_enabled("cpu")


def overflows(pattern: str) -> list[bool]:
    return [letter == "x" for letter in pattern]


def test_scale_follows_gradscaler() -> None:
    """The same steps, some of which overflow, seen by PyTorch's own scaler."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    ours = LossScale(interval=3)
    for overflow in overflows("x....x..x.......xx..x."):
        gradient = torch.tensor([3.0, float("inf") if overflow else -2.0])
        parameter.grad = gradient * theirs.get_scale()
        mine = parameter.grad.clone()
        theirs.scale(torch.zeros(()))
        theirs.step(optimizer)
        theirs.update()
        found = not all(fetched(ours.unscale([mine, None])))
        assert found is overflow
        if not overflow:
            assert mine.tolist() == [3.0, -2.0]
        ours.update(found)
        assert ours.scale == theirs.get_scale()
        assert ours.streak == theirs._get_growth_tracker()


def test_complex_gradients_are_unscaled() -> None:
    """Both parts of them, and both are looked at."""
    scale = LossScale(scale=2.0)
    gradient = torch.tensor([2 + 4j, 6j])
    assert all(fetched(scale.unscale([gradient, torch.ones(2)])))
    assert gradient.tolist() == [1 + 2j, 3j]
    assert not all(fetched(scale.unscale([torch.tensor([complex(0, float("inf"))])])))


def test_sparse_gradients_are_unscaled() -> None:
    gradient = torch.sparse_coo_tensor([[1, 3]], [2.0, 4.0], (5,), check_invariants=True)
    scale = LossScale(scale=2.0)
    assert all(fetched(scale.unscale([gradient])))
    assert gradient.to_dense().tolist() == [0.0, 1.0, 0.0, 2.0, 0.0]


def test_overflow_at_the_smallest_scale_is_an_error() -> None:
    """A scale that falls for ever would skip every step in silence."""
    scale = LossScale()
    for _ in range(32):
        scale.update(True)
    assert scale.scale == LossScale.LEAST
    with pytest.raises(NonFiniteError, match="scaled by"):
        scale.update(True)
