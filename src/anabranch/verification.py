"""Gradients of a pipeline against those of the model: one step on local ranks and in one process.

Both start from the same weights and take the same batch. The one process runs the user's own
module, not the captured one, over the same slices in the same order::

    local ranks      stages, micro-batches, messages      --> loss, gradient of every parameter
    one process      module(slice 0), module(slice 1) ..  --> loss, gradient of every parameter

In exact mode the two are bitwise equal, otherwise they differ by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from anabranch import launch
from anabranch.errors import CaptureError, InfeasiblePlanError, TrainingError
from anabranch.graph.capture import Captured, capture
from anabranch.graph.opgraph import OpGraph
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.runtime import plan_parts as steps
from anabranch.runtime.compute.options import ComputeOptions, Dropout
from anabranch.runtime.compute.programs import is_random as is_random_module
from anabranch.runtime.data_parallel.buckets import dense
from anabranch.runtime.initialisation import SEEDS, materialise, require_values
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.placement import claim, own_device
from anabranch.runtime.reference import Reference, num_samples, reference
from anabranch.schedule import rule_named
from anabranch.workload import Batch, Workload

_NOISE = 1e-3


@dataclass(frozen=True)
class VerifyResult:
    """How far apart they are.

    Attributes:
        loss, reference_loss: of the pipeline and of one process.
        max_gradient_error: largest over the parameters of max|a - b| / max|b|. Where additions may
            be in another order (not exact), |b| counts as at least a thousandth of the largest
            gradient: some gradients are zero but for rounding, such as that of an attention's key
            bias.
        worst: the parameter that it belongs to.
        bitwise: loss and all gradients are equal in every bit.
        exact: the pipeline ran in the mode in which they have to be.
        num_parameters: parameters that were compared.
        num_devices: ranks of the pipeline.
        is_random: the model draws random numbers, others in the pipeline than in one process.
        by_sample: it draws them by sample, the same ones in both; the one process then runs the
            captured model, because the user's own module has no such numbers.
    """

    loss: float
    reference_loss: float
    max_gradient_error: float
    worst: str
    bitwise: bool
    exact: bool
    num_parameters: int
    num_devices: int
    is_random: bool = False
    by_sample: bool = False

    def summary(self) -> str:
        """One line."""
        how = "bitwise equal" if self.bitwise else f"largest at {self.worst}"
        if self.is_random:
            how += (
                "; the model draws random numbers, such as dropout, and other ones in one process, "
                'so this says nothing: compare with dropout="sample" (--dropout sample), or switch '
                "them off"
            )
        if self.by_sample:
            how += "; random numbers by sample, in one process of the captured model"
        devices = f"{self.num_devices} device{'s' if self.num_devices > 1 else ''}"
        return (
            f"gradient error {self.max_gradient_error:.3g} over {self.num_parameters} parameters "
            f"on {devices} ({how}); loss {self.loss:.9g}, in one process "
            f"{self.reference_loss:.9g}"
        )


def verify(
    workload: Workload,
    plan: Plan | int,
    *,
    batch: Batch | None = None,
    captured: Captured | None = None,
    exact: bool = True,
    timeout: float = 300.0,
    device: str | None = None,
    dropout: Dropout = "stage",
) -> VerifyResult:
    """Compare one step of a pipeline on local ranks with one process.

    A model that draws random numbers (dropout) differs by them: switch them off, or let it draw
    them by sample.

    Args:
        workload: its data and optimizer are not used.
        plan: what to run, or a number of devices for a plan that cuts the model evenly.
        batch: samples to run on; by default as many as the plan's batch, from the workload's data
            or else its example.
        captured: the captured module, where the caller has it.
        exact: run in exact mode where the plan allows it: one replica per stage, one micro-batch
            size.
        timeout: seconds for each of the two runs.
        device: where both run; see ``Pipeline``.
        dropout: see ``ComputeOptions``; ``sample`` compares a model that draws random numbers with
            the captured model on one device, which draws the same ones.

    Raises:
        CaptureError, InvalidPlanError, TrainingError: if a side cannot run.
    """
    if isinstance(plan, int):
        captured = captured or capture(workload.module, workload.example)
        plan = _workable(
            captured, even_plan(captured.graph, plan, num_samples(batch or workload.example))
        )
    captured = captured or steps.captured_for(workload, plan)
    if batch is None and workload.data is not None:
        batch = next(iter(workload.data(plan.stage_graph.batch_size, 0)))
    batch = workload.example if batch is None else batch
    size = num_samples(batch)
    plan = replace(plan, stage_graph=replace(plan.stage_graph, batch_size=size))
    exact = exact and steps.can_be_exact(plan.stage_graph)
    steps.prepare(captured, plan.stage_graph)
    parts = steps.parts_of(captured, plan, exact=False)
    programs = [parts.program(s, captured.samples) for s in range(len(plan.stage_graph))]
    slices = _slices(plan.stage_graph, [program.has_loss for program in programs].index(True))
    module = workload.module
    is_random = any(is_random_module(program.module) for program in programs)
    by_sample = is_random and dropout == "sample"
    options = ComputeOptions(dropout=dropout)
    seed = torch.initial_seed()

    def one_rank(plan: Plan, *, check_memory: bool = True) -> tuple[float, dict[str, Tensor]]:
        """Loss, and the gradients of the parameters that this rank holds."""
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

    def one_device() -> Reference:
        alone = _on_one_device(captured, plan, slices[0][1])
        loss, gradients = one_rank(alone, check_memory=False)
        return Reference(loss, {}, gradients)

    def one_process() -> Reference:
        require_values(module, materialise(module, seed=seed % SEEDS))
        if device is not None:
            claim(place := own_device(device))
            module.to(place)
        found = reference(module, batch, slices)
        return replace(found, gradients=_on_cpu(found.gradients))

    (expected,) = launch.run(one_device if by_sample else one_process, 1, timeout=timeout)
    num_devices = len(plan.stage_graph.devices)

    results = launch.run(one_rank, num_devices, plan, timeout=timeout)
    gradients = {name: g for _, part in results for name, g in part.items()}
    result = _compare(results[0][0], gradients, expected, exact, num_devices)
    return replace(result, is_random=is_random and not by_sample, by_sample=by_sample)


def _on_one_device(captured: Captured, plan: Plan, size: int) -> Plan:
    """The same batch through one stage of all operators, in micro-batches of a size."""
    names = tuple(op.name for op in captured.graph.ops)
    graph = StageGraph((Stage(names, (0,), size),), (), plan.stage_graph.batch_size)
    return replace(plan, stage_graph=rule_named("1f1b").warm_up(graph), schedule="1f1b")


def _workable(captured: Captured, plan: Plan) -> Plan:
    """With larger micro-batches, if the model fails with some (batch normalisation of one)."""
    graph, failure = plan.stage_graph, None
    size = graph.stages[0].microbatch_size
    while size < 2 * graph.batch_size:
        size = min(size, graph.batch_size)
        stages = tuple(replace(stage, microbatch_size=size) for stage in graph.stages)
        larger = rule_named(plan.schedule).warm_up(replace(graph, stages=stages))
        try:
            steps.prepare(captured, larger)
        except CaptureError as error:
            failure = failure or error
            size *= 2
            continue
        return replace(plan, stage_graph=larger)
    assert failure is not None
    raise failure


def _on_cpu(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What crosses processes."""
    return {name: gradient.cpu() for name, gradient in gradients.items()}


