"""Traps of the tracer: what a forward may do, what is refused, and what the message says."""

import logging
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from anabranch.errors import CaptureError
from anabranch.graph.capture import capture
from anabranch.graph.cutting.split import split
from anabranch.graph.tracing.custom_functions import operator_of
from anabranch.graph.tracing.export import CaptureWarning
from anabranch.profile.estimate import estimate
from tests.graph.chain import check_split, eager, gradient_error, run_stages, taken
from tests.graph.nets import Net, Returns, batch, one_stage, stage_each


@pytest.mark.parametrize(
    ("make", "metrics"),
    [
        (lambda h: h.mean(), ()),
        (lambda h: {"loss": h.mean(), "top": h.max(), "logits": h}, ("top",)),
        (lambda h: SimpleNamespace(loss=h.mean(), size=h.norm(), count=3), ("size", "count")),
        (lambda h: {"hits": (h > 0).sum(), "loss": h.mean()}, ("hits",)),
        (lambda h: {"loss": h.mean(), "tag": "a", "none": None, "hits": [h.sum()]}, ()),
        (lambda h: (h.mean(), {"loss": 0, "top": h.max(), "logits": h}), ("top",)),
    ],
    ids=["tensor", "mapping", "object", "integer", "no numbers", "loss and mapping"],
)
def test_loss_and_metrics(make: Callable[[torch.Tensor], Any], metrics: tuple[str, ...]) -> None:
    """The loss is the tensor or the entry ``loss``; further scalars and numbers are metrics."""
    module = Returns(make)
    captured = capture(module, batch())
    loss, found = run_stages(split(captured, one_stage(captured)), batch())
    assert captured.metrics == metrics
    assert tuple(found) == metrics
    out = make(module.first(batch()[0]))
    out = out[0] if isinstance(out, tuple) else out
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
        (lambda h: {"loss": h.mean(), "top": np.float32(3)}, "returned top as numpy.float32; a"),
        (lambda h: {"loss": h.mean(), "top": h.max().item() ** 2}, r"metric top .*leave .item\(\)"),
    ],
    ids=["no scalar", "no loss", "nothing", "no float", "no gradient", "no number", "by a number"],
)
def test_refuses_what_is_no_loss(make: Callable[[torch.Tensor], Any], complaint: str) -> None:
    """The message says what was returned instead."""
    with pytest.raises(CaptureError, match=complaint):
        capture(Returns(make), batch())


def with_tanh_of_numpy(_: Net, h: torch.Tensor) -> torch.Tensor:
    return h * torch.from_numpy(np.tanh(h.detach().numpy()))


def with_sorted_rows(_: Net, h: torch.Tensor) -> torch.Tensor:
    return h * torch.from_numpy(np.apply_along_axis(sorted, 1, h.detach().numpy()))


def test_numpy_is_captured_where_torch_has_its_operations() -> None:
    """By the full analysis, as often as there are sample counts, and an estimate makes more."""
    captured = capture(Net(with_tanh_of_numpy), batch())
    assert estimate(captured, "v100", (1, 2)).samples == (1, 2)
    check_split(captured, batch(), stage_each(captured), exact=False)


