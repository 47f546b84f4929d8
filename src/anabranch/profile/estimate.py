"""Estimated costs of every operator on a GPU that is not here, from its data sheet.

The operators run on meta tensors at two sample counts, which gives their ``kernels``;
``kernel_trace`` extends these to other sample counts and turns them into seconds. Expect the right
order of operators and about a third of error in absolute seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config

from anabranch.graph.capture import Captured
from anabranch.graph.cutting.split import StageProgram
from anabranch.graph.cutting.weight_calls import waiting_bytes
from anabranch.profile import kernel_trace, operator_runner
from anabranch.profile.data_sheets import DATA_SHEETS
from anabranch.profile.kernels import MetaRun, Recorder, cannot_estimate
from anabranch.profile.operator_bytes import BytesObserver
from anabranch.profile.profile import Profile
from anabranch.profile.storages import TensorWatch


def estimate(
    captured: Captured,
    device: str = "v100",
    samples: Sequence[int] = (1, 2, 4, 8, 16, 32),
    *,
    precision: kernel_trace.MatmulPrecision = "float32",
) -> Profile:
    """Estimate the operators of a captured model.

    Args:
        captured: the model; it may be on the meta device.
        device: a key of ``DATA_SHEETS``.
        samples: sample counts; any number of them costs about the same.
        precision: how matrix products of float32 tensors run. ``float32`` is PyTorch's default and
            what the published pipeline systems used; ``tf32`` is what
            ``torch.set_float32_matmul_precision`` "high" gives on an A100 or H100. Convolutions
            run in tf32 there whatever this says, as cuDNN does by default.

    Raises:
        ValueError: for an unknown device or precision, or sample counts that are not positive.
    """
    counts = kernel_trace.checked_counts(device, samples, precision)
    if counts[0] < kernel_trace.FEW:
        counts = operator_runner.workable_counts(captured, counts, torch.device("meta"))
    traced = trace(captured)
    if traced.is_affine:
        return traced.profile(device, counts, precision)
    sheet = DATA_SHEETS[device]  # other sample counts run other kernels: trace each
    traces = [_kernels(captured, n) for n in counts]
    seconds = [t.seconds(t.nbytes, t.products, sheet, precision) for t in traces]
    return traced.with_seconds(counts, seconds, device, precision)


def trace(captured: Captured) -> kernel_trace.TracedModel:
    """Trace the kernels of a captured model, which may be on the meta device."""
    few, many = (_kernels(captured, samples) for samples in (kernel_trace.FEW, kernel_trace.MANY))
    return kernel_trace.TracedModel(captured.graph, few, many)


def _kernels(captured: Captured, samples: int) -> kernel_trace.KernelTrace:
    """Trace the kernels that a step with this many samples launches."""
    meta = torch.device("meta")
    program = operator_runner.operator_programs(captured, samples, meta)
    batch = operator_runner.example_batch(captured, samples, meta)
    tables = {p.name for p in captured.graph.parameters if p.table is not None and p.table.sparse}
    tensors = _meta_tensors(program, tables)
    at_hand = [t for named in tensors for t in named.values()]
    at_hand += [t.grad for t in at_hand if t.grad is not None]
    seen: list[tuple[int, int, kernel_trace.Kernel]] = []

    @contextmanager
    def recorded(op: int, is_backward: bool) -> Iterator[None]:
        with Recorder() as recorder:
            try:
                yield
            except (RuntimeError, TypeError, ValueError) as error:
                name, step = captured.graph.ops[op].name, "backward" if is_backward else "forward"
                raise cannot_estimate(f"the {step} of operator {name}", error) from error
        seen.extend((int(is_backward), op, kernel) for kernel in recorder.kernels)

    nbytes = BytesObserver(len(program), [*at_hand, *batch.values()], recorded)

    def call(op: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        result: Sequence[Tensor] = MetaRun(program[op].module, tensors[op]).run(*inputs)
        return result

    # A mask chooses all entries: the most that a batch can need.
    settings: Any = _config
    with settings.patch(meta_nonzero_assume_all_nonzero=True), TensorWatch(nbytes.see):
        operator_runner.run_operators(program, batch, call, nbytes)
    return kernel_trace.KernelTrace(
        tuple(kernel for _, _, kernel in seen),
        tuple(which for which, _, _ in seen),
        tuple(op for _, op, _ in seen),
        tuple(nbytes.kept),
        tuple(nbytes.working),
        tuple(map(waiting_bytes, program)),
    )


def _meta_tensors(
    program: Sequence[StageProgram], sparse: Collection[str]
) -> list[dict[str, Tensor]]:
    """Return meta tensors in place of parameters and buffers, one for each however often read.

    Args:
        sparse: names of parameters with sparse gradients, which are not added to dense ones.
    """

    @cache
    def twin(tensor: Tensor, has_dense_gradient: bool) -> Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if tensor.requires_grad:
            meta.requires_grad_()
        if tensor.requires_grad and has_dense_gradient:
            # Adding gradients to those of earlier micro-batches is a kernel too.
            meta.grad = torch.empty_like(meta)
        return meta

    states = []
    for module in (step.module for step in program):
        parameters = module.named_parameters(remove_duplicate=False)
        named = chain(parameters, module.named_buffers(remove_duplicate=False))
        states.append({name: twin(tensor, name not in sparse) for name, tensor in named})
    return states
