"""DLRM, a recommendation model (GraphPipe, appendix A.2).

    dense.0  -> 4 dense layers -----------------------+
    ...                                               |
    dense.6  -> 4 dense layers -----------------------+-- concatenate -> dense layers -> click
    sparse.0 -> embedding table (a bag of 100 rows) --+
    ...                                               |
    sparse.6 -> embedding table (a bag of 100 rows) --+

Dense layers and the dense inputs are 4096 wide; tables have 1 million rows of width 64, and the 100
embeddings of a bag are concatenated (``-o pooling=sum`` or ``mean`` adds them up instead, as
EmbeddingBag does). The paper does not say how many layers follow the interaction; here three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from anabranch.models import workload_builders
from anabranch.models.layers import FeedForward, binary_loss
from anabranch.models.sizes import Sizes
from anabranch.workload import Batch, Workload


@dataclass(frozen=True)
class DLRMSizes(Sizes):
    """``features``: width of a dense input; ``embedding``: width of a table with ``rows`` rows."""

    dense_branches: int = 7
    sparse_branches: int = 7
    layers: int = 4
    top_layers: int = 3
    features: int = 4096
    width: int = 4096
    rows: int = 1_000_000
    embedding: int = 64
    bag: int = 100
    pooling: str = "concat"
    dropout: float = 0.0
    seed: int = 0


PRESETS = {
    "published": DLRMSizes(),
    "small": DLRMSizes(features=64, width=128, rows=1000, embedding=8, bag=10),
}


class EmbeddingTable(nn.Module):
    """One sparse branch: the rows of a bag, concatenated, summed or averaged."""

    def __init__(self, rows: int, sizes: DLRMSizes):
        super().__init__()
        if sizes.pooling not in ("concat", "sum", "mean"):
            raise ValueError(f"pooling={sizes.pooling}; concat, sum and mean are known")
        is_joined = sizes.pooling == "concat"
        self.width = sizes.embedding * (sizes.bag if is_joined else 1)
        self.rows: nn.Module = (
            nn.Embedding(rows, sizes.embedding)
            if is_joined
            else nn.EmbeddingBag(rows, sizes.embedding, mode=sizes.pooling)
        )

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        """[samples, bag] -> [samples, width]."""
        return self.rows(indices).flatten(1)  # type: ignore[no-any-return]


class DLRM(nn.Module):
    """Dense and sparse branches, their concatenation, a feed-forward trunk, one logit.

    Args:
        features: width of each dense input.
        tables: rows of each sparse input's table.
        sizes: all other sizes.
    """

    def __init__(self, features: Sequence[int], tables: Sequence[int], sizes: DLRMSizes):
        super().__init__()
        width, dropout = sizes.width, sizes.dropout
        self.dense = nn.ModuleList(
            FeedForward([inputs] + [width] * sizes.layers, dropout) for inputs in features
        )
        sparse = [EmbeddingTable(rows, sizes) for rows in tables]
        self.sparse = nn.ModuleList(sparse)
        joined = width * len(features) + sum(table.width for table in sparse)
        self.top = FeedForward([joined] + [width] * sizes.top_layers, dropout)
        self.head = nn.Linear(width if sizes.top_layers else joined, 1)

    def forward(
        self, dense: Sequence[torch.Tensor], sparse: Sequence[torch.Tensor], target: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """``dense``: per branch [samples, features]; ``sparse``: per table [samples, bag] rows;
        ``target``: [samples], 0 or 1.
        """
        joined = torch.cat(
            [branch(x) for branch, x in zip(self.dense, dense, strict=True)]
            + [table(x) for table, x in zip(self.sparse, sparse, strict=True)],
            dim=-1,
        )
        return binary_loss(self.head(self.top(joined)).squeeze(-1), target)


def clicks(sizes: DLRMSizes) -> workload_builders.Draw:
    """Draw clicks, half of them 1: dense features show them as a pattern, rows by odd numbers."""
    patterns = workload_builders.prototypes(sizes.dense_branches, sizes.features, sizes.seed)

    def draw(samples: int, generator: torch.Generator) -> Batch:
        target = torch.randint(2, (samples,), generator=generator)
        sign = 2.0 * target - 1.0
        dense = [
            workload_builders.under_noise(torch.outer(sign, pattern), (sizes.features,), generator)
            for pattern in patterns
        ]
        shape = (sizes.sparse_branches, samples, sizes.bag)
        rows = torch.randint(sizes.rows, shape, generator=generator)
        telling = torch.rand(shape, generator=generator) < workload_builders.SYNTHETIC.signal
        rows = torch.where(telling, rows - rows % 2 + target[:, None], rows)
        rows = rows.clamp(max=sizes.rows - 1)
        return {"dense": dense, "sparse": list(rows), "target": target.float()}

    return draw


def workload(sizes: DLRMSizes, *, meta: bool = False) -> Workload:
    features, tables = [sizes.features] * sizes.dense_branches, [sizes.rows] * sizes.sparse_branches
    return workload_builders.synthetic_workload(
        "dlrm",
        lambda: DLRM(features, tables, sizes),
        clicks(sizes),
        sizes,
        meta=meta,
        width=sizes.width,
        chance={"accuracy": 0.5},
    )