def test_distributions_are_captured_without_the_check_of_their_arguments() -> None:
    """It looks at values only to raise, and is on again behind."""

    def likely(_: Net, h: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(h, 1 + h.square()).log_prob(h.detach())

    torch.distributions.Distribution.set_default_validate_args(True)  # torch.compile turns it off
    captured = capture(Net(likely), batch())
    check_split(captured, batch(), stage_each(captured), exact=False)
    with pytest.raises(ValueError, match="parameter scale"):
        torch.distributions.Normal(0.0, -torch.ones(1))


def test_a_result_of_any_size_is_refused_for_what_it_is() -> None:
    """With the operation, and not as a matter of this number of samples."""

    def aligned(_: Net, h: torch.Tensor) -> torch.Tensor:
        sizes = torch.full((len(h),), 2)
        loss = torch.ctc_loss(  # that of nn.functional is traced as an operator of ours
            h.log_softmax(-1).expand(4, *h.shape), sizes.new_ones(len(h), 2), sizes + 2, sizes
        )
        return h * loss

    with pytest.raises(
        CaptureError, match=r"test_export.py:\d+ .* calls .*ctc_loss.*, the size of"
    ):
        capture(Net(aligned), batch())


def test_what_pytorch_logs_of_a_trace_is_kept_to_ourselves() -> None:
    """Such as a traceback where shapes do not fit, which the error tells in one paragraph."""
    logger, heard = logging.getLogger("torch._subclasses.fake_tensor"), logging.Handler()
    records: list[logging.LogRecord] = []
    heard.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(heard)

    def unfit(_: Net, h: torch.Tensor) -> torch.Tensor:
        logger.error("failed while attempting to run meta")
        return h[::2] + h[1:]

    try:
        with pytest.raises(CaptureError, match=r"test_export.py:\d+ \(return h\[::2\]"):
            capture(Net(unfit), batch())
    finally:
        logger.removeHandler(heard)
    assert not [record for record in records if record.levelno >= logging.ERROR]


def test_other_numpy_names_the_line_and_a_way_on() -> None:
    """Not the number of samples, which has nothing to do with it."""
    with pytest.raises(CaptureError, match=r"test_export.py:\d+ .* computes with numpy.*the batch"):
        capture(Net(with_sorted_rows), batch())


class Tripled(torch.autograd.Function):
    """A backward that is not the derivative of the forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


triple = Tripled.apply


class Clipped(torch.autograd.Function):
    """Several arguments and results, and tensors that are kept for the backward."""

    @staticmethod
    def forward(
        x: torch.Tensor, bound: float, size: int, sides: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clamp(-bound, bound), x.view_as(x) * size + sides[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.saved_tensors[0] + grads[1], None, None, None


class Größe(Tripled):
    """A name that operators cannot have."""


class Kept(torch.autograd.Function):
    """Another result for whole numbers than for others."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, by: tuple[float, ...]) -> torch.Tensor:
        return x * (2 if isinstance(by[0], int) else 3)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def test_a_custom_gradient_is_kept() -> None:
    """As one operator, also where ``apply`` was bound before; the tracer would take the derivative
    of the forward. Afterwards functions work as before.
    """

    def body(_: Net, h: torch.Tensor) -> torch.Tensor:
        x, y = Clipped.apply(triple(h), 0.5, h.shape[1], (0, 1))  # type: ignore[no-untyped-call]
        z = Kept.apply(Kept.apply(Größe.apply(x + y), (1,)), (1.0,))  # type: ignore[no-untyped-call]
        return Tripled.apply(z)  # type: ignore[no-untyped-call, no-any-return]

    captured = capture(Net(body), batch())
    names = [name.removeprefix("autograd_function::") for name in captured.foreign]
    assert names == ["Tripled", "Clipped", "Gr__e", "Kept", "Kept_2"]
    assert check_split(captured, batch(), stage_each(captured), exact=True) == 0.0
    assert Tripled.apply(torch.ones(1)).item() == 2.0


class Scaled(Tripled):
    """A forward with a tuple of numbers."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, factors: tuple[float, ...]) -> torch.Tensor:
        return x * factors[0]


@pytest.mark.parametrize(("one", "other"), [(2, 2.0), (0.0, -0.0)])
def test_equal_numbers_that_compute_otherwise_have_operators_of_their_own(
    one: float, other: float
) -> None:
    """An integer times 2.0 is a float; 1 / -0.0 is negative."""
    for factor in (one, other):
        arguments = torch.arange(1, 3), (factor,)
        scaled = operator_of(Scaled, arguments, Scaled.apply)
        assert scaled is not None
        result, expected = 1 / scaled(*arguments), 1 / Scaled.apply(*arguments)
        assert torch.equal(result, expected)
        assert scaled(*arguments).dtype is Scaled.apply(*arguments).dtype


class Changed(Tripled):
    """A forward that writes to what it takes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *_: Any) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Read(Tripled):
    """A forward that reads values, as a kernel does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * float(x[0, 0])


class Noisy(Tripled):
    """A forward that draws random numbers."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    "body",
    [
        lambda _, h: Noisy.apply(h),
        lambda _, h: Changed.apply(h + 0),
        lambda _, h: Tripled.apply([h])[0],
        lambda _, h: Read.apply(h),
    ],
)
def test_a_custom_gradient_of_more_than_tensors_is_refused(body: Any) -> None:
    """The tracer would lose the backward silently; the error names class, file and line."""
    match = r"test_export.py:\d+ .*(Noisy|Changed|Tripled|Read).apply.*op with"
    with pytest.raises(CaptureError, match=match):
        capture(Net(body), batch())


