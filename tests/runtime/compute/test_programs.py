"""Stages that are compiled, and programs by the ordinary bindings of their operators."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from anabranch.errors import TrainingError
from anabranch.graph.capture import capture
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
from anabranch.runtime.compute.programs import BINDINGS, fast_call
from anabranch.workload import Workload
from tests.runtime.small import Built, batch, built, plan
from tests.runtime.threads import step, steps_of

AOT = ComputeOptions(compile="aot_eager")


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Compiled code of one test must not count against the limits of the next."""
    torch._dynamo.reset()


def same(a: tuple[float, dict[str, Tensor]], b: tuple[float, dict[str, Tensor]]) -> None:
    assert a[0] == pytest.approx(b[0], rel=1e-6)
    assert a[1].keys() == b[1].keys()
    for name, gradient in b[1].items():
        torch.testing.assert_close(a[1][name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "samples", "exact"), [("TwoBranch", 6, True), ("Shared", 8, False)]
)
def test_compiled_stages_compute_the_same(name: str, samples: int, exact: bool) -> None:
    """Two stages, and a short last micro-batch, which is compiled for itself. Exact fan-outs of
    gradients are functions with a backward of their own.
    """
    model = built(name)
    chosen, leaves = plan(model, 2, batch_size=samples), batch(samples)
    compiled = step(model, chosen, leaves, AOT, exact=exact)
    same(compiled, step(model, chosen, leaves, exact=exact))


class Short(nn.Module):
    """One layer and a loss, with few kernels: a compiler takes seconds for each."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.head(x).sum()


def test_the_default_backend_generates_code() -> None:
    """Inductor, on one small stage; that it tries no instructions, starts no pool and compiles no
    headers ahead saves most of the time.
    """
    leaves = {name: leaf for name, leaf in batch(4).items() if name != "word"}
    model = Built(capture(module := Short(), leaves), Workload(module, leaves))
    chosen = plan(model, 1, batch_size=4)
    quick = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False, "compile_threads": 1}
    with torch._inductor.config.patch(quick):
        compiled = step(model, chosen, leaves, ComputeOptions(compile=True))
    same(compiled, step(model, chosen, leaves))


class Followed(nn.Module):
    """Gradients go through a buffer that the forward assigns, and a frozen layer that it moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.teacher = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        h = self.body(x).tanh() * self.mean
        self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(0)
        with torch.no_grad():
            self.teacher.weight.lerp_(self.body.weight, 0.5)
        return nn.functional.cross_entropy(self.head(h), label) + (h - self.teacher(x)).abs().mean()


def test_state_that_the_forward_changes_is_not_read_again() -> None:
    """Backwards of torch.compile read it when it has changed; recordings leave it as it was; exact
    order is found without a backward in advance.
    """
    leaves = {name: leaf for name, leaf in batch(8).items() if name != "word"}
    module = Followed()
    model = Built(capture(module, leaves), Workload(module, leaves))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    chosen, results = plan(model, 2, batch_size=8), []
    replayed = ComputeOptions(compile="cudagraphs")
    for options, exact in ((PLAIN, False), (PLAIN, True), (AOT, False), (replayed, False)):
        loss, gradients = step(model, chosen, leaves, options, exact=exact)
        after = {name: value.clone() for name, value in module.state_dict().items()}
        results.append((loss, gradients | {f"state {name}": t for name, t in after.items()}))
        same(results[-1], results[0])
        module.load_state_dict(before)


def test_compiled_stages_keep_running_means() -> None:
    """Buffers change once per micro-batch, also with recomputation."""
    model = built("Norm")
    before = {n: b.clone() for n, b in model.module.named_buffers()}
    after = []
    for options in (PLAIN, AOT):
        step(model, plan(model, 2, recompute=True), batch(16), options)
        after.append({n: b.clone() for n, b in model.module.named_buffers()})
        for name, buffer in model.module.named_buffers():
            buffer.copy_(before[name])
    for name, buffer in after[0].items():
        torch.testing.assert_close(after[1][name], buffer)


