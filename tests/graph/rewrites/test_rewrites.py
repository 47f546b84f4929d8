"""Every rewrite has the loss and the gradients of the module as it was written."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.errors import CaptureError
from anabranch.graph.capture import Captured, capture
from anabranch.graph.cutting.split import split
from anabranch.graph.rewrites import REWRITES, Rewrite
from anabranch.graph.slices import view_named, whole_name
from anabranch.models import build
from anabranch.workload import Batch
from tests.captured_models import BUILT_IN

SAMPLES = 4


class Towers(nn.Module):
    """Branches of 3 and 5 features, an elementwise call behind the join, a product."""

    def __init__(self, join: Callable[..., nn.Module], act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 5)
        self.join, self.act = join(8, 4), act

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.a(x), self.b(x)], -1)
        return self.join(self.act(joined)).square().mean()


class Transposed(nn.Module):
    """A product that keeps its weight as GPT-2's Conv1D does."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Channels(nn.Module):
    """A convolution of concatenated channels, as of an inception block or a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2, 5, 1)
        self.join = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        images = x.reshape(-1, 2, 5, 5)
        return self.join(torch.cat([self.a(images), self.b(images)], 1)).square().mean()


class Attention(nn.Module):
    """Attention whose queries, keys and values are one product, as GPT-2 has it."""

    def __init__(self, heads: int = 4, width: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 3, 8)
        q, k, v = (
            t.view(x.shape[0], 3, self.heads, -1).transpose(1, 2)
            for t in self.qkv(x).split(8, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(x.shape[0], 3, 8)).square().mean()


class Gated(nn.Module):
    """The pair of products of Llama's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(6, 8), nn.Linear(6, 8)
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)).square().mean()


