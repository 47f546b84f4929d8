"""Values and parameters of the graph of operators that a captured module becomes."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.graph.call_traits import SampleAxis
from anabranch.graph.capture import capture
from anabranch.graph.cutting.split import split
from anabranch.graph.opgraph import LookupTable
from anabranch.graph.opgraph_builder import make_sparse
from tests.graph.chain import run_stages
from tests.graph.nets import Body, Net, batch, stage_each


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


class Biased(nn.Module):
    """As T5 has it: positions make a bias that two layers read, and the head has the table of the
    words.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 4), nn.Embedding(3, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        bias = self.places(torch.arange(3, device=x.device))
        h = self.second(self.first(self.words(x) + bias).tanh() + bias)
        return self.head(h).square().mean()


def test_parameters_alone_make_values_without_a_batch() -> None:
    """A bias by position carries a gradient, has no batch dimension, and is read by both layers; a
    tied parameter is listed by each reader, under its first name.
    """
    tokens = torch.zeros(2, 3, dtype=torch.long)
    graph = capture(Biased(), tokens, granularity="operator").graph
    (bias,) = [v for v in graph.values if not v.batched]
    assert (graph.ops[bias.producer].name, bias.grad, bias.nbytes) == ("places", True, 3 * 4 * 4)
    assert len(bias.consumers) == 2
    assert [op.name for op in graph.ops if "words.weight" in op.parameters] == ["words", "head"]
    assert [p.name for p in graph.parameters].count("words.weight") == 1


def test_samples_in_the_middle_are_found() -> None:
    """Time-major values have their samples in dimension 1; bytes are per sample all the same."""
    body = Body(lambda h: h.unsqueeze(0).expand(3, -1, -1).tanh())
    captured = capture(body, torch.randn(4, 6), granularity="operator")
    values = dict(zip((v.name for v in captured.graph.values), captured.value_calls, strict=True))
    sizes = {v.name: v.nbytes for v in captured.graph.values}
    assert captured.axes[values["linear_1"]] == SampleAxis(1)
    assert sizes["linear_1"] == 3 * 8 * 4


class Lookups(nn.Module):
    """Rows of four floats, looked up in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Embedding(9, 4, sparse=True)
        self.bag = nn.EmbeddingBag(9, 4, mode="mean")
        self.most = nn.EmbeddingBag(9, 4, mode="max")
        self.tied = nn.Embedding(9, 4, sparse=True)
        self.places = nn.Embedding(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.twice(x).sum(1) + self.twice(x[:, 0]) + self.bag(x) + self.most(x)
        h = h + self.tied(x).sum(1) + self.places(torch.arange(3)).sum(0)
        return F.linear(h, self.tied.weight).square().mean()


def test_tables_are_what_is_only_looked_up_by_the_batch() -> None:
    """Not the output layer of a tied one, not positions, of which every step reads all, and not the
    largest of a bag. Two reads make 3 + 1 lookups.
    """
    captured = capture(Lookups(), {"x": torch.zeros(2, 3, dtype=torch.long)})
    found = {p.name: p.table for p in captured.graph.parameters if p.table}
    assert found == {
        "twice.weight": LookupTable(4, 16, True),
        "bag.weight": LookupTable(3, 16, False),
    }


def test_lookups_are_made_sparse() -> None:
    """All that can be, which are those besides the maximum; one argument is changed."""
    captured = capture(Lookups(), {"x": torch.zeros(2, 3, dtype=torch.long)})
    graph = captured.programs.at(2).graph
    assert make_sparse(graph) == 2
    bags = [n.args[4:6] for n in graph.nodes if "embedding_bag" in str(n.target)]
    assert bags == [(1, True), (2, False)]
    tables = [n.args[2:] for n in graph.nodes if "embedding.default" in str(n.target)]
    assert tables == [(-1, False, True)] * 4
