"""Both halves of a backward give the gradients of a whole one, bit by bit, and no more work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import anabranch
from anabranch.graph.split import StageProgram, split
from anabranch.runtime.compute.split_backward import DeferredWeights, with_deferred_weights

SAMPLES, MICROBATCHES = 4, 3


class Model(nn.Module):
    """A first layer, and behind it calls of all kinds that read weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(8)
        self.table = nn.Embedding(5, 16)
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.matrix = nn.Parameter(torch.randn(8, 32))
        self.twice = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) + self.table(token)
        h = self.conv(h.unsqueeze(1)).flatten(1)
        h = self.norm(h @ self.matrix.t())
        h = self.twice(torch.tanh(self.twice(h)))
        return self.last(torch.relu(self.frozen(h))).square().mean()


class Counter(TorchDispatchMode):
    """Counts matrix products; the halves of a convolution are one kernel each."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def program() -> StageProgram:
    """The second of two stages, behind the first layer."""
    torch.manual_seed(0)
    example = {"x": torch.randn(SAMPLES, 8), "token": torch.arange(SAMPLES)}
    captured = anabranch.capture(Model(), example)
    names = [op.name for op in captured.graph.ops]
    return split(captured, [names[:1], names[1:]]).program(1, SAMPLES)


def run(program: StageProgram, *, halves: bool, late: bool = False) -> dict[str, Tensor]:
    """Gradients of inputs and parameters of a few micro-batches.

    Args:
        late: all second halves come at the end.
    """
    module: fx.GraphModule = program.module
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    draw = torch.Generator().manual_seed(1)
    gradients, waiting = {}, []
    for number in range(MICROBATCHES):
        leaf = torch.randn(SAMPLES, 16, generator=draw).relu().requires_grad_()
        token = torch.randint(0, 5, (SAMPLES,), generator=draw)
        deferred = DeferredWeights()
        call, deferring = with_deferred_weights(module, len(program.inputs), deferred)
        (loss,) = (call if halves else module)(leaf, token)
        if halves:
            now = [p for p in parameters.values() if p not in deferring and p.requires_grad]
            deferred.input_gradients([loss], [torch.ones_like(loss)], [leaf, *now])
            waiting.append(deferred)
            while waiting and not late:
                waiting.pop(0).weight_gradients()
        else:
            loss.backward()
        gradients[f"input {number}"] = leaf.grad
    for deferred in waiting:
        deferred.weight_gradients()
    return gradients | {n: p.grad for n, p in parameters.items() if p.grad is not None}


@pytest.mark.parametrize("late", [False, True])
def test_halves_are_bitwise_the_whole(program, late):
    """At once and late: weights, biases, norms, tables, matrices, a layer that is called twice."""
    whole = run(program, halves=False)
    halves = run(program, halves=True, late=late)
    assert whole.keys() == halves.keys()
    assert {"table.weight", "twice.weight", "norm.bias"} < whole.keys()
    assert all(torch.equal(whole[name], halves[name]) for name in whole)


def test_no_product_is_computed_twice(program):
    """The first half leaves out the products for weights, the second those for inputs."""
    counts = []
    for halves in (False, True):
        with Counter() as counter:
            run(program, halves=halves)
        counts.append(counter.products)
    assert counts[0] == counts[1]


def test_weights_that_can_wait(program):
    """Those that one call behind the inputs reads alone: not a layer that is called twice, whose
    uses autograd adds up, nor a table, which is not behind the inputs.
    """
    _, waiting = with_deferred_weights(program.module, len(program.inputs), DeferredWeights())
    names = [name for name, p in program.module.named_parameters() if p in waiting]
    assert sorted(names) == [
        "conv.bias", "conv.weight", "frozen.bias", "frozen.weight", "last.weight", "matrix",
        "norm.bias", "norm.weight",
    ]  # fmt: skip


def test_the_first_half_leaves_weights_alone(program):
    """What waits has no gradient until the second half."""
    deferred = DeferredWeights()
    call, waiting = with_deferred_weights(program.module, len(program.inputs), deferred)
    for parameter in program.module.parameters():
        parameter.grad = None
    leaf = torch.randn(SAMPLES, 16, requires_grad=True)
    (loss,) = call(leaf, torch.arange(SAMPLES))
    deferred.input_gradients([loss], [torch.ones_like(loss)], [leaf])
    assert leaf.grad is not None
    assert all(parameter.grad is None for parameter in waiting)
    deferred.weight_gradients()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in waiting)
