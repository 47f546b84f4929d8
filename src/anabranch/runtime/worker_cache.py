"""Workers of one rank, one per batch size, from which sample intervals follow, and per bucket of
other sizes, from which programs and messages follow.

The last batch of an epoch may be short, a held-out batch may be of any size. Micro-batch sizes stay
those of the plan, so only the number of micro-batches changes, and with it the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from anabranch.graph.capture import Captured
from anabranch.graph.cutting.split import Split, split, stages_like
from anabranch.plans.edges import MessageEdges
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.plans.whole_batch import with_whole_batches
from anabranch.remembered import remembered
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
from anabranch.runtime.compute.programs import StagePrograms
from anabranch.runtime.compute.stage_compute import StageCompute
from anabranch.runtime.measurement.clocks import clock_of
from anabranch.runtime.messages import Layout
from anabranch.runtime.numerics.precision import LossScale
from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.transport import Transport
from anabranch.runtime.worker import Worker
from anabranch.schedule import rule_named, schedule_of


@dataclass(eq=False)
class WorkerCache:
    """Workers of one rank, by batch size; all share a loss scale, where there is one."""

    captured: Captured
    parts: Split
    plan: Plan
    mesh: Mesh
    transport: Transport | None
    device: torch.device
    seed: int
    options: ComputeOptions = PLAIN

    def __post_init__(self) -> None:
        self.clock = clock_of(self.device)
        self.loss_scale = LossScale() if self.options.precision == "fp16" else None
        self.stage_graph = self.plan.stage_graph

    def like(self, captured: Captured) -> WorkerCache:
        """Return workers of the same stages in evaluation mode, or for batches of other sizes."""
        return self if captured is self.captured else self._alike(captured)

    @remembered
    def _alike(self, captured: Captured) -> WorkerCache:
        stages = stages_like(captured, [stage.operators for stage in self.stage_graph.stages])
        parts = split(captured, stages, exact=self.parts.exact and captured.training)
        alike = replace(self, captured=captured, parts=parts)
        alike.clock, alike.loss_scale = self.clock, self.loss_scale
        return alike

    def for_batch(self, leaves: Mapping[str, Tensor]) -> WorkerCache:
        """Return the workers for batches with the sizes of this one."""
        return self.like(self.captured.for_batch(leaves))

    @property
    def in_evaluation(self) -> WorkerCache:
        return self.like(self.captured.evaluation())

    @cached_property
    def leaves(self) -> frozenset[str]:
        """Names of the tensors of a batch that this rank's stages read."""
        return self._read - self.captured.programs.statistics

    @cached_property
    def needed_leaves(self) -> frozenset[str]:
        """Also the tensors from which it computes the batch's statistics that its stages read."""
        return self.captured.programs.tensors_for(self._read)

    @cached_property
    def _read(self) -> frozenset[str]:
        own = self.stage_graph.stages_of[self.mesh.device]
        return frozenset[str]().union(*(self.parts.leaves(s) for s in own))

    @remembered
    def worker(self, samples: int) -> Worker:
        """Return the worker for batches of so many samples."""
        planned = self.stage_graph
        graph = with_whole_batches(replace(planned, batch_size=samples), self.captured.graph)
        if samples > planned.batch_size:
            # The plan's in-flight counts were cut to its own number of micro-batches.
            graph = rule_named(self.plan.schedule).warm_up(graph)
        return self.build(graph, self.options)

    def alone(self, microbatch_size: int, batch_size: int) -> Worker:
        """Make a worker without replicas, compute options and dropout, for a comparison."""
        stages = tuple(
            replace(s, devices=s.devices[:1], microbatch_size=microbatch_size, k=1, in_flight=0)
            for s in self.stage_graph.stages
        )
        sliced = replace(self.stage_graph, stages=stages, batch_size=batch_size)
        whole = with_whole_batches(sliced, self.captured.graph)
        return self.build(rule_named("gpipe").warm_up(whole), ComputeOptions(dropout="off"))

    @remembered
    def worker_of(self, graph: StageGraph) -> Worker:
        return self.build(graph, self.options)

    @remembered
    def _programs(self, options: ComputeOptions) -> StagePrograms:
        return StagePrograms(self.parts, options, self.device)

    def build(self, graph: StageGraph, options: ComputeOptions = PLAIN) -> Worker:
        """Make a worker for a variation of the plan's stage graph, and of the options."""
        # In evaluation an operator may fall away and leave an edge that spans its stage.
        data = {(port.source, port.target) for port in self.parts.ports}
        gradients = {(port.source, port.target) for port in self.parts.ports if port.grad}
        graph = replace(graph, edges=tuple(sorted({*graph.edges, *data})))
        # An edge without values orders its stages, in both directions, as in a sequential pipeline.
        order = set(graph.edges) - data
        schedule = schedule_of(graph, self.plan.schedule, MessageEdges(back=gradients | order))
        mesh, prepared = self.mesh, self._programs(options)
        layout = Layout(prepared.captured.graph, prepared, graph, mesh.device)
        parameters = {
            name: parameter
            for s in graph.stages_of.get(mesh.device, ())
            for name, parameter in self.parts.parameters(s).items()
        }
        compute = StageCompute(
            layout,
            graph,
            parameters,
            prepared,
            seed=self.seed,
            loss_scale=self.loss_scale if options == self.options else None,
            split=schedule.split_stages,
        )
        transport, rank_of, device = self.transport, self.stage_graph.rank_of, self.device
        return Worker(
            layout, graph, schedule, mesh.device, compute, transport, rank_of, device, self.clock
        )


WorkerOf = Callable[[WorkerCache, int], Worker]
"""Returns the worker for batches of a number of samples."""