@pytest.mark.parametrize(
    ("dropout", "precision", "compiled"),
    [
        ("stage", "bf16", False),
        ("sample", "bf16", False),
        ("stage", "fp32", "aot_eager"),
        ("sample", "bf16", "aot_eager"),
    ],
)
def test_recomputation_draws_what_the_forward_drew(
    dropout: str, precision: str, compiled: bool | str
) -> None:
    """With autocast, compiled, or both: bitwise what is computed without recomputation."""
    model = built("Dropout")
    options = ComputeOptions(precision=precision, compile=compiled, dropout=dropout)  # type: ignore[arg-type]
    leaves = batch(16)
    kept, again = (
        step(model, plan(model, 1, recompute=recompute), leaves, options)
        for recompute in (False, True)
    )
    assert kept[0] == again[0]
    assert all(torch.equal(again[1][name], gradient) for name, gradient in kept[1].items())


def test_masks_by_sample_are_the_same_compiled() -> None:
    """Another plan, and compiled: still the same numbers."""
    model = built("Dropout")
    leaves = batch(6)
    whole = plan(model, 1, batch_size=6, microbatch_size=6)
    parts = plan(model, 2, batch_size=6, microbatch_size=[3, 2])
    compiled = ComputeOptions(compile="aot_eager", dropout="sample")
    same(
        step(model, parts, leaves, compiled),
        step(model, whole, leaves, ComputeOptions(dropout="sample")),
    )


def test_many_sizes_do_not_run_into_limits() -> None:
    """Each size is a program of its own; nothing falls back to uncompiled code in silence."""
    model = built("Chain")
    counters = torch._dynamo.utils.counters
    counters.clear()
    with torch._dynamo.config.patch(recompile_limit=1):
        for size in (1, 2):
            chosen, leaves = plan(model, 1, batch_size=size, microbatch_size=size), batch(size)
            same(step(model, chosen, leaves, AOT), step(model, chosen, leaves))
    assert not counters["graph_break"]


def test_a_stage_that_does_not_compile_is_named() -> None:
    """With the backend, the cause, and what to do."""

    @torch._dynamo.register_backend(name="anabranch_refuses")  # type: ignore[misc, no-untyped-call]
    def refuses(graph: object, inputs: object) -> None:
        raise RuntimeError("no code today")

    model = built("Chain")
    [steps] = steps_of(model, plan(model, 1), ComputeOptions(compile="anabranch_refuses"))
    with pytest.raises(TrainingError) as caught:
        steps.worker(16).run(batch(16), 0)
    text = str(caught.value)
    assert all(words in text for words in ("stage 0", "anabranch_refuses", "no code today"))


def test_options_are_checked() -> None:
    """The message has what is known."""
    for options in ({"precision": "fp8"}, {"dropout": "token"}, {"compile": "inducktor"}):
        with pytest.raises(ValueError, match=next(iter(options.values()))):
            ComputeOptions(**options)  # type: ignore[arg-type]
    assert ComputeOptions(compile=True).backend == "inductor"
    assert PLAIN.backend is None


# Bindings of operators

aten = torch.ops.aten


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