class Bags(nn.Module):
    """A table that is looked up by rows, and one by bags."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.bags = nn.Embedding(9, 4, padding_idx=2), nn.EmbeddingBag(9, 4, mode="sum")
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.rows(x).mean(1), self.bags(x)], -1)
        return self.out(joined).square().mean()


class Blocks(nn.Module):
    """Repeated layers, which ``granularity="layer"`` takes as one operator each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Block(nn.Module):
    """A layer with one pair of products."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(x)
        return out


def features(width: int) -> Tensor:
    return torch.randn(SAMPLES, width, dtype=torch.float64)


def rewritten(module: nn.Module, batch: Batch, *texts: str) -> Captured:
    """The capture of a module in double precision; its error must be rounding."""
    module.double()
    captured = capture(module, batch, rewrites=texts)
    stages = split(captured, [[op.name for op in captured.graph.ops]])
    program = stages.program(0, captured.programs.samples)
    tensors = captured.programs.with_statistics(captured.layout.flatten(batch))
    loss = program.module(*(tensors[name] for name in program.batch))[0]
    loss.backward()
    gradients = {name: p.grad for name, p in captured.parameters().items()}
    for parameter in module.parameters():
        parameter.grad = None
    result = module(**batch) if isinstance(batch, dict) else module(batch)
    expected = result["loss"] if isinstance(result, dict) else result
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    for name, gradient in gradients.items():
        whole = module.get_parameter(whole_name(name)).grad
        assert (gradient is None) == (whole is None)
        if gradient is not None and whole is not None:
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            torch.testing.assert_close(gradient, view_named(name, whole), rtol=1e-10, atol=1e-13)
    return captured


@pytest.mark.parametrize("join", [nn.Linear, Transposed])
@pytest.mark.parametrize("act", [F.relu, F.gelu, lambda x: x])
def test_a_join_becomes_a_sum_of_products(
    join: Callable[..., nn.Module], act: Callable[[Tensor], Tensor]
) -> None:
    """Also behind an elementwise call, and with the weight the other way round."""
    captured = rewritten(Towers(join, act), features(6), "join-split")
    dim = 0 if join is Transposed else 1
    assert {f"join.weight[{dim}:0:3]", f"join.weight[{dim}:3:8]"} <= captured.parameters().keys()
    assert "join.weight" not in captured.parameters()
    assert captured.graph.rewrites == ("join-split@join.weight",)


def test_concatenated_channels_become_a_sum_of_convolutions() -> None:
    """Of any size, as a sum over channels is a sum over branches."""
    captured = rewritten(Channels(), features(50), "join-split")
    assert {"join.weight[1:0:3]", "join.weight[1:3:8]"} <= captured.parameters().keys()


def test_heads_become_branches() -> None:
    """A fused product of queries, keys and values is cut in three places for each branch."""
    captured = rewritten(Attention(), features(24), "tensor-split")
    parts = [name for name in captured.parameters() if name.startswith("qkv.weight")]
    assert parts == [f"qkv.weight[0:{i}:{i + 4}]" for i in range(0, 24, 4)]


def test_gated_products_become_branches() -> None:
    """Both products in front have rows, the one behind has columns."""
    captured = rewritten(Gated(), features(6), "tensor-split=4")
    assert {"gate.weight[0:2:4]", "up.weight[0:2:4]", "down.weight[1:2:4]"} <= (
        captured.parameters().keys()
    )


@pytest.mark.parametrize("name", ["table-split", "table-row-split"])
def test_tables_become_several(name: str) -> None:
    """By columns both kinds of look-up, by rows the plain one; the padding keeps no gradient."""
    batch = torch.randint(9, (SAMPLES, 3))
    captured = rewritten(Bags(), batch, name)
    sites = captured.programs.exporter.rewrites[0].sites
    assert sites == (("rows.weight", "bags.weight") if name == "table-split" else ("rows.weight",))


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("candle-uno", "join-split"),
        ("dlrm", "table-split"),
        ("dlrm", "table-row-split"),
        ("dlrm", "tensor-split=4"),
        ("transformer", "tensor-split=4"),
    ],
)
def test_built_in_models_keep_their_gradients(model: str, text: str) -> None:
    """Every rewrite of one of them, and heads besides layers."""
    workload = build(model, preset="small", options=BUILT_IN[model] | {"layers": "1"})
    batch = torch.utils._pytree.tree_map(
        lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, workload.example
    )
    rewritten(workload.module, batch, text)


@pytest.mark.parametrize("text", ["join-split", "table-split"])
def test_a_model_without_joins_or_tables_is_refused(text: str) -> None:
    """With nothing to rewrite it would be what was written."""
    with pytest.raises(CaptureError, match="changes nothing"):
        capture(nn.Sequential(nn.Linear(6, 4), Mean()).double(), features(6), rewrites=[text])


def test_an_input_without_features_has_no_product() -> None:
    """As of a branch that is switched off."""

    class Off(Towers):
        def forward(self, x: Tensor) -> Tensor:
            joined = torch.cat([self.a(x), x[:, :0], self.b(x)], -1)
            return self.join(joined).square().mean()

    captured = rewritten(Off(nn.Linear, F.relu), features(6), "join-split")
    cut = [name for name in captured.parameters() if name.startswith("join.weight")]
    assert cut == ["join.weight[1:0:3]", "join.weight[1:3:8]"]


def test_sparse_gradients_are_compared_with_slices_of_the_whole_one() -> None:
    """They have no views."""
    module = nn.Sequential(nn.Embedding(6, 4, sparse=True), Mean()).double()
    rewritten(module, torch.tensor([[0, 1], [3, 3], [5, 0], [2, 2]]), "table-split")


class Mean(nn.Module):
    """The loss of what comes before it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def test_rewrites_follow_each_other() -> None:
    """What a join was cut into may be cut again."""
    rewritten(Towers(nn.Linear, F.relu), features(6), "join-split", "tensor-split=3")


def test_a_rewrite_is_undone_where_a_parameter_is_read_twice() -> None:
    """A whole and its slices would be two parameters."""

    class Shared(Towers):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.join.weight.square().sum()

    with pytest.raises(CaptureError, match=r"join.weight: join.weight is read elsewhere"):
        rewritten(Shared(nn.Linear, F.relu), features(6), "join-split")


