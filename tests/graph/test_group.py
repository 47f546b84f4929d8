"""Operators made of tensor operations: what is merged, what stays apart."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from anabranch.graph.call_traits import CallTraits
from anabranch.graph.capture import Captured, capture
from anabranch.graph.group import FREE, CallGroups, Granularity, bind, components, convex
from anabranch.graph.opgraph import BATCH
from benchmarks.architectures.models import build
from tests.graph.nets import Body


@cache
def towers(granularity: Granularity) -> Captured:
    """``TwoTowers``, captured once for each granularity."""
    example = torch.randn(4, 5, 8), torch.randn(4, 3, 8), torch.randn(4)
    return capture(TwoTowers(), example, granularity=granularity)


def names(captured: Captured) -> list[str]:
    return [op.name for op in captured.graph.ops]


def edges(captured: Captured) -> set[tuple[str, str]]:
    ops = captured.graph.ops
    return {(ops[a].name, ops[b].name) for a, b in captured.graph.edges}


def flows(captured: Captured) -> dict[str, tuple[str, ...]]:
    """Value -> its readers, for the values that operators make."""
    graph = captured.graph
    return {
        value.name: tuple(graph.ops[c].name for c in value.consumers)
        for value in graph.values
        if value.producer != BATCH
    }


class Layer(nn.Module):
    """Attention and feed-forward with norms before them and residual sums after them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """One head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        causal = torch.ones(x.shape[1], x.shape[1], device=x.device).tril() > 0
        weights = (q @ k.transpose(1, 2)).masked_fill(~causal, -1e9).softmax(-1)
        return self.out(weights @ v)


class TwoTowers(nn.Module):
    """Two towers of transformer layers that meet in a head.

    text  -> layers.0 -> layers.1 --+
                                    +--> head -> loss
    image -> layers.0 -> layers.1 --+
    """

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(Layer(), Layer())
        self.image = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(16, 1)

    def forward(self, text: torch.Tensor, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.text(text).mean(1), self.image(image).mean(1)], dim=1)
        return (self.head(both).squeeze(1) - label).pow(2).mean()


def test_a_captured_module_is_shown_in_a_line() -> None:
    """Without module, batch and graph, which are pages."""
    assert repr(towers("block")) == "<Captured TwoTowers: 5 operators, mean, fp32>"


def test_blocks() -> None:
    """A block is an entry of a repeated list; the towers stay apart until the head."""
    captured = towers("block")
    assert names(captured) == ["text.0", "text.1", "image.0", "image.1", "head"]
    assert [op.kind for op in captured.graph.ops] == ["Layer"] * 4 + ["Linear"]
    assert edges(captured) == {
        ("text.0", "text.1"),
        ("image.0", "image.1"),
        ("text.1", "head"),
        ("image.1", "head"),
    }


def test_layers() -> None:
    """Queries, keys and values go to the attention, norms and residual sums to their sub-layer."""
    captured = towers("layer")
    tower = ["0.attention", "0.mlp", "1.attention", "1.mlp"]
    assert names(captured) == [
        *(f"text.{n}" for n in tower),
        *(f"image.{n}" for n in tower),
        "head",
    ]
    attention = captured.graph.ops[0]
    assert attention.kind == "Attention"
    assert {name.split(".")[2] for name in attention.parameters} == {"norm1", "attention"}
    # One tensor crosses each border: the norm is behind it, with whom reads it.
    assert all(len(readers) == 1 for readers in flows(captured).values())


class Mean(nn.Module):
    """The mean of what it is given, as the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


class CastNorm(nn.Module):
    """A root-mean-square norm in full precision, as Llama has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        full = x.to(torch.float32)
        return self.weight * (full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True))).to(x.dtype)


def test_one_tensor_crosses_the_border_before_a_norm_that_casts() -> None:
    """The cast returns what it is given, so the residual sum reads it of the norm."""
    layers = Layer(), Layer()
    for layer in layers:
        layer.norm1, layer.norm2 = CastNorm(), CastNorm()
    captured = capture(nn.Sequential(*layers, Mean()), torch.randn(4, 5, 8))
    assert names(captured)[:4] == ["0.attention", "0.mlp", "1.attention", "1.mlp"]
    assert len(flows(captured)) == len(edges(captured))


def test_operators() -> None:
    """One operator per module call; what is left of a module, such as attention's core, is one."""
    captured = towers("operator")
    assert names(captured)[:10] == [
        "text.0.norm1",
        "text.0.attention.q",
        "text.0.attention.k",
        "text.0.attention.v",
        "text.0.attention",
        "text.0.attention.out",
        "text.0.norm2",
        "text.0.mlp.0",
        "text.0.mlp.1",
        "text.0.mlp.2",
    ]
    assert len(set(names(captured))) == len(captured.graph)


@pytest.mark.parametrize("granularity", ["operator", "layer", "block"])
def test_branches_never_wait_for_each_other(granularity: Granularity) -> None:
    """Nothing in one tower depends on the other, however coarse."""
    graph = towers(granularity).graph
    masks = {
        tower: graph.mask(op.name for op in graph.ops if op.name.startswith(tower))
        for tower in ("text", "image")
    }
    for i, op in enumerate(graph.ops):
        for tower, mask in masks.items():
            if op.name.startswith(("text", "image")) and not op.name.startswith(tower):
                assert not graph.ancestors[i] & mask


def test_masks_are_copied_not_sent() -> None:
    """The causal mask needs neither parameters nor the batch, so it is no value."""
    captured = towers("operator")
    owners = captured.programs.grouping.owner_of(captured.programs.at(4))
    free = {node.name for node, owner in owners.items() if owner == FREE}
    assert {"ones", "tril", "gt"} <= free
    assert not free & set(flows(captured))


