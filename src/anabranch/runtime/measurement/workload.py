"""Measurement of a workload on this machine: operators, updates and the reading of batches.

An update is the check for gradients that are not finite, clipping and the optimizer. It goes
through all of a rank's trainable parameters, so its time grows with their bytes and, if they are
small, with their number::

    seconds = fixed + per tensor * tensors + per byte * bytes

Every rank reads all batches, between steps. Reading ahead in a loader's own processes does not
count, as in training.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from anabranch.device import accelerator
from anabranch.errors import naming_line, warn
from anabranch.graph.capture import Captured, capture_workload
from anabranch.profile.measure import measure
from anabranch.profile.profile import ADAM_STATE, Profile, UpdateCost
from anabranch.profile.storages import Storages
from anabranch.runtime.data_parallel.gradients import clip, gradients_of, squares_of
from anabranch.runtime.measurement.peak_memory import PeakMemory
from anabranch.runtime.numerics.nonfinite import bad_names
from anabranch.runtime.state.optimizer_facts import (
    TakenGradients,
    refuse_unsupported,
    taken_gradients,
    unlike_torchs,
)
from anabranch.workload import Batch, Workload


@dataclass(frozen=True, slots=True)
class MeasurementSizes:
    """Sizes of measurements.

    Attributes:
        batches: batches that are read.
        budget_s: seconds of reading after which no further batch is read.
        patience_s: most seconds of reading in all, part of which a loader may need to start; a
            loader that blocks must not hold up a plan for ever.
        parameter_bytes: most bytes of parameters in a measured update; the largest are left out.
        cache_bytes: more bytes than the caches of a processor core hold.
        least_share: bytes of temporaries per byte of parameters below which an update has none.
        updates: updates that are timed.
        updates_budget_s: seconds of updates after which no further update is timed.
    """

    batches: int = 8
    budget_s: float = 1.0
    patience_s: float = 20.0
    parameter_bytes: int = 2**28
    cache_bytes: int = 2**25
    least_share: float = 0.01
    updates: int = 9
    updates_budget_s: float = 2.0


SIZES = MeasurementSizes()


def measure_workload(
    workload: Workload,
    samples: Sequence[int] = (1, 2, 4, 8, 16),
    *,
    captured: Captured | None = None,
    device: str = "cpu",
    **options: Any,
) -> Profile:
    """Measure everything in a step of a rank except messages: the operators, as ``measure`` does,
    updates by the workload's own optimizer, and the reading of its data.

    Args:
        captured: the captured module, if the caller has it.
        samples: see ``measure``, also for ``device`` and the other options; batches of the largest
            count are read.

    Raises:
        CaptureError: if the module cannot be captured; for other errors see ``measure``.
    """
    captured = captured or capture_workload(workload)
    return replace(
        measure(captured, samples, device=device, **options),
        update=measure_update(workload, device=device),
        read_sample_s=measure_reading(workload, max(samples)),
    )


def measure_reading(workload: Workload, samples: int) -> float:
    """Measure the seconds of reading per sample, from batches of ``samples``; 0 for a workload
    without data, and for data that takes too long, with a warning.

    The random state is left as it was. Errors of the data are left for training to report.
    """
    data = workload.data
    if data is None:
        return 0.0
    seconds: list[float] = []

    def read() -> None:
        try:
            seconds.append(reading_s(data(samples, 0)) / samples)
        except Exception:
            seconds.append(0.0)

    # A blocked reader can only be abandoned; a daemon does not hold up the end of the process.
    reader = threading.Thread(target=read, name="anabranch reading", daemon=True)
    with torch.random.fork_rng([]):
        reader.start()
        reader.join(SIZES.patience_s)
    if not seconds:
        warn(
            f"the workload's data has not yielded {SIZES.batches} batches within "
            f"{SIZES.patience_s:g} s: predictions leave reading it out, and training would wait "
            "for it"
        )
    return seconds[0] if seconds else 0.0


def reading_s(batches: Iterable[Batch]) -> float:
    """Return the median seconds of some batches, without the first, with which a loader starts."""
    taken: list[float] = []
    begun = start = time.perf_counter()
    for _ in islice(batches, SIZES.batches):
        now = time.perf_counter()
        taken.append(now - begun)
        if now - start > SIZES.budget_s:
            break
        begun = time.perf_counter()
    return statistics.median(taken[1:] or taken or [0.0])


# Updates


def measure_update(workload: Workload, *, device: torch.device | str = "cpu") -> UpdateCost:
    """Time updates of copies of a workload's parameters, with its own optimizer and clipping.

    They run on one thread, as in ranks. The user's model is left as it was. A model without
    trainable parameters costs nothing.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(workload, torch.device(device))
    finally:
        torch.set_num_threads(threads)


