"""Gradients of a pipeline against those of the model: one step on local ranks and in one process.

Both start from the same weights and take the same batch. The one process runs the user's own
module, not the captured one, over the same slices in the same order::

    local ranks      stages, micro-batches, messages      --> loss, gradient of every parameter
    one process      module(slice 0), module(slice 1) ..  --> loss, gradient of every parameter
    one process      module(batch)                        --> loss, gradient of every parameter

In exact mode the first two are bitwise equal where stages have one micro-batch size and no
replicas, otherwise they differ by rounding. The third says whether micro-batches change what is
trained: only batch normalisation may. The module is called twice, because a program says the same
each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from anabranch import launch
from anabranch.errors import CaptureError, InfeasiblePlanError, TrainingError
from anabranch.graph.capture import Captured, capture
from anabranch.graph.loss_kinds import SENTENCES, LossKind, told_normalised
from anabranch.graph.opgraph import OpGraph
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.plans.whole_batch import whole_batch_stages, with_whole_batches
from anabranch.runtime import plan_parts as steps
from anabranch.runtime.compute.options import ComputeOptions, Dropout
from anabranch.runtime.data_parallel.buckets import dense
from anabranch.runtime.initialisation import SEEDS, materialise, require_values
from anabranch.runtime.numerics.no_dropout import NoDropout
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.placement import claim, own_device
from anabranch.runtime.reference import (
    ROUNDING,
    Reference,
    draws_random,
    largest_distance,
    num_samples,
    reference,
    require_repeatable,
)
from anabranch.schedule import rule_named
from anabranch.workload import Batch, Workload

_NOISE = 1e-3
"""Share of the largest gradient that smaller gradients count as when they are compared."""

SLICES, WHOLE = "the module on the same micro-batches", "the module on the whole batch"
CAPTURED = "the captured model, which draws the same random numbers"
SAME_STAGES = "the captured model, whose batch normalisation has the same micro-batches"


@dataclass(frozen=True)
class VerifyResult:
    """How far apart they are.

    Attributes:
        loss, reference_loss: of the pipeline and of one process.
        max_gradient_error: largest over the parameters of max|a - b| / max|b|. |b| counts as at
            least a thousandth of the largest gradient: some gradients are zero but for rounding,
            such as that of an attention's key bias, or of a bias before batch normalisation.
        worst: the parameter that it belongs to.
        bitwise: loss and all gradients are equal in every bit.
        exact: the pipeline ran in the mode in which they have to be.
        num_parameters: parameters that were compared.
        num_devices: ranks of the pipeline.
        is_random: the model draws random numbers, others in the pipeline than in one process.
        loss_kind: of which kind the captured loss is, see ``graph.sample_flow``.
        whole_batch_error: as ``max_gradient_error``, against the module on the whole batch at once;
            None where that has to differ, by batch normalisation or random numbers.
        against: what the one process ran.
        notes: what else was found, one sentence each.
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
    loss_kind: LossKind = "mean"
    whole_batch_error: float | None = None
    against: str = SLICES
    notes: tuple[str, ...] = ()

    @property
    def by_sample(self) -> bool:
        """Whether random numbers were drawn by sample, the same in the pipeline and one process."""
        return self.against == CAPTURED

    @property
    def is_good(self) -> bool:
        """Whether all differences are rounding."""
        return self.max_gradient_error < ROUNDING and (self.whole_batch_error or 0.0) < ROUNDING

    def why(self) -> str:
        """What is wrong, where something is."""
        if self.is_random:
            return "nothing is verified: the model draws random numbers; try --dropout sample"
        if self.max_gradient_error < ROUNDING:
            return (
                "micro-batches change what is trained: the pipeline has the gradients of its "
                f"micro-batches, which differ from those of the whole batch by "
                f"{self.whole_batch_error:.3g}, although the graph says that the loss is a "
                f"{self.loss_kind} over the samples; train with one micro-batch of the whole batch "
                "(--microbatch-size), and see which operation computes across samples"
            )
        return "the gradients differ by more than rounding"

    def summary(self) -> str:
        """The comparison in one line, then what else was found, a line each."""
        how = "bitwise equal" if self.bitwise else f"largest at {self.worst}"
        if self.is_random:
            how += (
                "; the model draws random numbers, and other ones in one process, so this says "
                'nothing: compare with dropout="sample" (--dropout sample), or switch them off'
            )
        if self.against != SLICES:
            how += f"; one process ran {self.against}"
        devices = f"{self.num_devices} device{'s' if self.num_devices > 1 else ''}"
        found = (
            f"gradient error {self.max_gradient_error:.3g} over {self.num_parameters} parameters "
            f"on {devices} ({how}); loss {self.loss:.9g}, in one process "
            f"{self.reference_loss:.9g}"
        )
        return "\n".join([found, *self._further()])

    def _further(self) -> Iterator[str]:
        yield f"the loss is {SENTENCES[self.loss_kind]}"
        if self.whole_batch_error is not None and self.against != WHOLE:
            yield f"against the whole batch at once: gradient error {self.whole_batch_error:.3g}"
        yield from self.notes


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

    Dropout is switched off on both sides, unless ``dropout`` says otherwise. Stages whose batch is
    one micro-batch get two, so that what becomes of several is seen.

    Args:
        workload: its data and optimizer are not used.
        plan: what to run, or a number of devices for a plan that cuts the model evenly.
        batch: samples to run on; by default as many as the plan's batch, from the workload's data
            or else its example; with buckets every example, of which the worst is returned.
        captured: the captured module, where the caller has it.
        exact: run in exact mode where the plan allows it: one replica per stage, one micro-batch
            size.
        timeout: seconds for each of the two runs.
        device: where both run; see ``Pipeline``.
        dropout: see ``ComputeOptions``; ``sample`` compares a model that draws random numbers with
            the captured model on one device, which draws the same ones.

    Raises:
        CaptureError, InvalidPlanError: if a side cannot run.
        TrainingError: likewise; or if the module says something else at its second call, or the
            batch makes neither a loss nor a gradient.
    """
    if isinstance(plan, int):
        captured = captured or capture(
            workload.module, workload.example, per_sample=workload.per_sample
        )
        plan = _workable(
            captured, even_plan(captured.graph, plan, num_samples(batch or workload.example))
        )
    captured = captured or steps.captured_for(workload, plan)
    if workload.buckets and batch is None:
        found = [
            verify(
                replace(workload, example=example, buckets=()),
                plan,
                batch=example,
                captured=bucket,
                exact=exact,
                timeout=timeout,
                device=device,
                dropout=dropout,
            )
            for bucket, example in zip(
                steps.buckets_of(captured, workload),
                [workload.example, *workload.buckets],
                strict=True,
            )
        ]
        worst = max(found, key=lambda one: (not one.is_good, one.max_gradient_error))
        said = f"the largest difference of {len(found)} sizes of batches"
        return replace(worst, notes=(*worst.notes, said))
    if batch is None and workload.data is not None:
        batch = next(iter(workload.data(plan.stage_graph.batch_size, 0)))
    batch = workload.example if batch is None else batch
    size = num_samples(batch)
    graph = with_whole_batches(replace(plan.stage_graph, batch_size=size), captured.graph)
    plan = _several(captured, replace(plan, stage_graph=graph))
    exact = exact and steps.can_be_exact(plan.stage_graph)
    steps.prepare(captured, plan.stage_graph)
    parts = steps.parts_of(captured, plan, exact=False)
    programs = [parts.program(s, captured.programs.samples) for s in range(len(plan.stage_graph))]
    slices = _slices(plan.stage_graph, [program.has_loss for program in programs].index(True))
    module = workload.module
    is_random = any(draws_random(program.module, dropout) for program in programs)
    by_sample = is_random and dropout == "sample"
    options = ComputeOptions(dropout=dropout)
    seed = torch.initial_seed()
    against = _against(captured, batch, slices, by_sample=by_sample)
    has_whole = not (is_random or captured.graph.normalised)
    alone = _one_after_the_other(plan)
    if against == CAPTURED:
        alone = _on_one_device(captured, plan, slices[0][1])

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

    def one_device() -> tuple[Reference, Reference | None, tuple[str, ...]]:
        loss, gradients = one_rank(alone, check_memory=False)
        return Reference(loss, {}, gradients), None, ()

    def one_process() -> tuple[Reference, Reference | None, tuple[str, ...]]:
        require_values(module, materialise(module, seed=seed % SEEDS))
        if device is not None:
            claim(place := own_device(device))
            module.to(place)
        calls = slices if against == SLICES else [(0, size)]
        with NoDropout() if dropout == "off" else nullcontext():
            found = reference(module, batch, calls, captured.weights)
            whole = reference(module, batch, [(0, size)]) if has_whole else None
            notes = require_repeatable(module, batch, whole.loss) if whole else ()
        return _fetched(found), whole and _fetched(whole), notes

    on_captured = against in (CAPTURED, SAME_STAGES)
    ((expected, whole, notes),) = launch.run(
        one_device if on_captured else one_process, 1, timeout=timeout
    )
    _require_signal(expected)
    num_devices = len(plan.stage_graph.devices)
    results = launch.run(one_rank, num_devices, plan, timeout=timeout)
    gradients = {name: g for _, part in results for name, g in part.items()}
    result = _compare(results[0][0], gradients, expected, exact, num_devices)
    return replace(
        result,
        is_random=is_random and not by_sample,
        loss_kind=captured.graph.loss_kind or "mean",
        against=against,
        whole_batch_error=_error(gradients, whole)[0] if whole is not None else None,
        notes=(*notes, *_traits(captured)),
    )


def _against(
    captured: Captured, batch: Batch, slices: list[tuple[int, int]], *, by_sample: bool
) -> str:
    """What one process has to run to have the same numbers."""
    if by_sample:
        return CAPTURED
    if slices == [(0, num_samples(batch))] and not captured.graph.normalised:
        return WHOLE if captured.graph.loss_kind == "coupled" else SLICES
    tensors = captured.layout.flatten(batch)
    if captured.graph.loss_kind != "coupled" and captured.programs.is_even(tensors, slices):
        return SLICES
    return SAME_STAGES if captured.graph.normalised else WHOLE


def _traits(captured: Captured) -> Iterator[str]:
    """What a user has to know of the model to read the comparison."""
    if captured.graph.normalised:
        yield told_normalised(captured.graph.normalised)


def _several(captured: Captured, plan: Plan) -> Plan:
    """With two micro-batches where all stages had one, if the model takes half a batch."""
    graph = plan.stage_graph
    whole = set(whole_batch_stages(graph, captured.graph))
    free = [s for s in range(len(graph)) if s not in whole]
    half = -(-graph.batch_size // 2)
    if graph.batch_size < 2 or not free or any(graph.num_microbatches(s) > 1 for s in free):
        return plan
    if any(graph.stages[s].replicas > graph.batch_size // 2 for s in free):
        return plan
    stages = tuple(
        replace(stage, microbatch_size=half, k=1) if s in free else stage
        for s, stage in enumerate(graph.stages)
    )
    halved = rule_named(plan.schedule).warm_up(replace(graph, stages=stages))
    try:
        steps.prepare(captured, halved)
    except CaptureError:
        return plan
    return replace(plan, stage_graph=halved)


def _require_signal(expected: Reference) -> None:
    """Refuse a batch of which every comparison would say that all is well."""
    has_gradient = any(bool(dense(g).any()) for g in expected.gradients.values())
    if expected.loss == 0 and not has_gradient:
        raise TrainingError(
            "nothing can be verified: the loss of this batch is 0 and so are all gradients, which "
            "any pipeline would have; give a batch that the model has something to learn from "
            "(a contrastive loss needs two samples, a masked one a sample with a label)"
        )


def _one_after_the_other(plan: Plan) -> Plan:
    """The same stages on one device, without replicas."""
    graph = plan.stage_graph
    stages = tuple(replace(stage, devices=graph.devices[:1]) for stage in graph.stages)
    return replace(plan, stage_graph=replace(graph, stages=stages))


def _on_one_device(captured: Captured, plan: Plan, size: int) -> Plan:
    """The same batch through one stage of all operators, in micro-batches of a size."""
    names = tuple(op.name for op in captured.graph.ops)
    graph = StageGraph((Stage(names, (0,), size),), (), plan.stage_graph.batch_size)
    return replace(plan, stage_graph=rule_named("1f1b").warm_up(graph), schedule="1f1b")


def _workable(captured: Captured, plan: Plan) -> Plan:
    """With larger micro-batches, if the model fails with some (batch normalisation of one)."""
    graph, failure = plan.stage_graph, None
    size = min(stage.microbatch_size for stage in graph.stages)
    while size < 2 * graph.batch_size:
        size = min(size, graph.batch_size)
        stages = tuple(replace(stage, microbatch_size=size) for stage in graph.stages)
        sized = with_whole_batches(replace(graph, stages=stages), captured.graph)
        larger = rule_named(plan.schedule).warm_up(sized)
        try:
            steps.prepare(captured, larger)
        except CaptureError as error:
            failure = failure or error
            size *= 2
            continue
        return replace(plan, stage_graph=larger)
    assert failure is not None
    raise failure


def _fetched(result: Reference) -> Reference:
    return replace(result, gradients=_on_cpu(result.gradients))


def _on_cpu(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients that can cross processes."""
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
    others = {name: dense(gradient) for name, gradient in expected.gradients.items()}
    bitwise = loss == expected.loss and gradients.keys() == others.keys()
    bitwise = bitwise and all(torch.equal(dense(g), others[n]) for n, g in gradients.items())
    error, worst = _error(gradients, expected)
    return VerifyResult(
        loss, expected.loss, error, worst, bitwise, exact, len(gradients), num_devices
    )


def _error(gradients: Mapping[str, Tensor], expected: Reference) -> tuple[float, str]:
    """Return the largest relative difference and its parameter."""
    others = {name: dense(gradient) for name, gradient in expected.gradients.items()}
    largest = {n: float(g.abs().max()) if g.numel() else 0.0 for n, g in others.items()}
    floor = _NOISE * max(largest.values(), default=0.0)
    ours = {name: dense(gradient) for name, gradient in gradients.items()}
    return largest_distance(ours, others, lambda name: max(largest.get(name, 0.0), floor))


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
    cut = with_whole_batches(StageGraph(stages, tuple(sorted(edges)), batch_size), graph)
    stage_graph = rule_named(rule).warm_up(cut)
    nothing = Prediction(math.nan, math.nan, math.nan, (0,) * num_devices)
    return Plan(stage_graph, rule, "even", graph.name, "local", "no profile", 0.0, 0.0, nothing)
