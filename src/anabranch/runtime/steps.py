"""From a plan to workers: one per batch size, because sample intervals follow from it.

The last batch of an epoch may be short, a held-out batch may be of any size. Micro-batch sizes stay
those of the plan, so only the number of micro-batches changes, and with it the schedule.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from anabranch.errors import InvalidPlanError
from anabranch.graph.capture import Captured, capture
from anabranch.graph.split import Split, split, stages_like
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph, split_evenly
from anabranch.runtime.compute import StageCompute
from anabranch.runtime.mesh import Mesh, require_whole_replicas
from anabranch.runtime.messages import Layout
from anabranch.runtime.numerics.precision import LossScale
from anabranch.runtime.options import PLAIN, ComputeOptions
from anabranch.runtime.prepared import Prepared
from anabranch.runtime.transport import Transport
from anabranch.runtime.worker import Worker
from anabranch.schedule import SCHEDULES
from anabranch.schedule.check import check
from anabranch.schedule.lower import lower
from anabranch.workload import Workload


class Steps:
    """Workers of one rank, by batch size.

    Args:
        captured: training or evaluation graph of the model.
        parts: its stages.
        plan: micro-batch sizes, replicas and the schedule.
        mesh: the ranks.
        transport: between them.
        place: where the tensors live.
        seed: of random numbers.
        options: how stages are computed.

    Attributes:
        loss_scale: of all workers, where there is one.
    """

    def __init__(
        self,
        captured: Captured,
        parts: Split,
        plan: Plan,
        mesh: Mesh,
        transport: Transport | None,
        *,
        place: torch.device,
        seed: int,
        options: ComputeOptions = PLAIN,
    ) -> None:
        self.captured, self.parts, self._plan = captured, parts, plan
        self._mesh, self._transport, self._place = mesh, transport, place
        self.seed, self.options = seed, options
        self.loss_scale = LossScale() if options.precision == "fp16" else None
        self._prepared: dict[ComputeOptions, Prepared] = {}
        self._data = {(port.source, port.target) for port in parts.ports}
        self._gradients = {(port.source, port.target) for port in parts.ports if port.grad}
        self._workers: dict[int, Worker] = {}

    @property
    def stage_graph(self) -> StageGraph:
        """The plan's stages."""
        return self._plan.stage_graph

    def worker(self, samples: int) -> Worker:
        """What this rank does for a batch of that many samples."""
        if samples not in self._workers:
            planned = self._plan.stage_graph
            graph = replace(planned, batch_size=samples)
            if samples > planned.batch_size:
                # The plan's in-flight counts were cut to its own number of micro-batches.
                graph = SCHEDULES[self._plan.schedule]().warm_up(graph)
            self._workers[samples] = self.build(graph, self.options)
        return self._workers[samples]

    def build(self, graph: StageGraph, options: ComputeOptions = PLAIN) -> Worker:
        """A worker for a variation of the plan's stage graph, and of the options."""
        # In evaluation an operator may fall away and leave an edge that spans its stage.
        edges = tuple(sorted({*graph.edges, *self._data}))
        graph = replace(graph, edges=edges)
        # An edge without values orders its stages, in both directions, as in a sequential pipeline.
        order = set(edges) - self._data
        schedule = lower(
            SCHEDULES[self._plan.schedule]().order(graph),
            graph,
            gradient_edges=self._gradients | order,
        )
        check(schedule, graph)
        mesh = self._mesh
        if options not in self._prepared:
            self._prepared[options] = Prepared(self.captured, self.parts, options, self._place)
        prepared = self._prepared[options]
        layout = Layout(self.captured, prepared, graph, mesh.device)
        parameters = {
            name: parameter
            for s, stage in enumerate(graph.stages)
            if mesh.device in stage.devices
            for name, parameter in self.parts.parameters(s).items()
        }
        return Worker(
            layout,
            graph,
            schedule,
            mesh.device,
            StageCompute(
                layout,
                graph,
                parameters,
                prepared,
                seed=self.seed,
                loss_scale=self.loss_scale if options == self.options else None,
            ),
            self._transport,
            self._plan.stage_graph.rank_of,
            place=self._place,
        )


def captured_for(workload: Workload, plan: Plan) -> Captured:
    """Capture the model the way the plan's operators are named."""
    return capture(
        workload.module,
        workload.example,
        granularity=plan.granularity,  # type: ignore[arg-type]
    )


def prepare(captured: Captured, graph: StageGraph) -> None:
    """Specialise the program to every number of samples that a plan needs.

    Local ranks inherit what their parent has prepared; otherwise each of them does the same work.

    Raises:
        InvalidPlanError: if a stage has tensor parallelism.
    """
    require_whole_replicas(graph)
    sizes = {
        stop - start
        for s, stage in enumerate(graph.stages)
        for microbatch in {0, graph.num_microbatches(s) - 1}
        for start, stop in split_evenly(*graph.interval(s, microbatch), stage.replicas)
    }
    for samples in sorted(sizes - {0}):
        captured.at(samples)


def parts_of(captured: Captured, plan: Plan, *, exact: bool) -> Split:
    """Cut the model into the plan's stages.

    Raises:
        InvalidPlanError: if the plan is for another model, or its stages are not what the model's
            graph allows.
        ValueError: if exact gradients are asked of a plan that cannot give them.
    """
    graph = plan.stage_graph
    if plan.schedule not in SCHEDULES:
        raise InvalidPlanError(
            f"the plan has the schedule {plan.schedule!r}; known are {', '.join(sorted(SCHEDULES))}"
        )
    _check_operators(captured, graph)
    if exact and not can_be_exact(graph):
        raise ValueError(
            "gradients that are bitwise those of one process need one replica per stage, and one "
            "micro-batch size for all stages"
        )
    try:
        parts = split(captured, [stage.operators for stage in graph.stages], exact=exact)
    except ValueError as error:
        raise InvalidPlanError(f"the plan does not cut this model: {error}") from error
    missing = {(port.source, port.target) for port in parts.ports} - set(graph.edges)
    if missing:
        x, y = min(missing)
        raise InvalidPlanError(
            f"stage {x} makes what stage {y} reads, but the plan has no edge {x} -> {y} (C2); "
            "plan again"
        )
    return parts


def can_be_exact(graph: StageGraph) -> bool:
    """Whether every stage sees the same micro-batches, whole."""
    sizes = {stage.microbatch_size for stage in graph.stages}
    return len(sizes) == 1 and all(stage.replicas == 1 for stage in graph.stages)


def _check_operators(captured: Captured, graph: StageGraph) -> None:
    planned = Counter(name for stage in graph.stages for name in stage.operators)
    model = {op.name for op in captured.graph.ops}
    problems = [
        f"{what}: {_some(names)}"
        for what, names in (
            ("the plan lacks operators of the model", sorted(model - set(planned))),
            ("the model lacks operators of the plan", sorted(set(planned) - model)),
            ("in several stages", sorted(n for n, count in planned.items() if count > 1)),
        )
        if names
    ]
    if problems:
        raise InvalidPlanError(
            f"the plan does not fit {type(captured.module).__name__} captured by "
            f"{captured.granularity}: {'; '.join(problems)}; plan this model, with the same options"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def evaluation_parts(evaluation: Captured, plan: Plan) -> Split:
    """The evaluation graph, cut into the same stages."""
    stages = stages_like(evaluation, [stage.operators for stage in plan.stage_graph.stages])
    return split(evaluation, stages)
