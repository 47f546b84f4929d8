"""Options of a run that each rank's pipeline hands down to its session and its assignment."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import get_args

import torch

from anabranch.graph.capture import Captured
from anabranch.plans.plan import Plan
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
from anabranch.runtime.guards.same_batch import BatchCheck
from anabranch.runtime.state.spare_copies import SpareCopies

_OWN = ("captured", "compute", "timeout", "stall_timeout", "patience", "device", "copies")
"""Options in which ranks may differ, and ``compute``, whose fields are compared one by one."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of a run, which ``Pipeline`` documents.

    Raises:
        ValueError: for a value that is not listed, or options that exclude each other.
    """

    captured: Captured | None = None
    accumulate: int = 1
    compute: ComputeOptions = PLAIN
    exact: bool = False
    check_memory: bool = True
    check_copies: int = 100
    check_batches: BatchCheck = "sampled"
    shard_optimizer: bool | None = None
    check_gradients: bool = True
    timeout: float = 600.0
    stall_timeout: float | None = None
    patience: float | None = None
    device: torch.device | str | None = None
    copies: SpareCopies | None = None

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate is {self.accumulate}; an update takes at least one batch")
        if self.exact and self.shard_optimizer:
            raise ValueError(
                "exact mode adds gradients of tied parameters on all their holders, which "
                "shard_optimizer gives to one of them; take one of the two"
            )
        if self.check_batches not in get_args(BatchCheck):
            raise ValueError(f"check_batches is {self.check_batches!r}; it is 'sampled' or 'full'")

    def under(self, plan: Plan) -> PipelineOptions:
        """Return the options with those of a plan for what was left out."""
        compute, shards = self.compute, self.shard_optimizer
        if compute.sparse_embeddings is None:
            compute = replace(compute, sparse_embeddings=plan.sparse_embeddings)
        if compute.precision is None:
            compute = replace(compute, precision=plan.precision)
        if shards is None:
            shards = plan.shard_optimizer and not self.exact
        return replace(self, compute=compute, shard_optimizer=shards)

    def facts(self) -> dict[str, object]:
        """Return the options that all ranks must have alike."""
        names = (field.name for field in fields(self) if field.name not in _OWN)
        return {name: getattr(self, name) for name in names} | asdict(self.compute)
