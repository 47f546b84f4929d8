"""Estimated costs of every operator on a GPU that is not here, from its data sheet.

The operators run on meta tensors at two sample counts, which gives their ``kernels``. The sizes of
a kernel are affine functions of the samples, so two counts give every other; the data sheet turns
sizes into seconds (``data_sheets``). Expect the right order of operators and about a third of error
in absolute seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from anabranch.graph.capture import Captured
from anabranch.graph.split import StageProgram
from anabranch.profile.data_sheets import DATA_SHEETS, DataSheet, Floats
from anabranch.profile.kept_bytes import KeptBytes, per_sample
from anabranch.profile.kernels import Kernel, MetaRun, Recorder
from anabranch.profile.operator_runner import (
    example_batch,
    operator_programs,
    run_operators,
    workable_counts,
)
from anabranch.profile.profile import OpCost, Profile

Precision = Literal["float32", "tf32"]

_FEW, _MANY = 2, 4
"""The sample counts that are looked at. Not 1: a dimension of one sample may vanish."""


def estimate(
    captured: Captured,
    device: str = "v100",
    samples: Sequence[int] = (1, 2, 4, 8, 16, 32),
    *,
    precision: Precision = "float32",
) -> Profile:
    """Estimate the operators of a captured model.

    Args:
        captured: the model; one on the meta device will do.
        device: a key of ``DATA_SHEETS``.
        samples: sample counts; any number of them costs about the same.
        precision: how matrix products of float32 tensors run. ``float32`` is PyTorch's default and
            what the published pipeline systems used; ``tf32`` is what
            ``torch.set_float32_matmul_precision`` "high" gives on an A100 or H100. Convolutions
            run in tf32 there whatever this says, as cuDNN does by default.

    Raises:
        ValueError: for an unknown device or precision, or sample counts that are not positive.
    """
    if device not in DATA_SHEETS:
        raise ValueError(f"no data sheet for {device!r}; there is one for {', '.join(DATA_SHEETS)}")
    if precision not in ("float32", "tf32"):
        raise ValueError(f"precision {precision!r} is neither float32 nor tf32")
    counts = sorted(set(samples))
    if not counts or counts[0] < 1:
        raise ValueError(f"cannot estimate at {counts} samples")
    if counts[0] < _FEW:
        counts = workable_counts(captured, counts, torch.device("meta"))
    few, many = _Trace.of(captured, _FEW), _Trace.of(captured, _MANY)
    sheet = DATA_SHEETS[device]
    if few.is_like(many):
        traces = [few.towards(many, (n - _FEW) / (_MANY - _FEW)) for n in counts]
    else:  # the model does something else for other sample counts
        traces = [_Trace.of(captured, n) for n in counts]
    seconds = [trace.seconds(sheet, precision) for trace in traces]
    kept = per_sample(few.kept, many.kept, (_FEW, _MANY))
    costs = tuple(
        OpCost(
            tuple(float(s[0, op]) for s in seconds),
            tuple(float(s[1, op]) for s in seconds),
            kept[op],
        )
        for op in range(len(captured.graph))
    )
    name = device if precision == "float32" else f"{device} ({precision})"
    graph = replace(captured.graph, granularity=captured.granularity)
    return Profile(graph, tuple(counts), costs, device=name, source="estimated")


@dataclass(frozen=True)
class _Trace:
    """All kernels of a step, in order: which operator and pass each belongs to, and their sizes.

    Attributes:
        passes: per kernel 0 (forward) or 1 (backward).
        ops: per kernel its operator.
        nbytes: per kernel.
        products: per matrix product m, n, k, batch; shape (products, 4).
        kept: per operator, bytes kept for the backward.
    """

    kernels: tuple[Kernel, ...]
    passes: tuple[int, ...]
    ops: tuple[int, ...]
    nbytes: Floats
    products: Floats
    kept: tuple[int, ...]

    @staticmethod
    def of(captured: Captured, samples: int) -> _Trace:
        meta = torch.device("meta")
        program = operator_programs(captured, samples, meta)
        batch = example_batch(captured, samples, meta)
        tensors = _meta_tensors(program)
        at_hand = [t for named in tensors for t in named.values()]
        watch = _Watch(KeptBytes(len(program), [*at_hand, *batch.values()]))

        def call(op: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
            result: Sequence[Tensor] = MetaRun(program[op].module, tensors[op]).run(*inputs)
            return result

        run_operators(program, batch, call, watch)
        kernels = tuple(k for _, _, k in watch.seen)
        products = [p for k in kernels for p in k.products]
        return _Trace(
            kernels,
            tuple(p for p, _, _ in watch.seen),
            tuple(op for _, op, _ in watch.seen),
            np.array([k.nbytes for k in kernels], dtype=np.float64),
            np.array(products, dtype=np.float64).reshape(-1, 4),
            tuple(watch.kept.nbytes),
        )

    def is_like(self, other: _Trace) -> bool:
        """Whether only the sizes differ."""

        def kinds(trace: _Trace) -> list[object]:
            return [(k.name, k.dtype, len(k.products), k.launches) for k in trace.kernels]

        return (self.ops, self.passes, kinds(self)) == (other.ops, other.passes, kinds(other))

    def towards(self, other: _Trace, t: float) -> _Trace:
        """The line through the sizes of this trace (t = 0) and of one like it (t = 1)."""
        return replace(
            self,
            nbytes=np.maximum(self.nbytes + t * (other.nbytes - self.nbytes), 0),
            products=np.maximum(self.products + t * (other.products - self.products), 0),
        )

    def seconds(self, sheet: DataSheet, precision: Precision) -> Floats:
        """Forward and backward seconds per operator; shape (2, operators)."""
        owner = np.repeat(np.arange(len(self.kernels)), [len(k.products) for k in self.kernels])
        formats = np.array([_number_format(self.kernels[i], precision) for i in owner])
        compute = np.zeros(len(self.kernels))
        for number_format in set(formats.tolist()):
            chosen = formats == number_format
            m, n, k, batch = self.products[chosen].T
            np.add.at(compute, owner[chosen], sheet.matmul_s(m, n, k, batch, number_format))
        launches = np.array([k.launches for k in self.kernels], dtype=np.float64)
        result = np.zeros((2, len(self.kept)))
        kernel_s = sheet.kernel_s(self.nbytes, compute, launches)
        np.add.at(result, (np.array(self.passes), np.array(self.ops)), kernel_s)
        return result


class _Watch:
    """Observes kernels, and what is kept."""

    def __init__(self, kept: KeptBytes) -> None:
        self.kept = kept
        self.seen: list[tuple[int, int, Kernel]] = []

    @contextmanager
    def _recorded(self, which: int, op: int) -> Iterator[None]:
        with Recorder() as recorder:
            yield
        self.seen += [(which, op, kernel) for kernel in recorder.kernels]

    @contextmanager
    def forward(self, op: int) -> Iterator[None]:
        with self.kept.forward(op), self._recorded(0, op):
            yield

    def made(self, op: int, outputs: Sequence[Tensor]) -> None:
        self.kept.made(op, outputs)

    def backward(self, op: int) -> AbstractContextManager[None]:
        return self._recorded(1, op)


def _meta_tensors(program: Sequence[StageProgram]) -> list[dict[str, Tensor]]:
    """Meta tensors in place of parameters and buffers, one for each however often it is read."""

    @cache
    def twin(tensor: Tensor) -> Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if tensor.requires_grad:
            # Gradients are added to those of earlier micro-batches, which is a kernel too.
            meta.requires_grad_().grad = torch.empty_like(meta)
        return meta

    states = []
    for module in (step.module for step in program):
        parameters = module.named_parameters(remove_duplicate=False)
        named = chain(parameters, module.named_buffers(remove_duplicate=False))
        states.append({name: twin(tensor) for name, tensor in named})
    return states


def _number_format(kernel: Kernel, precision: Precision) -> str:
    if kernel.dtype != torch.float32:
        return str(kernel.dtype).removeprefix("torch.")
    # torch.backends.cudnn.allow_tf32 is on by default, other than that of matrix products.
    return "tf32" if "convolution" in kernel.name else precision