def _slices(graph: StageGraph, stage: int) -> list[tuple[int, int]]:
    """The intervals of samples that the replicas of a stage compute at once, ascending."""
    slices = [
        graph.slice(stage, microbatch, replica)
        for microbatch in range(graph.num_microbatches(stage))
        for replica in range(graph.stages[stage].replicas)
    ]
    return [(start, stop) for start, stop in slices if start < stop]


def _compare(
    loss: float,
    gradients: dict[str, Tensor],
    expected: Reference,
    exact: bool,
    num_devices: int,
) -> VerifyResult:
    wrong = set(gradients) ^ set(expected.gradients)
    if wrong:
        names = ", ".join(sorted(wrong)[:3])
        raise TrainingError(
            f"a gradient reaches {names} in one process or in the pipeline, but not in both; the "
            "model does something in Python that tracing loses"
        )
    worst, error, bitwise = "", 0.0, loss == expected.loss
    references = {name: dense(gradient) for name, gradient in expected.gradients.items()}
    largest = [float(g.abs().max()) for g in references.values() if g.numel()]
    floor = 0.0 if exact else _NOISE * max(largest, default=0.0)
    for name, gradient in gradients.items():
        ours, theirs = dense(gradient), references[name]
        bitwise = bitwise and torch.equal(ours, theirs)
        distance = _relative(ours, theirs, floor)
        if not worst or not distance <= error:
            worst, error = name, distance
    return VerifyResult(
        loss, expected.loss, error, worst, bitwise, exact, len(gradients), num_devices
    )


def _relative(ours: Tensor, theirs: Tensor, floor: float) -> float:
    if ours.numel() == 0:
        return 0.0
    difference = float((ours - theirs).abs().max())
    scale = max(float(theirs.abs().max()), floor)
    return difference / scale if scale else (math.inf if difference else 0.0)


def even_plan(graph: OpGraph, num_devices: int, batch_size: int) -> Plan:
    """A plan by operator count alone; raises InfeasiblePlanError for too few operators."""
    count = len(graph)
    if not 1 <= num_devices <= count:
        raise InfeasiblePlanError(
            f"{count} operators do not fill {num_devices} devices; at most {count} can be used"
        )
    cuts = [count * i // num_devices for i in range(num_devices + 1)]
    stage_of = [s for s in range(num_devices) for _ in range(cuts[s], cuts[s + 1])]
    edges = {(stage_of[a], stage_of[b]) for a, b in graph.edges if stage_of[a] != stage_of[b]}
    microbatch_size = max(batch_size // (2 * num_devices), 1)
    stages = tuple(
        Stage(tuple(op.name for op in graph.ops[a:b]), (s,), microbatch_size)
        for s, (a, b) in enumerate(pairwise(cuts))
    )
    rule = "1f1b"
    stage_graph = rule_named(rule).warm_up(StageGraph(stages, tuple(sorted(edges)), batch_size))
    nothing = Prediction(math.nan, math.nan, math.nan, (0,) * num_devices)
    return Plan(stage_graph, rule, "even", graph.name, "local", "no profile", 0.0, 0.0, nothing)
