"""Both halves of a backward give the gradients of a whole one, bit by bit, and no more work."""

import weakref

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import anabranch
from anabranch.graph.cutting.split import StageProgram, split
from anabranch.runtime.compute.split_backward import WeightNotes, with_notes
from anabranch.runtime.pipeline import Pipeline
from tests.runtime.small import Built, on_devices, plan

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
        self.groups = nn.GroupNorm(2, 4)
        self.rows = nn.Linear(4, 4)
        self.twice = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.cut, self.chosen = nn.Linear(8, 8), nn.Embedding(8, 8)
        self.last = nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor, token: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) + self.table(token)
        h = self.conv(h.unsqueeze(1)).flatten(1)
        h = self.norm(h @ self.matrix.t())
        last = h.view(-1, 4, 2, 1).to(memory_format=torch.channels_last)
        h = self.groups(last).flatten(
            1
        )  # its kernel ended the process when asked for weights alone
        rows = self.rows(h.view(-1, 2, 4))  # a view of a product
        rows += 1
        h = self.twice(torch.tanh(self.twice(rows.flatten(1))))
        h = h + self.cut(h.detach()) + self.chosen(h.argmax(1))
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
    noting, notes = noting_stage(program)
    parameters = dict(module.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    draw = torch.Generator().manual_seed(1)
    gradients, waiting = {}, []
    for number in range(MICROBATCHES):
        leaf = torch.randn(SAMPLES, 16, generator=draw).relu().requires_grad_()
        token = torch.randint(0, 5, (SAMPLES,), generator=draw)
        (loss,) = (noting if halves else module)(leaf, token)
        if halves:
            now = [p for p in parameters.values() if p.requires_grad and p not in notes.parameters]
            loss.backward(retain_graph=True, inputs=[leaf, *now])
            waiting += notes.take()
            while waiting and not late:
                waiting.pop(0).add_gradients()
        else:
            loss.backward()
        gradients[f"input {number}"] = leaf.grad
    for call in waiting:
        call.add_gradients()
    return gradients | {n: p.grad for n, p in parameters.items() if p.grad is not None}


def noting_stage(program: StageProgram) -> tuple[fx.GraphModule, WeightNotes]:
    """The stage with notes, and where these are."""
    first = program.module.graph.find_nodes(op="placeholder")[0]
    return with_notes(program.module, {first.name})


@pytest.mark.parametrize("late", [False, True])
def test_halves_are_bitwise_the_whole(program, late):
    """At once and late: weights, biases, norms, tables, matrices, a layer that is called twice, one
    whose result is changed in place, and what reads a detached value or an index.
    """
    whole = run(program, halves=False)
    halves = run(program, halves=True, late=late)
    assert whole.keys() == halves.keys()
    assert {"table.weight", "twice.weight", "norm.bias", "groups.bias", "cut.bias"} < whole.keys()
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
    uses autograd adds up, nor what no gradient of an input goes through.
    """
    _, notes = noting_stage(program)
    names = [name for name, p in program.module.named_parameters() if p in notes.parameters]
    assert sorted(names) == [
        "conv.bias", "conv.weight", "frozen.bias", "frozen.weight", "last.weight", "matrix",
        "norm.bias", "norm.weight", "rows.bias", "rows.weight",
    ]  # fmt: skip


def test_a_graph_ends_with_its_halves(program):
    """The hooks of its calls keep neither them nor what they have kept of the micro-batch."""
    noting, notes = noting_stage(program)
    leaf = torch.randn(SAMPLES, 16, requires_grad=True)
    (loss,) = noting(leaf, torch.arange(SAMPLES))
    loss.backward(retain_graph=True, inputs=[leaf])
    calls = notes.take()
    for call in calls:
        call.add_gradients()
    alive = [weakref.ref(call) for call in calls]
    del loss, calls, call
    assert alive
    assert not any(call() for call in alive)


def test_the_first_half_leaves_weights_alone(program):
    """What waits has no gradient until the second half."""
    noting, notes = noting_stage(program)
    for parameter in program.module.parameters():
        parameter.grad = None
    leaf = torch.randn(SAMPLES, 16, requires_grad=True)
    (loss,) = noting(leaf, torch.arange(SAMPLES))
    loss.backward(retain_graph=True, inputs=[leaf])
    assert leaf.grad is not None
    assert all(parameter.grad is None for parameter in notes.parameters)
    for call in notes.take():
        call.add_gradients()
    assert all((p.grad is not None) == p.requires_grad for p in notes.parameters)


class Counted(nn.Module):
    """A call that reads a weight and saves a buffer, which every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.count.add_(1.0)
        return torch.addcmul(h, self.weight, self.count).square().mean()


def test_a_recomputed_stage_puts_its_buffers_back_when_both_halves_are_done():
    """Gradients of weights are those of the buffers as they were in the recomputed forward."""
    torch.manual_seed(0)
    module, example = Counted(), {"x": torch.randn(4, 8)}
    captured = anabranch.capture(module, example, granularity="operator")
    model = Built(captured, anabranch.Workload(module, example))
    found = []
    for schedule in ("1f1b", "1f1b-split"):
        module.count.zero_()
        cut = on_devices(plan(model, 2, schedule=schedule, recompute=True), [(0,), (0,)])
        pipe = Pipeline(model.workload, cut, captured=model.captured, check_gradients=False)
        found.append(pipe.gradients({"x": torch.arange(128.0).view(16, 8) / 128})[1])
        pipe.close()
    whole, halves = found
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