def _measured(workload: Workload, device: torch.device) -> UpdateCost:
    chosen: list[tuple[str, nn.Parameter]] = []
    total = 0
    named = [(n, p) for n, p in workload.module.named_parameters() if p.requires_grad]
    for name, parameter in sorted(named, key=lambda entry: entry[1].nbytes):
        total += parameter.nbytes
        if chosen and total > SIZES.parameter_bytes:
            break
        chosen.append((name, parameter))
    if not chosen:
        return UpdateCost(0.0, 0.0, 0.0)
    # Updates of the smallest, of the smaller half and of all separate number from bytes.
    counts = sorted({1, -(-len(chosen) // 2), len(chosen)})
    rows, seconds = [], []
    for count in counts:
        part = chosen[:count]
        rows.append((1.0, float(count), float(sum(p.nbytes for _, p in part))))
        trial = _TrialUpdate(workload, part, device)
        seconds.append(trial.seconds())
    memory = _temporary(workload, chosen, device)
    return replace(fit(rows, seconds), state=trial.state_share(), **memory)


def _temporary(
    workload: Workload, named: Sequence[tuple[str, nn.Parameter]], device: torch.device
) -> dict[str, float]:
    """Measure the temporary memory of updates, as fields of ``UpdateCost``.

    Updates of the two largest parameters and of all parameters separate memory that grows with all
    of them from memory for one after the other, where the previous one may still be alive.
    """
    largest = named[-1][1].nbytes
    few, total = (sum(p.nbytes for _, p in part) for part in (named[-2:], named))
    of_few = of_all = _TrialUpdate(workload, named[-2:], device).temporary_bytes()
    if total > few:
        of_all = max(_TrialUpdate(workload, named, device).temporary_bytes(), of_few)
    share = _noted((of_all - of_few) / max(total - few, 1))
    return {
        "all_temporary": share,
        "largest_temporary": _noted(max(0.0, of_few - share * few) / largest),
    }


def _noted(share: float) -> float:
    """Return a share, or 0 if it is as small as that of norms and counts of steps."""
    return share if share >= SIZES.least_share else 0.0


class _TrialUpdate:
    """An update of copies of some parameters of a workload, on a device."""

    def __init__(
        self, workload: Workload, named: Sequence[tuple[str, nn.Parameter]], device: torch.device
    ) -> None:
        self._workload, self._device = workload, device
        options: dict[str, Any] = {"device": device, "memory_format": torch.preserve_format}
        self._held = {n: nn.Parameter(torch.full_like(p, 1e-3, **options)) for n, p in named}
        self._optimizer = workload.make_optimizer(list(self._held.items()))
        refuse_unsupported(self._optimizer, None)

    def temporary_bytes(self) -> int:
        """Return the bytes of an update besides parameters, gradients and optimizer state."""
        self._give_gradients()
        self._update()  # which makes the state
        held = [*self._held.values(), *gradients_of(self._held).values()]
        for state in self._optimizer.state.values():
            held += [value for value in state.values() if isinstance(value, torch.Tensor)]
        memory, device = PeakMemory(self._device, held), self._device
        counted = accelerator.has_own_memory(device)
        before = torch.accelerator.memory_allocated(device) if counted else Storages(held, ()).now
        with memory.measuring():
            self._update()
        return max(0, memory.peak_bytes - before)

    def seconds(self) -> float:
        """Return the median seconds of an update."""
        other = torch.zeros(SIZES.cache_bytes // 4, device=self._device)
        taken: list[float] = []
        deadline = time.perf_counter() + SIZES.updates_budget_s
        for repeat in range(-2, SIZES.updates):
            self._give_gradients()
            # As after the passes of a step, nothing of the optimizer's state is in the cache.
            other.add_(1)
            accelerator.synchronize(self._device)
            begun = time.perf_counter()
            self._update()
            accelerator.synchronize(self._device)
            if repeat >= 0:
                taken.append(time.perf_counter() - begun)
                if time.perf_counter() > deadline:
                    break
        return statistics.median(taken)

    def state_share(self) -> float:
        """Return bytes of the state per byte of parameters, after an update, without single
        numbers; at least that of Adam where an optimizer may hold more of it by itself.
        """
        values = (v for state in self._optimizer.state.values() for v in state.values())
        kept = sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.dim())
        share = kept / max(sum(p.nbytes for p in self._held.values() if p.dim()), 1)
        return max(share, ADAM_STATE) if unlike_torchs(self._optimizer) else share

    def _give_gradients(self) -> None:
        """Give copies gradients of the kind that they have in training: rows for ``SparseAdam``,
        which takes nothing else, and for sparse tables if the optimizer is not PyTorch's.
        """
        optimizer, named = self._optimizer, self._workload.module.named_modules()
        has_rows = set(self._held) if isinstance(optimizer, torch.optim.SparseAdam) else set()
        if taken_gradients(optimizer) is TakenGradients.SPARSE:
            has_rows |= {
                f"{path}.weight" if path else "weight"
                for path, part in named
                if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
            }
        for name, parameter in self._held.items():
            gradient = torch.full_like(parameter, 1e-3)
            is_sparse = name in has_rows and gradient.dim()
            parameter.grad = gradient.to_sparse(1) if is_sparse else gradient

    def _update(self) -> None:
        gradients = gradients_of(self._held)
        if self._workload.clip_norm is None:
            bad_names(gradients)
        else:
            (squares,) = squares_of([*gradients.values()])
            # As if the norm were too large, since only then clipping costs something.
            clip(self._held, float(squares), 1e-12)
        with naming_line("the optimizer of the Workload raised in an update,"):
            self._optimizer.step()


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> UpdateCost:
    """Fit non-negative figures to the times; with too few times the first terms are left out."""
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
