"""Batch normalisation over the whole batch: what ``nn.SyncBatchNorm`` says that it is.

Statistics of a micro-batch are those of gradient accumulation. A module that asks for those of the
whole batch, as ``nn.SyncBatchNorm`` does among data-parallel processes, computes across samples:
its operator has the whole batch at once (``plans.whole_batch``), so no statistics are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from anabranch.graph.flat_program import frame
from anabranch.graph.flows import SampleFlow


def with_whole_batch_norms(flow: SampleFlow, module: nn.Module) -> SampleFlow:
    """The same flow, in which normalisation over the whole batch couples samples."""
    whole = [
        node
        for node in flow.normalised
        if isinstance(module.get_submodule(frame(node)), nn.SyncBatchNorm)
    ]
    others = tuple(node for node in flow.normalised if node not in whole)
    return replace(flow, coupling=(*flow.coupling, *whole), normalised=others)


@contextmanager
def in_one_process() -> Iterator[None]:
    """Inside, ``nn.SyncBatchNorm`` takes the statistics of what it is given, also where there are
    other processes, and on a CPU: whoever calls the module has the whole batch.
    """
    forward = nn.SyncBatchNorm.forward
    nn.SyncBatchNorm.forward = _BatchNorm.forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.SyncBatchNorm.forward = forward  # type: ignore[method-assign]