def test_a_sparse_tensor_is_a_constant() -> None:
    """As the adjacency matrix of a graph is; a buffer would be saved and sent, and is refused."""
    module = Net(lambda net, h: h + torch.sparse.mm(net.near, net.nodes).sum())
    module.nodes, near = torch.nn.Parameter(torch.ones(3, 8)), torch.eye(3).to_sparse()
    module.near = near
    captured = capture(module, batch())
    assert check_split(captured, batch(), stage_each(captured), exact=True) == 0.0
    del module.near
    module.register_buffer("near", near)
    with pytest.raises(CaptureError, match=r"module.near is a sparse tensor.*del module.near"):
        capture(module, batch())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_sparse_tensor_that_no_trace_holds_is_refused_by_name() -> None:
    """In compressed rows, or in the batch, whose samples nobody could cut."""
    module = Net(lambda net, h: h)
    module.near = torch.eye(3).to_sparse_csr()
    with pytest.raises(CaptureError, match=r"module.near .*sparse_csr.* module.near = tensor.to_s"):
        capture(module, batch())
    with pytest.raises(CaptureError, match=r"x in the batch is a sparse tensor .*embedding_bag"):
        capture(module, {"x": torch.eye(4).to_sparse()})


def test_a_hook_on_a_gradient_is_refused() -> None:
    """The tracer would lose it silently, on a value as on a module; one on a parameter is called by
    a pipeline as well.
    """

    def body(net: Net, h: torch.Tensor) -> torch.Tensor:
        h.register_hook(lambda grad: grad * 3)  # type: ignore[no-untyped-call]
        return h

    hooked = Net(lambda _, h: h)
    hooked.first.register_full_backward_hook(lambda _, inputs, outputs: inputs)
    for module in (Net(body), hooked):
        with pytest.raises(CaptureError, match=r"\.py:\d+ .*hook on the gradient.*custom_op"):
            capture(module, batch())
    fine = Net(lambda _, h: h)
    fine.first.weight.register_hook(lambda grad: grad * 3)  # type: ignore[no-untyped-call]
    capture(fine, batch())


def test_custom_gradient_is_refused_where_only_analysis_can_trace() -> None:
    """NumPy inside the forward needs full analysis, which hides the function: numpy is named."""

    def body(net: Net, h: torch.Tensor) -> torch.Tensor:
        scale = torch.from_numpy(h.detach().numpy()).abs().max()
        return Tripled.apply(h) * scale

    with pytest.raises(CaptureError, match=r"computes with numpy"):
        capture(Net(body), batch())
    plain = lambda net, h: h * torch.from_numpy(h.detach().numpy()).abs().max()  # noqa: E731
    captured = capture(Net(plain), batch())
    assert check_split(captured, batch(3), stage_each(captured), exact=True) == 0.0


