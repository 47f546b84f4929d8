"""Measured seconds of an update: the look for gradients that are not finite, clipping, optimizer.

An update goes through all of a rank's trainable parameters, so its time grows with their bytes and,
where they are small, with their number::

    seconds = fixed + per tensor * tensors + per byte * bytes
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from anabranch.errors import naming_place
from anabranch.profile.profile import UpdateCost
from anabranch.runtime.data_parallel.buckets import entries
from anabranch.runtime.data_parallel.gradients import clip, gradients_of
from anabranch.runtime.numerics.nonfinite import bad_names
from anabranch.workload import Workload


@dataclass(frozen=True, slots=True)
class UpdateSizes:
    """Sizes of a measurement, in bytes.

    Attributes:
        parameters: parameters that are updated for a measurement, at most; the largest
            ones stay out.
        cache: more than the caches of a processor core hold.
    """

    parameters: int = 2**28
    cache: int = 2**25


_SIZES = UpdateSizes()


_REPEATS, _BUDGET_S = 9, 2.0
"""Updates that are timed, and the seconds after which fewer are."""


def measure_update(workload: Workload, *, device: torch.device | str = "cpu") -> UpdateCost:
    """Time updates of copies of a workload's parameters, with its own optimizer and clipping.

    On one thread, as ranks have it. The user's model is left as it was. A model without trainable
    parameters costs nothing.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(workload, torch.device(device))
    finally:
        torch.set_num_threads(threads)


def _measured(workload: Workload, place: torch.device) -> UpdateCost:
    chosen: list[tuple[str, nn.Parameter]] = []
    total = 0
    named = [(n, p) for n, p in workload.module.named_parameters() if p.requires_grad]
    for name, parameter in sorted(named, key=lambda entry: entry[1].nbytes):
        total += parameter.nbytes
        if chosen and total > _SIZES.parameters:
            break
        chosen.append((name, parameter))
    if not chosen:
        return UpdateCost(0.0, 0.0, 0.0)
    # The smallest one, the smaller half and all of them tell number and bytes apart.
    counts = sorted({1, -(-len(chosen) // 2), len(chosen)})
    rows, seconds = [], []
    for count in counts:
        part = chosen[:count]
        rows.append((1.0, float(count), float(sum(p.nbytes for _, p in part))))
        seconds.append(_seconds(workload, part, place))
    return fit(rows, seconds)


def _seconds(
    workload: Workload, named: Sequence[tuple[str, nn.Parameter]], place: torch.device
) -> float:
    copies = {}
    for name, parameter in named:
        values = torch.full_like(parameter, 1e-3, device=place, memory_format=torch.preserve_format)
        copies[name] = nn.Parameter(values)
    optimizer = workload.make_optimizer(list(copies.items()))
    other = torch.zeros(_SIZES.cache // 4, device=place)
    taken: list[float] = []
    deadline = time.perf_counter() + _BUDGET_S
    for repeat in range(-2, _REPEATS):
        for parameter in copies.values():
            gradient = torch.full_like(parameter, 1e-3)
            # The one that takes rows of tables alone.
            is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
            parameter.grad = gradient.to_sparse(1) if is_sparse else gradient
        other.add_(1)  # the passes of a step leave nothing of the optimizer's state in the cache
        _synchronize(place)
        begun = time.perf_counter()
        _update(copies, optimizer, workload.clip_norm)
        _synchronize(place)
        if repeat >= 0:
            taken.append(time.perf_counter() - begun)
            if time.perf_counter() > deadline:
                break
    return statistics.median(taken)


def _update(
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None,
) -> None:
    gradients = gradients_of(parameters)
    if clip_norm is None:
        bad_names(gradients)
    else:
        norms = [
            torch.linalg.vector_norm(entries(g), dtype=torch.float64) for g in gradients.values()
        ]
        # As if the norm were too large, which is when clipping costs something.
        clip(parameters, float(torch.stack(norms).square().sum()), 1e-12)
    with naming_place("the optimizer of the Workload raised in an update,"):
        optimizer.step()


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> UpdateCost:
    """Non-negative figures that fit the times; with few of them the first terms stay out."""
    for left_out in range(3):
        table = np.array(rows)[:, left_out:]
        if len(rows) < table.shape[1]:
            continue
        # Relative errors count, or the smallest update would not.
        weights = 1 / np.array(seconds)
        scale = table.max(axis=0)
        terms = np.linalg.lstsq(table / scale * weights[:, None], np.ones(len(rows)), rcond=None)[0]
        if (terms >= 0).all():
            figures = [0.0] * left_out + (terms / scale).tolist()
            return UpdateCost(*figures)
    return UpdateCost(0.0, 0.0, max(s / row[2] for s, row in zip(seconds, rows, strict=True)))


def _synchronize(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
