"""Stages that are compiled."""

import pytest
import torch
from torch import Tensor, nn

from anabranch.errors import TrainingError
from anabranch.graph.capture import capture
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
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


@pytest.mark.parametrize(("name", "exact"), [("TwoBranch", True), ("Shared", False)])
def test_compiled_stages_compute_the_same(name: str, exact: bool) -> None:
    """Several stages, and a short last micro-batch, which is compiled for itself. Exact fan-outs of
    gradients are functions with a backward of their own.
    """
    model = built(name)
    chosen, leaves = plan(model, 3, batch_size=10), batch(10)
    compiled = step(model, chosen, leaves, AOT, exact=exact)
    same(compiled, step(model, chosen, leaves, exact=exact))


class Short(nn.Module):
    """One layer and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return self.head(x).square().mean()


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
    leaves = batch(10)
    whole = plan(model, 1, batch_size=10, microbatch_size=10)
    parts = plan(model, 2, batch_size=10, microbatch_size=[4, 3])
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
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in (1, 2, 3):
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
