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

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from anabranch import launch
from anabranch.device.accelerator import claim
from anabranch.graph.capture import Captured, capture_workload
from anabranch.graph.loss_kinds import told
from anabranch.graph.reverted import unchanged_state
from anabranch.graph.slices import whole_name
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.plans.whole_batch import with_whole_batches
from anabranch.runtime import plan_parts as steps
from anabranch.runtime.compute.options import ComputeOptions, Dropout
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
    merged,
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
    captured = captured or steps.captured_for(workload, plan)
    if workload.buckets and batch is None:
        examples = [workload.example, *workload.buckets]
        again = partial(verify, exact=exact, timeout=timeout, device=device, dropout=dropout)
        results = [
            again(
                replace(workload, example=example, buckets=()),
                plan if bucket is captured else replace(plan, model_size=None),  # made for one
                batch=example,
                captured=bucket,
            )
            for bucket, example in zip(steps.buckets_of(captured, workload), examples, strict=True)
        ]
        worst = max(results, key=lambda result: (not result.is_good, result.max_gradient_error))
        note = f"the largest difference of {len(results)} sizes of batches"
        return replace(worst, notes=(*worst.notes, note))
    if batch is None and workload.data is not None:
        batch = next(iter(workload.data(plan.stage_graph.batch_size, 0)))
    batch = captured.layout.packed(workload.example if batch is None else batch)
    size = num_samples(batch)
    graph = with_whole_batches(replace(plan.stage_graph, batch_size=size), captured.graph)
    plan = even.in_equal_slices(captured, replace(plan, stage_graph=graph))
    batch, size = take(batch, 0, plan.stage_graph.batch_size), plan.stage_graph.batch_size
    plan = even.in_several(captured, plan)
    exact = exact and steps.can_be_exact(plan.stage_graph) and not plan.rewrites
    steps.prepare(captured, plan.stage_graph)
    parts = steps.parts_of(captured, plan, exact=False)
    programs = [parts.program(s, captured.programs.samples) for s in range(len(plan.stage_graph))]
    slices = _slices(plan.stage_graph, [program.has_loss for program in programs].index(True))
    module = workload.module
    is_random = any(draws_random(program.module, dropout) for program in programs)
    if is_random and dropout == "off":  # the module and its capture would draw other numbers
        dropout = "sample"
    by_sample = is_random and dropout == "sample"
    options = ComputeOptions("fp32", dropout=dropout)  # in half precision all differ
    seed = torch.initial_seed()
    stages = range(len(plan.stage_graph))
    has_one_slicing = all(_slices(plan.stage_graph, stage) == slices for stage in stages)
    against = _against(
        captured, batch, slices, by_sample=by_sample, has_one_slicing=has_one_slicing
    )
    has_whole = not (is_random or captured.graph.normalised or captured.graph.stateful)
    alone = even.one_after_the_other(captured, plan)
    if against == CAPTURED:
        alone = even.on_one_device(captured, plan, slices[0][1])

    def one_rank(plan: Plan, *, check_memory: bool = True) -> tuple[float, dict[str, Tensor]]:
        """Return the loss, and the gradients of the parameters that this rank holds."""
        torch.manual_seed(seed)
        pipeline = Pipeline(
            workload,
            plan,
            captured=captured,
            exact=exact,
            compute=options,
            check_gradients=False,
            check_memory=check_memory,
            device=device,
        )
        loss, gradients = pipeline.gradients(batch)
        return loss, _on_cpu(gradients)

    def repeated() -> tuple[str, ...]:
        """Return notes on a second call of the module, without dropout and with equal numbers."""
        with NoDropout(), unchanged_state(captured), same_numbers(module):
            first = reference(module, batch, [(0, size)]).loss
        with NoDropout():
            return require_repeatable(captured, batch, first)

    def one_device() -> tuple[Reference, Reference | None, tuple[str, ...]]:
        notes = () if meta_names(module) else repeated()
        loss, gradients = one_rank(alone, check_memory=False)
        return Reference(loss, {}, gradients), None, notes

    def one_process() -> tuple[Reference, Reference | None, tuple[str, ...]]:
        require_values(module, materialise(module, seed=seed % SEEDS))
        if device is not None:
            claim(place := own_device(device))
            module.to(place)
        calls = slices if against == SLICES else [(0, size)]
        with NoDropout() if dropout == "off" else nullcontext():
            expected = reference(module, batch, calls, captured.weights)
            whole = reference(module, batch, [(0, size)]) if has_whole else None
            notes = repeated() if whole is None else require_repeatable(captured, batch, whole.loss)
        return _fetched(expected), whole and _fetched(whole), notes

    on_captured = against in (CAPTURED, SAME_STAGES)
    ((expected, whole, notes),) = launch.run(
        one_device if on_captured else one_process, 1, timeout=timeout
    )
    require_signal(expected)
    num_devices = len(plan.stage_graph.devices)
    ranks = launch.run(one_rank, num_devices, plan, timeout=timeout)
    loss = ranks[0][0]
    gradients = merged(part for _, part in ranks)
    others = sliced_like(expected, gradients)
    bitwise = loss == expected.loss and gradients.keys() == others.keys()
    bitwise = bitwise and all(torch.equal(g, others[n]) for n, g in gradients.items())
    error, worst_name = largest_error(gradients, others)
    notes += (*told(None, captured.graph.normalised, captured.graph.stateful),)
    return VerifyResult(
        loss,
        expected.loss,
        error,
        worst_name,
        bitwise,
        exact,
        len(set(map(whole_name, gradients))),
        num_devices,
        is_random=is_random and not by_sample,
        loss_kind=captured.graph.loss_kind or "mean",
        whole_batch_error=largest_error(gradients, sliced_like(whole, gradients))[0]
        if whole
        else None,
        against=against,
        notes=notes,
        tolerance=tolerance_of(captured),
        stateful=captured.graph.stateful,
        foreign=captured.foreign,
    )


def _against(
    captured: Captured,
    batch: Batch,
    slices: list[tuple[int, int]],
    *,
    by_sample: bool,
    has_one_slicing: bool,
) -> str:
    """Choose the program for one process that computes the same numbers."""
    if by_sample:
        return CAPTURED
    if captured.graph.normalised and not has_one_slicing:
        return SAME_STAGES
    if slices == [(0, num_samples(batch))] and not captured.graph.normalised:
        return WHOLE if captured.graph.loss_kind == "coupled" else SLICES
    tensors = captured.layout.flatten(batch)
    if captured.graph.loss_kind != "coupled" and captured.programs.is_even(tensors, slices):
        return SLICES
    changes = captured.graph.normalised or captured.graph.stateful
    return SAME_STAGES if changes else WHOLE


def _fetched(result: Reference) -> Reference:
    return replace(result, gradients=_on_cpu(result.gradients))


def _on_cpu(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients on the CPU, which can be sent to another process."""
    return {name: gradient.cpu() for name, gradient in gradients.items()}


def _slices(graph: StageGraph, stage: int) -> list[tuple[int, int]]:
    """Return the intervals of samples of the slices of a stage, ascending."""
    slices = [
        graph.slice(stage, microbatch, replica)
        for microbatch in range(graph.num_microbatches(stage))
        for replica in range(graph.stages[stage].replicas)
    ]
    return [(start, stop) for start, stop in slices if start < stop]
