"""Multi-Modal Transformer (GraphPipe, section 7.1 and appendix A.2).

    inputs.0 -> 8 transformer layers --+
    inputs.1 -> 8 transformer layers --+-- concatenate -> norm -> mean over the sequence -> classes
    inputs.2 -> 8 transformer layers --+
    inputs.3 -> 8 transformer layers --+

Each branch reads a sequence of embeddings of one modality. Appendix A.2 gives four branches of
eight layers; section 7.2 speaks of two (``-o branches=2``). The paper does not say what follows the
concatenation; here it is a classifier, small beside the branches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from anabranch.models.layers import BranchClassifier, Stack, TransformerLayer
from anabranch.models.sizes import Sizes
from anabranch.models.workload_builders import branches_workload
from anabranch.workload import Workload


@dataclass(frozen=True)
class MMTSizes(Sizes):
    """Sizes as published; ``layers`` is per branch, ``sequence`` in tokens."""

    branches: int = 4
    layers: int = 8
    sequence: int = 256
    hidden: int = 1024
    heads: int = 16
    feedforward: int = 4096
    classes: int = 10
    dropout: float = 0.0
    seed: int = 0


PRESETS = {
    "published": MMTSizes(),
    "small": MMTSizes(layers=2, sequence=16, hidden=64, heads=4, feedforward=256),
}


class MMT(BranchClassifier):
    def __init__(self, sizes: MMTSizes):
        layer = partial(
            TransformerLayer, sizes.hidden, sizes.heads, sizes.feedforward, sizes.dropout
        )
        branches = [Stack(layer() for _ in range(sizes.layers)) for _ in range(sizes.branches)]
        super().__init__(branches, sizes.branches * sizes.hidden, sizes.classes, norm=True)


def workload(sizes: MMTSizes, *, meta: bool = False) -> Workload:
    return branches_workload("mmt", lambda: MMT(sizes), sizes, meta=meta)