def test_custom_operators_keep_their_backwards() -> None:
    """What the error above recommends works; they are another library's, whatever their names."""
    names = [f"anabranch_test::{name}" for name in ("mm", "layer_norm", "embedding")]
    schema, operators = "(Tensor x) -> Tensor", []
    for name in names:
        tripled = torch.library.custom_op(name, lambda x: x * 2, mutates_args=(), schema=schema)
        tripled.register_fake(torch.empty_like)
        tripled.register_autograd(lambda ctx, grad: grad * 3)
        operators.append(tripled)
    first, second, third = operators
    captured = capture(Net(lambda _, h: third(second(first(h)))), batch())
    assert captured.foreign == tuple(names)
    assert check_split(captured, batch(), stage_each(captured), exact=True) == 0.0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_is_dropped_with_a_warning(reentrant: bool) -> None:
    """Gradients stay right, also in the reentrant form, whose gradients the tracer cuts off. It is
    said once, not again for an evaluation or for batches of other sizes.
    """
    module = Net(lambda net, h: checkpoint(lambda t: t.exp().tanh(), h, use_reentrant=reentrant))
    with pytest.warns(CaptureWarning, match=r"test_export.py:\d+ .*recompute"):
        captured = capture(module, batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured.evaluation().programs.at(2)
    assert check_split(captured, batch(), stage_each(captured), exact=True) == 0.0


class CheckpointFunction(torch.autograd.Function):
    """The copy of PyTorch's that diffusion models have: a number of inputs, then parameters."""

    @staticmethod
    def forward(ctx: Any, run: Any, length: int, *args: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.args, ctx.length = run, args, length
        return run(*args[:length])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [arg.detach().requires_grad_() for arg in ctx.args[: ctx.length]]
        with torch.enable_grad():
            out = ctx.run(*inputs)
        return None, None, *torch.autograd.grad(out, [*inputs, *ctx.args[ctx.length :]], grad)


def test_a_copy_of_checkpoint_is_dropped_with_a_warning() -> None:
    """As PyTorch's own is, and parameters in it have their gradients."""

    def body(net: Net, h: torch.Tensor) -> torch.Tensor:
        return CheckpointFunction.apply(net.inner, 1, h, *net.inner.parameters())

    module = Net(body)
    module.inner = torch.nn.Linear(8, 8)
    with pytest.warns(CaptureWarning, match=r"test_export.py:\d+ .*recompute"):
        captured = capture(module, batch())
    assert check_split(captured, batch(), stage_each(captured), exact=True) == 0.0


@pytest.mark.parametrize("arguments", [({}, ()), (2,)])
def test_another_custom_gradient_of_that_name_is_refused(arguments: tuple[Any, ...]) -> None:
    """What its arguments mean is not known: here options and names, or how often."""

    def body(net: Net, h: torch.Tensor) -> torch.Tensor:
        return CheckpointFunction.apply(torch.tanh, *arguments, h)

    with pytest.raises(CaptureError, match=r"calls CheckpointFunction\.apply, an"):
        capture(Net(body), batch())


def test_mask_that_is_computed_in_two_ways_is_told() -> None:
    """Each has a size of its own to the tracer, also where the same line has made it."""

    def body(net: Net, h: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(h[h[:, 0] > 0], h[~(h[:, 0] <= 0)])

    with pytest.raises(CaptureError, match="compute the mask once"):
        capture(Net(body), batch())


def test_an_operation_that_needs_sizes_names_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    """Padding does, which is found when a program is made; nothing else is printed."""

    def body(net: Net, h: torch.Tensor) -> torch.Tensor:
        return h + torch.nn.functional.pad(h[h[:, 0] > 0], (1, 0)).mean()

    with pytest.raises(CaptureError, match=r"nets.py:\d+ \(h = self.body.*sizes follow from"):
        capture(Net(body), batch())
    assert capfd.readouterr() == ("", "")


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
    assert f"test_export.py:{line} (if h.sum() > 0:)" in str(caught.value)
    assert "depends on the data" in str(caught.value)
    assert "torch.where" in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_parts_of_counted_sizes_name_another_way() -> None:
    """Masks, which are captured."""

    def body(_: Net, h: torch.Tensor) -> torch.Tensor:
        return torch.cat(h.split((h[:, 0] > 0).long().bincount().tolist()))

    def masked(net: Net, h: torch.Tensor) -> torch.Tensor:
        y, group = torch.zeros_like(h), (h[:, 0] > 0).long()
        for i in range(2):
            y[group == i] = (i + 1) * h[group == i]
        return y

    with pytest.raises(CaptureError, match=r"take parts by masks \(y\[group == i\] = layer"):
        capture(Net(body), batch())
    capture(Net(masked), batch())


def test_a_submodule_with_the_name_of_a_method_is_named() -> None:
    """Its call is one of the method, in plain torch too."""
    module = Net(lambda net, h: net.first(h))
    module.first.parameters = torch.nn.Linear(2, 2)
    with pytest.raises(CaptureError, match=r"submodule first.parameters has the name of a method"):
        capture(module, batch())


@pytest.mark.parametrize(
    ("example", "message"),
    [
        ({"y": batch()[1], "z": batch()[0]}, "x, y, the example has y, z: missing a .* 'x'"),
        ((*batch(), *batch()), "x, y, the example has 4 without names: too many positional"),
        (batch()[0], "x, y, the example has 1 without names: missing a required .* 'y'"),
    ],
    ids=["names", "positions", "one tensor"],
)
def test_an_example_is_compared_with_the_arguments_of_the_forward(
    example: Any, message: str
) -> None:
    """No line of the user's is at fault, and none of this package is named."""
    with pytest.raises(CaptureError, match=f"its forward takes {message}"):
        capture(Net(), example)


def test_a_forward_of_one_dict_is_told_how_to_get_it() -> None:
    """A dict is the names of arguments here, in a tuple it is an argument."""

    class Whole(torch.nn.Linear):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().forward(batch["x"]).square().mean()

    example = {"x": torch.randn(4, 3), "y": torch.randn(4)}
    with pytest.raises(CaptureError, match=r"argument: 'batch'; .* whole, yield \(batch,\)"):
        capture(Whole(3, 1), example)
    capture(Whole(3, 1), (example,))


def test_layers_that_are_left_out_at_random_are_told_with_their_option() -> None:
    """Which the line that chooses may not name."""

    def body(net: Net, h: torch.Tensor) -> torch.Tensor:
        return net.first(h) if torch.rand([]) < net.config.layerdrop else h

    module = Net(body)
    module.config = SimpleNamespace(layerdrop=0.1)
    with pytest.raises(CaptureError, match="layerdrop leaves out layers at random: set it to 0"):
        capture(module, batch())


def test_failing_forward_names_line_and_reason() -> None:
    """A plain bug in the model is reported as such."""
    with pytest.raises(CaptureError, match=r"test_export.py:\d+ .*raised RuntimeError: .*shape"):
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


def kept(net: Net, h: torch.Tensor) -> torch.Tensor:
    if len(getattr(net, "places", ())) != len(h):
        net.places = torch.arange(len(h), device=h.device)
    return h + net.places[:, None]


def test_what_a_forward_keeps_is_not_kept_from_a_trace() -> None:
    """It has no values there, and traces of other sizes would have other operations."""
    module = Net(kept)
    captured = capture(module, batch(4))
    assert captured.programs.at(3).signature() == captured.programs.at(4).signature()
    assert not hasattr(module, "places")


def test_a_batch_that_is_changed_in_place_is_copied_first() -> None:
    """Stages read the same batch, so which of them found it changed would depend on the plan."""

    class Changes(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x[x > 1] = 0
            x.view(-1).mul_(2)
            return super().forward(x, y.clamp_(0, 1))

    module, own = Changes(), batch()
    captured = capture(module, own)
    assert torch.equal(own[0], batch()[0])
    want_loss, want = eager(module, batch())
    loss, _ = run_stages(split(captured, stage_each(captured), exact=True), own)
    assert torch.equal(loss, want_loss)
    assert gradient_error(taken(module), want) == 0.0
    assert torch.equal(own[0], batch()[0])


def mapped(net: Net, h: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.tanh)(h)


def mapped_gradient(net: Net, h: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda t: t.exp().sum())(h)


def backwards(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.last(h).sum().backward(retain_graph=True)
    return h


def packed(net: Net, h: torch.Tensor) -> torch.Tensor:
    return pack_padded_sequence(h[:, None], torch.ones(len(h)), batch_first=True).data


def projected(net: Net, h: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return h @ torch.randn(h.shape[-1], h.shape[-1])


def seeded_by_its_module(net: Net, h: torch.Tensor) -> torch.Tensor:
    torch.random.manual_seed(0)
    return h + torch.rand_like(h)


def frozen_inside(net: Net, h: torch.Tensor) -> torch.Tensor:
    net.last.requires_grad_(False)
    return h


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (frozen_inside, "freezes or thaws parameters"),
        (packed, "packs sequences"),
        (projected, "seeds random numbers"),
        (seeded_by_its_module, "seeds random numbers"),
        (mapped, "torch.vmap or torch.func.*einsum"),
        (mapped_gradient, "torch.vmap or torch.func"),
        (backwards, "asks for a gradient inside the forward .*a penalty without a gradient"),
    ],
)
def test_transforms_derivatives_and_seeds_inside_the_forward_are_refused(
    body: Any, complaint: str
) -> None:
    """With the user's line and a way on instead of the tracer's own words; afterwards both work."""
    line = body.__code__.co_firstlineno + 1
    with pytest.raises(CaptureError, match=rf"^\S*test_export.py:{line} \(.*{complaint}"):
        capture(Net(body), batch())
    weight = torch.ones(3, requires_grad=True)
    assert torch.autograd.grad(torch.vmap(torch.exp)(weight).sum(), weight)[0].shape == (3,)