def test_a_weight_of_both_products_of_a_pair_is_not_cut_in_two_ways() -> None:
    """Its rows and its columns would be two parameters, each with a part of the gradient."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh()).square().mean()

    with pytest.raises(CaptureError, match=r"first.weight is read elsewhere in other slices"):
        capture(Tied(), torch.randn(4, 4), rewrites=["tensor-split"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "join-split@join.weight+b.weight",
            "at join.weight, b.weight: no operator is of that kind",
        ),
        (
            "join-split@join.weight+typo",
            "no parameter typo, which a rewrite is of; a plan with such a rew",
        ),
        ("tensor-split=3@join.weight", "join.weight: 8 features are not 3 equal parts"),
        ("tensor-split=8", "b.weight, a.weight: 6 features are not 8 equal parts"),
    ],
)
def test_a_named_site_that_cannot_be_rewritten_is_refused(text: str, reason: str) -> None:
    """With what is wrong with it, or all that there are; a name may be of a plan's other model."""
    with pytest.raises(CaptureError, match=re.escape(reason)):
        capture(Towers(nn.Linear, nn.Dropout(0.5)).double(), features(6), rewrites=[text])


class InPlace(Towers):
    """A join that is changed in place, by a call whose result nobody reads."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__(nn.Linear, F.relu)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.a(x), self.b(x)], -1)
        self.change(joined)
        return F.linear(joined, self.join.weight).square().mean() + joined.mean()


def test_an_activation_in_place_is_done_per_branch() -> None:
    """And for those who read all of it."""
    rewritten(InPlace(F.relu_), features(6), "join-split")
    rewritten(Towers(nn.Linear, F.relu_), features(6), "join-split")


def test_what_is_changed_in_place_through_a_view_is_left_alone() -> None:
    """Parts of the join would be those from before the change."""
    module = InPlace(lambda joined: joined.detach().relu_())
    with pytest.raises(CaptureError, match=r"join\.weight: cat is changed in place by relu_"):
        rewritten(module, features(6), "join-split")


def test_dropout_that_draws_is_left_alone() -> None:
    """Its random numbers are those of the whole value."""
    module = Towers(nn.Linear, nn.Dropout(0.5))
    with pytest.raises(CaptureError, match="changes nothing in Towers"):
        rewritten(module, features(6), "join-split")


def test_evaluation_is_rewritten_at_the_same_sites() -> None:
    """Its stages hold the same slices, also where evaluation alone would allow more."""

    class Mixed(Gated):
        def forward(self, x: Tensor) -> Tensor:
            loss = super().forward(x)
            return loss + self.other(F.dropout(self.narrow(x), 0.5, self.training)).square().mean()

    module = Mixed()
    module.narrow, module.other = nn.Linear(6, 4), nn.Linear(4, 2)
    captured = capture(module.double(), features(6), rewrites=["tensor-split"])
    evaluation = captured.evaluation()
    assert evaluation.graph.rewrites == ("tensor-split@down.weight",)
    assert evaluation.parameters().keys() == captured.parameters().keys()


@pytest.mark.parametrize("text", [*REWRITES, "tensor-split=4", "table-split=8@a.weight+b.weight"])
def test_a_rewrite_is_what_it_is_written_as(text: str) -> None:
    """Plan files hold them as text."""
    assert str(Rewrite.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [("split", "none of join-split"), ("tensor-split=1", "at least 2"), ("tensor-split=x", "=4")],
)
def test_what_is_no_rewrite_is_refused(text: str, reason: str) -> None:
    """With the names that there are, or the way to write it."""
    with pytest.raises(ValueError, match=reason):
        Rewrite.parse(text)


def test_branches_inside_a_layer_are_operators() -> None:
    """They would be of no use if the layer were one operator again."""
    names = [op.name for op in rewritten(Blocks(), features(6), "tensor-split").graph.ops]
    for layer in range(2):
        path = f"layers.{layer}.mlp.2"
        assert {f"{path}[0:4]", f"{path}[4:8]", f"{path}[sum 0]"} <= set(names)
