"""Which parameters are tables of embeddings, and how they get sparse gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.graph.capture import capture
from anabranch.graph.embeddings import make_sparse
from anabranch.graph.opgraph import LookupTable


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
