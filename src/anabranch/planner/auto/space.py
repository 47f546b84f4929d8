"""Space: the model, the cluster and the limits of drafts, in the forms that moves need."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from anabranch.cost import CostModel
from anabranch.graph.opgraph import bits
from anabranch.graph.series_parallel import decompose, operators
from anabranch.planner.auto.draft import Draft
from anabranch.planner.auto.settings import SETTINGS

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class Space:
    """A model, a cluster and the limits of a plan.

    Attributes:
        sizes: micro-batch sizes, ascending.
        recompute: stages may recompute.
        flush: stages may differ in micro-batch size and in k, and the warm-up may be deep.
        shared: replicas may share the optimizer's state, or not.
        split: backwards may be split.
        most_replicas: most replicas of a stage.
        several: devices may have several stages.
    """

    cost: CostModel
    batch_size: int
    sizes: tuple[int, ...]
    recompute: bool = True
    flush: bool = True
    shared: bool = False
    split: bool = False
    most_replicas: int = 1
    several: bool = True

    def effort(self, draft: Draft) -> int:
        """Return how many evaluations one near a draft counts as: many passes take long."""
        sizes = draft.microbatch
        if not self.flush or min(sizes) == max(sizes):  # then only a part is run
            return 1
        passes = sum(-(-self.batch_size // size) for size in sizes)
        return passes // SETTINGS.passes if passes >= SETTINGS.most_passes else 1

    def key(self, draft: Draft) -> int:
        """Return a hash that ignores which stage has which device of a node or card, as drafts that
        differ only in that take equally long.
        """
        op_stage, device_stage, *rest = draft
        if self._alike > 1:
            device_stage = device_stage.reshape(-1, self._alike).copy()
            device_stage.sort()
        return hash((op_stage.tobytes(), device_stage.tobytes(), *rest))

    @cached_property
    def _alike(self) -> int:
        """Number of devices in a row that share a card at every level where devices share cards."""
        sizes, cards = self.cost.cluster.group_sizes, self.cost.cluster.cards[1:]
        pairs = [(size, n) for size, n in zip(sizes, cards, strict=False) if n < size]
        return math.gcd(sizes[0], *(1 if size % n else size // n for size, n in pairs))

    @cached_property
    def edges(self) -> NDArray[np.intp]:
        """Edges of the model: row 0 their sources, row 1 their targets, as operators."""
        return np.array(self.cost.graph.edges, dtype=np.intp).reshape(-1, 2).T.copy()

    @cached_property
    def reaches(self) -> NDArray[np.bool_]:
        """[a, b]: whether operator b is a or depends on it."""
        count = len(self.cost.graph)
        result = np.eye(count, dtype=np.bool_)
        for a, mask in enumerate(self.cost.graph.descendants):
            result[a, list(bits(mask))] = True
        return result

    @cached_property
    def position(self) -> Ints:
        """Position of each operator in the order branch after branch."""
        return np.argsort([*operators(decompose(self.cost.graph))]).astype(np.int32)

    @cached_property
    def work(self) -> NDArray[np.float64]:
        """Forward and backward seconds of each operator at the largest measured sample count."""
        forward, backward = self.cost.op_seconds(self.cost.profile.samples[-1])
        return forward + backward

    @cached_property
    def joins(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Operators with several predecessors, and these predecessors."""
        sources = enumerate(tuple(bits(mask)) for mask in self.cost.graph.predecessors)
        return tuple((op, others) for op, others in sources if len(others) > 1)