IDS = torch.tensor([[1, 0, 3]])
ARGUMENTS: dict[Any, list[tuple[Any, ...]]] = {
    aten.linear.default: [(x(2, 3), x(4, 3), x(4)), (x(2, 3), x(4, 3), None)],
    aten.addmm.default: [(x(4), x(2, 3), x(3, 4))],
    aten.mm.default: [(x(2, 3), x(3, 4))],
    aten.bmm.default: [(x(2, 2, 3), x(2, 3, 4))],
    aten.matmul.default: [(x(2, 3), x(3, 4))],
    aten.conv2d.default: [
        (x(1, 2, 5, 5), x(4, 1, 3, 3), x(4), [2, 1], [1, 0], [1, 1], 2),
        (x(1, 2, 5, 5), x(4, 2, 3, 3)),
    ],
    aten.layer_norm.default: [(x(2, 3), [3], x(3), x(3), 1e-3, False), (x(2, 3), [3])],
    aten.batch_norm.default: [(x(4, 3), x(3), x(3), x(3), x(3) ** 2, False, 0.2, 1e-3, False)],
    aten.embedding.default: [(x(5, 2), IDS, 3, True, False), (x(5, 2), IDS)],
    aten.scaled_dot_product_attention.default: [
        (x(1, 2, 3, 4), x(1, 2, 3, 4), x(1, 2, 3, 4), None, 0.0, True),
        (x(1, 2, 3, 4), x(1, 2, 3, 4), x(1, 2, 3, 4)),
    ],
    aten.add.Tensor: [(x(2, 3), x(3))],
    aten.sub.Tensor: [(x(2, 3), x(3))],
    aten.mul.Tensor: [(x(2, 3), x(3))],
    aten.div.Tensor: [(x(2, 3), x(3))],
    aten.relu.default: [(x(3),)],
    aten.gelu.default: [(x(3),)],
    aten.silu.default: [(x(3),)],
    aten.tanh.default: [(x(3),)],
    aten.sigmoid.default: [(x(3),)],
    aten.softmax.int: [(x(2, 3), -1)],
    aten.dropout.default: [(x(2, 3), 0.5, True), (x(2, 3), 0.5, False)],
    aten.cat.default: [([x(2, 3), x(4, 3)], 0), ([x(2, 3)],)],
    aten.transpose.int: [(x(2, 3), 0, -1)],
    aten.permute.default: [(x(2, 3, 4), [2, 0, 1])],
    aten.unsqueeze.default: [(x(2, 3), 1)],
    aten.flatten.using_ints: [(x(2, 3, 4), 1), (x(2, 3, 4), 0, 1)],
    aten.reshape.default: [(x(2, 3), [3, -1])],
    aten.view.default: [(x(2, 3), [3, 2])],
    aten.select.int: [(x(2, 3), 1, 2)],
}


@pytest.mark.parametrize("operator", BINDINGS, ids=str)
def test_a_binding_computes_what_the_operator_does(operator: Any) -> None:
    """Bit for bit, and so do the gradients."""
    for given in ARGUMENTS[operator]:
        results = []
        for call in (operator, BINDINGS[operator][0]):

            def leaf(value: Any) -> Any:
                is_float = isinstance(value, Tensor) and value.is_floating_point()
                return value.clone().requires_grad_() if is_float else value

            arguments = tree_map(leaf, given)
            torch.manual_seed(0)
            if operator is aten.batch_norm.default:
                arguments = (*arguments[:3], *(t.detach() for t in arguments[3:5]), *arguments[5:])
            result = call(*arguments)
            result.square().sum().backward()
            found: list[Tensor] = [result.detach()]
            tree_map(
                lambda a, found=found: (
                    found.append(a.grad) if isinstance(a, Tensor) and a.grad is not None else None
                ),
                arguments,
            )
            results.append(found)
        first, second = results
        assert len(first) == len(second) > 1
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Small(nn.Module):
    """Parameters and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.GELU())
        self.register_buffer("shift", torch.ones(4))


def graph_of(module: Small) -> fx.GraphModule:
    """A graph with a number as an operand, a view, and an argument by another place."""
    graph = fx.Graph()
    value = graph.placeholder("value")
    names = ("inner.0.weight", "inner.0.bias", "shift")
    weight, bias, shift = (graph.get_attr(name) for name in names)
    linear = graph.call_function(aten.linear.default, (value, weight, bias))
    twice = graph.call_function(aten.mul.Tensor, (linear, 2))
    shifted = graph.call_function(aten.add.Tensor, (twice, shift))
    viewed = graph.call_function(aten.view.default, (shifted, [4, 2]))
    half = graph.call_function(aten.softmax.int, (viewed, 0, torch.float64))
    graph.output((half, viewed))
    return fx.GraphModule(module, graph)


def test_a_program_reads_its_parameters_anew_at_every_call() -> None:
    """Versions of weights point them at other memory, and a user may give a module others."""
    module = Small()
    graph = graph_of(module)
    call = fast_call(graph)
    for _ in range(2):
        for mine, theirs in zip(call(x(2, 3)), graph(x(2, 3)), strict=True):
            assert torch.equal(mine, theirs)
        graph.inner.get_submodule("0").weight.data = torch.randn(4, 3)
    graph.inner.get_submodule("0").bias = nn.Parameter(torch.randn(4))
    for mine, theirs in zip(call(x(2, 3)), graph(x(2, 3)), strict=True):
        assert torch.equal(mine, theirs)
