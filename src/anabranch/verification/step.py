"""Gradients of a pipeline against those of the model: one step on local ranks and in one process.

Both start from the same weights and take the same batch. The one process runs the user's own
module, not the captured one, over the same slices in the same order::

    local ranks      stages, micro-batches, messages      --> loss, gradient of every parameter
    one process      module(slice 0), module(slice 1) ..  --> loss, gradient of every parameter
    one process      module(batch)                        --> loss, gradient of every parameter

In exact mode the first two are bitwise equal if stages have one micro-batch size and no replicas,
otherwise they differ by rounding. The third shows whether micro-batches change what is trained:
only batch normalisation may. The module is called twice, because its second result may differ; a
captured program always has the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from anabranch import launch
from anabranch.device.accelerator import claim
from anabranch.graph.capture import Captured, capture_workload
from anabranch.graph.loss_kinds import loss_notes
from anabranch.graph.reverted import unchanged_state
from anabranch.graph.slices import whole_name
from anabranch.plans.plan import Plan
from anabranch.plans.whole_batch import with_whole_batches
from anabranch.runtime import plan_parts
from anabranch.runtime.compute.options import ComputeOptions, Dropout
from anabranch.runtime.data_parallel.buckets import dense
from anabranch.runtime.numerics.dropout import NoDropout
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.ranks.placement import own_device
from anabranch.runtime.reference import (
    Reference,
    draws_random,
    num_samples,
    reference,
    require_repeatable,
    same_numbers,
    take,
)
from anabranch.runtime.state.initialisation import SEEDS, materialise, meta_names, require_values
from anabranch.verification import even
from anabranch.verification.result import (
    CAPTURED,
    SAME_STAGES,
    SLICES,
    WHOLE,
    VerifyResult,
    largest_error,
    require_signal,
    sliced_like,
    tolerance_of,
)
from anabranch.workload import Batch, Workload


def verify(
    workload: Workload,
    plan: Plan | int,
    *,
    batch: Batch | None = None,
    captured: Captured | None = None,
    exact: bool = True,
    timeout: float = 300.0,
    device: str | None = None,
    dropout: Dropout = "off",
) -> VerifyResult:
    """Compare one step of a pipeline on local ranks with one process.

    Dropout is switched off on both sides, unless ``dropout`` says otherwise. If every stage has one
    micro-batch, the batch is cut into two, to test several. With batch normalisation and replicas,
    sizes are chosen so that replicas of a stage have as many samples each.

    Args:
        workload: the model; its optimizer is not used.
        plan: plan to run, or a number of devices for a plan that cuts the model evenly.
        batch: samples to run on; by default as many as the plan's batch, from the workload's data
            or else its example; with buckets every example, and the worst result is returned.
        captured: the captured module, if the caller has it.
        exact: run in exact mode if stages have no replicas and one micro-batch size.
        timeout: seconds for each of the two runs.
        device: device of both sides; see ``Pipeline``.
        dropout: see ``ComputeOptions``; ``sample`` compares a model that draws random numbers with
            the captured model on one device, which draws the same ones. So does ``off`` if the
            model draws other numbers than dropout, as diffusion models and autoencoders draw noise.

    Raises:
        CaptureError, InvalidPlanError: if a side cannot run.
        TrainingError: if a side cannot run; or if the second call of the module has another result,
            or there is neither loss nor gradient.
    """
    if isinstance(plan, int):
        captured = captured or capture_workload(workload)
        size = num_samples(workload.example if batch is None else batch)
        plan = even.workable(captured, even.even_plan(captured.graph, plan, size))
    captured = captured or plan_parts.captured_for(workload, plan)
    if workload.buckets and batch is None:
        compare = partial(verify, exact=exact, timeout=timeout, device=device, dropout=dropout)
        return _largest_of_buckets(workload, plan, captured, compare)
    if batch is None and workload.data is not None:
        batch = next(iter(workload.data(plan.stage_graph.batch_size, 0)))
    batch = captured.layout.packed(workload.example if batch is None else batch)
    graph = replace(plan.stage_graph, batch_size=num_samples(batch))
    graph = with_whole_batches(graph, captured.graph)
    plan = even.in_equal_slices(captured, replace(plan, stage_graph=graph))
    batch = take(batch, 0, plan.stage_graph.batch_size)
    plan = even.in_several(captured, plan)
    exact = exact and plan_parts.can_be_exact(plan.stage_graph) and not plan.rewrites
    return _Comparison(workload, plan, captured, batch, exact, device, dropout).result(timeout)


def _largest_of_buckets(
    workload: Workload, plan: Plan, captured: Captured, compare: Callable[..., VerifyResult]
) -> VerifyResult:
    """Compare one batch of every bucket, and return the result with the largest difference."""
    examples = [workload.example, *workload.buckets]
    results = [
        compare(
            replace(workload, example=example, buckets=()),
            plan if bucket is captured else replace(plan, model_size=None),  # made for one
            batch=example,
            captured=bucket,
        )
        for bucket, example in zip(plan_parts.buckets_of(captured, workload), examples, strict=True)
    ]
    largest = max(results, key=lambda result: (not result.is_good, result.max_gradient_error))
    note = f"the largest difference of {len(results)} sizes of batches"
    return replace(largest, notes=(*largest.notes, note))


class _Comparison:
    """One step of a plan on local ranks, and the same step in one process.

    Args:
        batch: packed, with as many samples as the plan's batch.
        exact: whether ranks run in exact mode.
    """

    def __init__(
        self,
        workload: Workload,
        plan: Plan,
        captured: Captured,
        batch: Batch,
        exact: bool,
        device: str | None,
        dropout: Dropout,
    ) -> None:
        self._workload, self._plan, self._captured, self._batch = workload, plan, captured, batch
        self._exact, self._device = exact, device
        self._seed = torch.initial_seed()
        graph = plan.stage_graph
        plan_parts.prepare(captured, graph)
        parts = plan_parts.parts_of(captured, plan, exact=False)
        programs = [parts.program(s, captured.programs.samples) for s in range(len(graph))]
        slicings = [graph.slices(stage) for stage in range(len(graph))]
        self._slices = slicings[[program.has_loss for program in programs].index(True)]
        self._is_random = any(draws_random(program.module, dropout) for program in programs)
        if self._is_random and dropout == "off":  # the module and its capture draw other numbers
            dropout = "sample"
        self._options = ComputeOptions("fp32", dropout=dropout)  # in half precision all differ
        self._by_sample = self._is_random and dropout == "sample"
        has_one_slicing = all(slicing == self._slices for slicing in slicings)
        self._against = self._program_of_one_process(has_one_slicing)

    def _program_of_one_process(self, has_one_slicing: bool) -> str:
        """Choose the program for one process that computes the same numbers."""
        captured = self._captured
        if self._by_sample:
            return CAPTURED
        if captured.graph.normalised and not has_one_slicing:
            return SAME_STAGES
        if self._slices == [self._whole] and not captured.graph.normalised:
            return WHOLE if captured.graph.loss_kind == "coupled" else SLICES
        tensors = captured.layout.flatten(self._batch)
        if captured.graph.loss_kind != "coupled" and captured.programs.is_even(
            tensors, self._slices
        ):
            return SLICES
        changes = captured.graph.normalised or captured.graph.stateful
        return SAME_STAGES if changes else WHOLE

    @property
    def _whole(self) -> tuple[int, int]:
        return 0, self._plan.stage_graph.batch_size

    def result(self, timeout: float) -> VerifyResult:
        """Run both sides, each in at most ``timeout`` seconds, and compare them."""
        captured, num_devices = self._captured, len(self._plan.stage_graph.devices)
        if self._against == CAPTURED:
            alone = even.on_one_device(captured, self._plan, self._slices[0][1])
        else:
            alone = even.one_after_the_other(captured, self._plan)
        on_captured = self._against in (CAPTURED, SAME_STAGES)
        one_process = partial(self._on_one_device, alone) if on_captured else self._module
        ((expected, whole, notes),) = launch.run(one_process, 1, timeout=timeout)
        require_signal(expected)
        ranks = launch.run(self._rank, num_devices, self._plan, timeout=timeout)
        loss = ranks[0][0]
        gradients = {name: dense(g) for _, part in ranks for name, g in part.items()}
        others = sliced_like(expected, gradients)
        bitwise = loss == expected.loss and gradients.keys() == others.keys()
        bitwise = bitwise and all(torch.equal(g, others[n]) for n, g in gradients.items())
        error, worst_name = largest_error(gradients, others)
        return VerifyResult(
            loss,
            expected.loss,
            error,
            worst_name,
            bitwise,
            self._exact,
            len(set(map(whole_name, gradients))),
            num_devices,
            is_random=self._is_random and not self._by_sample,
            loss_kind=captured.graph.loss_kind or "mean",
            whole_batch_error=largest_error(gradients, sliced_like(whole, gradients))[0]
            if whole
            else None,
            against=self._against,
            notes=(*notes, *loss_notes(None, captured.graph.normalised, captured.graph.stateful)),
            tolerance=tolerance_of(captured),
            stateful=captured.graph.stateful,
            foreign=captured.foreign,
        )

    def _rank(self, plan: Plan, *, check_memory: bool = True) -> tuple[float, dict[str, Tensor]]:
        """Return the loss, and the gradients of the parameters that this rank holds."""
        torch.manual_seed(self._seed)
        pipeline = Pipeline(
            self._workload,
            plan,
            captured=self._captured,
            exact=self._exact,
            compute=self._options,
            check_gradients=False,
            check_memory=check_memory,
            device=self._device,
        )
        loss, gradients = pipeline.gradients(self._batch)
        return loss, _on_cpu(gradients)

    def _on_one_device(self, plan: Plan) -> tuple[Reference, Reference | None, tuple[str, ...]]:
        notes = () if meta_names(self._workload.module) else self._repeated()
        loss, gradients = self._rank(plan, check_memory=False)
        return Reference(loss, {}, gradients), None, notes

    def _module(self) -> tuple[Reference, Reference | None, tuple[str, ...]]:
        """Run the user's module; on the whole batch, too, where results may be compared with it."""
        captured, module, batch = self._captured, self._workload.module, self._batch
        require_values(module, materialise(module, seed=self._seed % SEEDS))
        if self._device is not None:
            claim(device := own_device(self._device))
            module.to(device)
        calls = self._slices if self._against == SLICES else [self._whole]
        has_whole = not (self._is_random or captured.graph.normalised or captured.graph.stateful)
        with NoDropout() if self._options.dropout == "off" else nullcontext():
            expected = reference(module, batch, calls, captured.weights)
            whole = reference(module, batch, [self._whole]) if has_whole else None
            if whole is None:
                notes = self._repeated()
            else:
                notes = require_repeatable(captured, batch, whole.loss)
        return _fetched(expected), whole and _fetched(whole), notes

    def _repeated(self) -> tuple[str, ...]:
        """Return notes on a second call of the module, without dropout and with equal numbers."""
        module = self._workload.module
        with NoDropout(), unchanged_state(self._captured), same_numbers(module):
            first = reference(module, self._batch, [self._whole]).loss
        with NoDropout():
            return require_repeatable(self._captured, self._batch, first)


def _fetched(result: Reference) -> Reference:
    return replace(result, gradients=_on_cpu(result.gradients))


def _on_cpu(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients on the CPU, which can be sent to another process."""
    return {name: gradient.cpu() for name, gradient in gradients.items()}