def test_values_of_the_batch_list_who_reads_them_through_copies() -> None:
    """BERT's attention mask is prepared in every layer instead of being sent to it."""
    module, example = build("Bert")
    captured = capture(module, example, granularity="block")
    graph = captured.graph
    mask = next(v for v in graph.values if v.name == "attention_mask")
    readers = [graph.ops[c].name for c in mask.consumers]
    assert readers == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert all(value.grad for value in graph.values if value.producer != BATCH)


@pytest.mark.parametrize(
    ("between", "operators"),
    [
        (lambda h: h, 3),
        # Samples in the middle: sent with the samples in front.
        (lambda h: h.unsqueeze(0).expand(3, -1, -1), 3),
        # Folded with another size: sent as a view that has the samples in a dimension.
        (lambda h: h.unsqueeze(1).expand(-1, 3, -1).reshape(-1, 8), 3),
        (lambda h: h.T @ h, 2),
        # A size that depends on the data.
        (lambda h: h[h[:, 0] > 0], 2),
    ],
    ids=["rows", "time first", "folded", "mixed", "size from data"],
)
def test_what_cannot_be_sent_stays_in_one_operator(between: Any, operators: int) -> None:
    """Values between operators are cut into samples; where that is impossible there is no cut."""
    captured = capture(Body(between), torch.randn(4, 6), granularity="operator")
    linear = [n for n in names(captured) if n.split("#")[0] in ("a", "b", "c")]
    assert len(linear) == operators
    graph = captured.graph
    for value, call in zip(graph.values, captured.value_calls, strict=True):
        assert value.batched == (call in captured.axes)


class InPlace(nn.Module):
    """Changes what a linear layer made through a view, and what a normalisation counted."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h.detach().view(-1, 2, 4).select(1, 0).relu_()  # past autograd, so no new value
        return self.b(self.norm(h)).pow(2).mean()


def test_operations_in_place_stay_with_what_they_change() -> None:
    """The view's relu is in the linear layer's operator; count and statistics are in one."""
    captured = capture(InPlace(), torch.randn(4, 6), granularity="operator")
    owners = {
        node.name: captured.graph.ops[owner].name
        for node, owner in captured.programs.grouping.owner_of(captured.programs.at(4)).items()
    }
    assert owners["linear"] == owners["relu_"] == owners["view"] == "a"
    assert owners["add_"] == owners["batch_norm"] == "norm"


def test_module_called_twice_makes_two_operators() -> None:
    """Each call is an operator; both read the parameters, so that they are tied if cut apart."""

    class Siamese(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(6, 8), nn.Tanh())

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return (self.tower(left) * self.tower(right)).mean()

    captured = capture(Siamese(), (torch.randn(4, 6), torch.randn(4, 6)))
    assert names(captured) == ["tower.0", "tower.0#2"] or len(captured.graph) == 3
    readers = [op.name for op in captured.graph.ops if "tower.0.weight" in op.parameters]
    assert readers == ["tower.0", "tower.0#2"]


def test_module_called_twice_that_counts_is_one_operator() -> None:
    """A normalisation updates its statistics in order, so both calls are on one stage."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            return (self.norm(self.a(left)) * self.norm(self.a(right))).mean()

    captured = capture(Twice(), (torch.randn(4, 6), torch.randn(4, 6)), granularity="operator")
    readers = [op.name for op in captured.graph.ops if "norm.weight" in op.parameters]
    assert len(readers) == 1


def test_auxiliary_losses_do_not_glue_the_layers_together() -> None:
    """A mean over the samples cannot be sent, but it can be taken where the losses are added."""

    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = x.new_zeros(())
            for layer in self.layers:
                x = layer(x)
                loss = loss + x.exp().mean()
            return loss

    captured = capture(Auxiliary(), torch.randn(4, 6))
    assert names(captured)[:3] == ["layers.0", "layers.1", "layers.2"]


class Diamond(nn.Module):
    """Calls 0 to 3 are a, b, c and their sum; then a mean.

    a --+--> b --+--> sum --> mean
        +--> c --+
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        return (self.b(a) + self.c(a)).mean()


def diamond() -> CallGroups:
    captured = capture(Diamond(), torch.randn(4, 5))
    groups = CallGroups(CallTraits(captured.programs.at(4), captured.programs.at(8)))
    groups.rank_ancestors()
    return groups


def test_neighbours_are_those_that_make_nobody_wait() -> None:
    """b's only reader is the sum; a is b's only input, but c reads it too, so the sum comes first.

    The sum has two inputs, neither of which needs the other: it may join its only reader alone.
    """
    groups = diamond()
    assert groups.neighbours(1) == [3, 0]
    assert groups.neighbours(3) == [4]


def test_merging_keeps_what_depends_on_what() -> None:
    """a and b as one: c still needs it, and so does the sum."""
    groups = diamond()
    groups.merge(0, 1)
    assert groups.members[0] == [0, 1]
    assert groups.order() == [0, 2, 3, 4]
    assert groups.needs(3, 0)
    assert groups.needs(2, 0)
    assert not groups.needs(2, 3)


def test_what_lies_between_bound_calls_joins_them() -> None:
    """a and the sum in one group: b and c lie on paths from it to itself."""
    groups = diamond()
    bind(groups, [[0, 3]])
    assert sorted(groups.members[0]) == [0, 1, 2, 3]
    assert list(groups.members) == [0, 4]


def test_convex_and_connected_sets() -> None:
    """b and c are apart; a and the sum are not convex, as b lies between them."""
    groups = diamond()
    assert sorted(map(sorted, components(groups, {1, 2, 4}))) == [[1], [2], [4]]
    assert convex(groups, {0, 1, 2, 3})
    assert not convex(groups, {0, 3})
