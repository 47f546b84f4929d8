"""Asynchronous training of a pipeline in one process, version for version.

The cost of asynchrony does not depend on how fast stages are, only on which weights their passes
read. So one process runs the passes of all stages in an order that the pipeline could have had, and
``VersionedWeights`` does the rest::

    stage 0    F0 F1 F2 B0 F3 B1 F4 B2         each stage: forwards as long as it may have another
    stage 1       F0 F1 B0 F2 B1 F3 B2         mini-batch in flight, then one backward for every
    stage 2          F0 B0 F1 B1 F2 B2         forward (1F1B), without a flush

Losses and weights are bitwise those of the pipeline, whose stages are one device each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from anabranch.errors import InvalidPlanError, PolicyError
from anabranch.graph.capture import Captured, capture
from anabranch.graph.cutting.split import Port, Split, split
from anabranch.graph.opgraph import Granularity
from anabranch.plans.stages import Stage, StageGraph
from anabranch.runtime.asynchronous.requirements import fitting, require_untied
from anabranch.runtime.asynchronous.versions import VersionedWeights
from anabranch.runtime.compute.options import PLAIN, ComputeOptions
from anabranch.runtime.compute.outcome import Outcome
from anabranch.runtime.compute.programs import StagePrograms
from anabranch.runtime.compute.stage_compute import StageCompute
from anabranch.runtime.data_feed import leaves_of
from anabranch.runtime.messages import Layout
from anabranch.runtime.reference import num_samples
from anabranch.schedule.asynchronous import full_pipeline, units_in_flight
from anabranch.weights import WeightPolicy, require_fits
from anabranch.weights.version_tracker import predicts
from anabranch.workload import Batch, Workload


class Replay:
    """One asynchronous pipeline in this process.

    The workload's module is trained where it is; between two calls of ``train`` its parameters are
    the newest version of every stage, so evaluate it as any module.

    Args:
        stages: names of operators per stage, in topological order.
        microbatches: M, per mini-batch, for policies with several.
        options: how stages are computed; not ``fp16``, which needs a loss scale.

    Attributes:
        graph: the stages, each on a device of its own, with their in-flight counts.
        updates: mini-batches learned so far.

    Raises:
        InvalidPlanError: if the operators cannot be cut this way, or stages share parameters.
        PolicyError: if the policy does not fit.
    """

    def __init__(
        self,
        workload: Workload,
        stages: Sequence[Sequence[str]],
        policy: WeightPolicy,
        *,
        batch_size: int,
        microbatches: int = 1,
        seed: int = 0,
        granularity: Granularity = "layer",
        captured: Captured | None = None,
        options: ComputeOptions = PLAIN,
    ) -> None:
        if workload.clip_norm is not None:
            raise PolicyError(
                f"clip_norm {workload.clip_norm} needs the gradients of all stages at one time; "
                "leave it out, or let predict-stash clip each stage's own"
            )
        if options.precision == "fp16":
            raise ValueError("fp16 needs a loss scale for all stages; choose bf16 or fp32")
        if captured is None:
            captured = capture(workload.module, workload.example, granularity=granularity)
        self._captured, self._policy = captured, policy
        self._parts = _parts(captured, stages)
        self._microbatches, self._seed = microbatches, seed
        self._prepared = StagePrograms(self._parts, options, captured.programs.device)
        self.graph = _stage_graph(self._parts, stages, batch_size, microbatches)
        require_fits(policy, self.graph, microbatches=microbatches)
        self.weights = tuple(self._stage_weights(workload, s) for s in range(len(stages)))
        self._parameters = {
            name: parameter
            for s in range(len(stages))
            for name, parameter in self._parts.parameters(s).items()
        }
        for parameter in self._parameters.values():
            parameter.grad = None
        self._idle: dict[int, list[StageCompute]] = {}
        self.updates = 0

    def _stage_weights(self, workload: Workload, s: int) -> VersionedWeights:
        parameters = self._parts.parameters(s)
        trainable = [(name, p) for name, p in parameters.items() if p.requires_grad]
        optimizer = workload.make_optimizer(trainable) if trainable else None
        scheduler = workload.make_scheduler(optimizer) if optimizer is not None else None
        if optimizer is not None and predicts(self._policy):
            fitting(self._policy, optimizer, quiet=False)
        units = [units_in_flight(st.in_flight, self._microbatches) for st in self.graph.stages]
        return VersionedWeights(
            parameters,
            optimizer,
            self._policy,
            in_flight=units[s],
            deepest=max(units),
            scheduler=scheduler,
        )

    def train(self, batches: Iterable[Batch]) -> Iterator[float]:
        """Fill the pipeline, train on a stream of mini-batches, and drain it.

        Yields:
            The loss of every mini-batch, in order, when all stages have learned from it.

        Raises:
            ValueError: if a batch has no whole number of samples per micro-batch, or another
                ``train`` has not come to its end.
        """
        for weights in self.weights:
            weights.fill(self.updates)
        run = _Run(self, iter(batches))
        try:
            yield from run.losses()
        except GeneratorExit:
            run.ended = True
            for _ in run.losses():
                pass
            raise

    def compute_for(self, samples: int) -> StageCompute:
        """Something that computes mini-batches of a size, one at a time."""
        if self._idle.get(samples):
            return self._idle[samples].pop()
        if samples % self._microbatches:
            raise ValueError(
                f"a batch of {samples} samples is no whole number of {self._microbatches} "
                "micro-batches; leave the short last batch out"
            )
        size = samples // self._microbatches
        stages = tuple(
            replace(stage, devices=(0,), microbatch_size=size) for stage in self.graph.stages
        )
        graph = replace(self.graph, stages=stages, batch_size=samples)
        layout = Layout(self._captured, self._prepared, graph, 0)
        return StageCompute(layout, graph, self._parameters, self._prepared, seed=self._seed)

    def begin(self, number: int, batch: Batch) -> _Unit:
        """A mini-batch enters."""
        leaves = leaves_of(self._captured, batch, self._prepared.device)
        samples = num_samples(leaves)
        compute = self.compute_for(samples)
        outcome = compute.begin(leaves, number, train=True)
        passes = len(self.graph) * self._microbatches
        return _Unit(compute, outcome, samples, passes)

    def end(self, unit: _Unit) -> float:
        """A mini-batch has been learned by all stages."""
        self._idle.setdefault(unit.samples, []).append(unit.compute)
        self.updates += 1
        return unit.outcome.loss


def _parts(captured: Captured, stages: Sequence[Sequence[str]]) -> Split:
    try:
        parts = split(captured, stages)
    except ValueError as error:
        raise InvalidPlanError(f"the stages do not cut this model: {error}") from error
    require_untied(parts, captured.module)
    return parts


def _stage_graph(
    parts: Split, stages: Sequence[Sequence[str]], batch_size: int, microbatches: int
) -> StageGraph:
    if microbatches < 1 or batch_size < microbatches or batch_size % microbatches:
        raise ValueError(
            f"a batch of {batch_size} samples is no whole number of {microbatches} micro-batches"
        )
    size = batch_size // microbatches
    edges = tuple(sorted({(port.source, port.target) for port in parts.ports}))
    made = tuple(Stage(tuple(names), (s,), size) for s, names in enumerate(stages))
    return full_pipeline(StageGraph(made, edges, batch_size))


@dataclass(eq=False, slots=True)
class _Unit:
    """A mini-batch between its first forward and its last backward."""

    compute: StageCompute
    outcome: Outcome
    samples: int
    left: int
    values: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    gradients: dict[int, dict[Port, Tensor]] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Lane:
    """A stage on its way: micro-batches that it has forwarded and those that it has learned."""

    stage: int
    weights: VersionedWeights
    in_flight: int
    before: list[_Lane]
    after: list[_Lane]
    forwards: int = 0
    backwards: int = 0


class _Run:
    """From a fill to its drain."""

    def __init__(self, replay: Replay, batches: Iterator[Batch]) -> None:
        graph = replay.graph
        self.replay, self.batches, self.microbatches = replay, batches, replay._microbatches
        self.first = self.next = replay.updates
        self.units: dict[int, _Unit] = {}
        self.ended = False
        self.lanes = [
            _Lane(s, replay.weights[s], stage.in_flight, [], [])
            for s, stage in enumerate(graph.stages)
        ]
        for x, y in graph.edges:
            self.lanes[x].after.append(self.lanes[y])
            self.lanes[y].before.append(self.lanes[x])

    def losses(self) -> Iterator[float]:
        """Run until no mini-batch is left."""
        while True:
            moved = False
            for lane in self.lanes:
                moved |= self.advance(lane)
            while (unit := self.units.get(self.replay.updates)) and not unit.left:
                del self.units[self.replay.updates]
                yield self.replay.end(unit)
            if not moved:
                return

    def advance(self, lane: _Lane) -> bool:
        """Take the stage's next action, if what it needs is there."""
        f, b = lane.forwards, lane.backwards
        if f - b < lane.in_flight and self.has(f):
            ready = all(other.forwards > f for other in lane.before)
            if ready:
                self.forward(lane, f)
            return ready
        ready = b < f and all(other.backwards > b for other in lane.after)
        if ready:
            self.backward(lane, b)
        return ready

    def has(self, microbatch: int) -> bool:
        """Whether the stream has such a micro-batch; the first to ask fetches it."""
        number = self.first + microbatch // self.microbatches
        if number == self.next and not self.ended:
            try:
                batch = next(self.batches)
            except StopIteration:
                self.ended = True
                return False
            self.units[number] = self.replay.begin(number, batch)
            self.next += 1
        return number < self.next

    def forward(self, lane: _Lane, count: int) -> None:
        number, i = divmod(count, self.microbatches)
        unit = self.units[self.first + number]
        values = unit.values.setdefault(i, {})
        with lane.weights.forward(self.first + number):
            values.update(unit.compute.forward((lane.stage, i), values))
        lane.forwards += 1

    def backward(self, lane: _Lane, count: int) -> None:
        number, i = divmod(count, self.microbatches)
        unit = self.units[self.first + number]
        gradients = unit.gradients.setdefault(i, {})
        with lane.weights.backward(self.first + number):
            gradients.update(unit.compute.backward((lane.stage, i), gradients))
        lane.backwards += 1
        unit.left -= 1
        if i == self.microbatches - 1:
            lane.weights.update()
