"""Plan: a stage graph with its schedule, origin and predicted cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from anabranch.cluster import Cluster
from anabranch.graph.opgraph import Granularity, ModelSize, OpGraph, Precision
from anabranch.plans.baselines import gain_text, is_as_fast
from anabranch.plans.stages import StageGraph

Mode = Literal["sync", "async"]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The simulator's figures of a plan.

    Attributes:
        step_s: seconds of one synchronous step; of an asynchronous plan, the interval between
            mini-batches once the pipeline is full.
        bottleneck_s_per_sample: slowest stage's compute seconds per sample.
        bubble: share of device time that is not compute.
        device_peak_bytes: per device of the plan, ascending, peak bytes.
        exposed_sums: share of device time in which gradients are summed and nothing else is done,
            a part of the bubble; None if not known.
        period_s: seconds of a synchronous step in a row of steps, each device beginning the next
            when it has ended one; None where that was not simulated.
        bound_s: lower bound of the step, of all plans with one stage on each device if this plan is
            one of them, else of all plans; None where it is not known.
        enough_devices: the fewest devices with a plan that takes hardly longer, ``enough_step_s``
            for a step; None if fewer devices take longer, or were not tried.
        data_parallel_s, chain_s: step of data parallelism and of the best chain; None where these
            were not planned.
        limit: the largest part of the step and the change that would help most; empty if not known.
    """

    step_s: float
    bottleneck_s_per_sample: float
    bubble: float
    device_peak_bytes: tuple[int, ...]
    period_s: float | None = None
    exposed_sums: float | None = None
    bound_s: float | None = None
    enough_devices: int | None = None
    enough_step_s: float | None = None
    data_parallel_s: float | None = None
    chain_s: float | None = None
    limit: str = ""

    def headline(
        self, graph: StageGraph, mode: str = "sync", measured_s: float | None = None
    ) -> str:
        """Return one sentence on the step, its gain over baselines, its bound and its largest part.

        Args:
            graph: stages of the plan, and ``mode`` of it.
            measured_s: seconds that the step took in a run.
        """
        what = "A mini-batch" if mode == "async" else "A step"
        others = (("data-parallel", self.data_parallel_s), ("chain", self.chain_s))
        gains = [gain_text(name, seconds, self.step_s, mode) for name, seconds in others if seconds]
        if self.bound_s:
            gains.append(_within_text(self.step_s / self.bound_s, graph))
        limit = f". Most of it: {self.limit}" if self.limit else ""
        predicted = ", ".join([time_text(self.step_s), *gains])
        if measured_s is not None:
            took = f"{what} took {time_text(measured_s)}, measured"
            return f"{took}. Predicted: {predicted}{limit}."
        return f"{what} takes {predicted}{limit}."

    def text(self, batch_size: int, mode: str = "sync") -> str:
        """Format the figures of one step in the units of every summary."""
        what = "a batch every" if mode == "async" else "step"
        samples_per_s = batch_size / self.step_s if self.step_s else 0.0
        rate = f"{samples_per_s:.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"
        peak = memory_text(max(self.device_peak_bytes))
        step, sums, period_s = time_text(self.step_s), self.exposed_sums or 0.0, self.period_s
        of_it = f" ({sums:.1%} summing gradients)" if sums >= 0.0005 else ""
        text = f"{what} {step}, {rate} samples/s, bubble {self.bubble:.1%}{of_it}, peak {peak}"
        if period_s is None or is_as_fast(period_s, self.step_s):
            return text
        is_longer = period_s > self.step_s
        why = LONGER_IN_A_ROW if is_longer else "as devices begin the next before all have ended"
        return f"{text}; {time_text(period_s)} per step when many follow one another, {why}"

    def bounds(self, graph: StageGraph) -> list[str]:
        """Return lines on the bound of any plan and on fewer devices that are enough, as known."""
        lines = []
        if self.bound_s:
            within = _within_text(self.step_s / self.bound_s, graph)
            lines.append(f"{within}: no such plan takes less than {time_text(self.bound_s)}")
        if (count := self.enough_devices) and (step_s := self.enough_step_s):
            are = "device is" if count == 1 else "devices are"
            speed = f"{self.step_s / step_s:.0%} of this speed, by another plan"
            lines.append(f"{count} {are} enough for {speed}: step {time_text(step_s)}")
        return lines


NOT_PREDICTED = "not predicted"
"""Text in place of the figures of a plan without a prediction."""

CHANGED = "changed by hand since it was predicted, so nothing is: simulate predicts it anew"
"""Note of a plan that lost its prediction because it was edited."""

AS_WRITTEN = "as the model is written"
"""End of a note that compares the prediction with that of the model without rewrites."""

TAKE_ROWS = "SparseAdam, or SGD or Adagrad without momentum, weight decay and fused updates"
"""Optimizers of PyTorch that take sparse gradients."""

_SPARSE = (
    f"sparse gradients of tables: to train with {TAKE_ROWS}, or with your own that takes them; "
    "AdamW, the default, does not"
)


def _within_text(factor: float, graph: StageGraph) -> str:
    """Return a step over its bound, with the plans that the bound is for."""
    those = "" if graph.shares_devices else ", with one stage on each"
    return f"within {factor:.2f}x of the best possible on these devices{those}"


LONGER_IN_A_ROW = (
    "longer than one alone, as each reads its batch and shares cores and links with those before "
    "and after it"
)
"""Reason printed where steps in a row are predicted to take longer."""


def time_text(seconds: float, decimals: int = 2) -> str:
    """Format seconds as milliseconds, such as ``12.34 ms``."""
    ms = seconds * 1e3
    return f"{ms:.{decimals}f} ms" if ms >= 0.1 or ms == 0 else f"{ms:.3g} ms"


def memory_text(nbytes: float) -> str:
    """Format bytes in a suitable unit, such as ``1.50 GiB``."""
    if nbytes > 2**29:
        return f"{nbytes / 2**30:.2f} GiB"
    if nbytes >= 2**20 or nbytes == 0:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / 2**10:.1f} KiB" if nbytes >= 100 else f"{nbytes:.0f} B"


@dataclass(frozen=True)
class Plan:
    """A stage graph with its schedule, origin and predicted cost.

    Attributes:
        stage_graph: stages with their in-flight counts decided.
        schedule: key of ``schedule.SCHEDULES``; with the in-flight counts it determines every
            action.
        planner: key of ``planner.PLANNERS``; empty for a plan made by hand.
        model: the planned model, as the user wrote it.
        cluster: name of the cluster.
        profile: the origin of the costs; empty if there are none.
        search_s: seconds of the planner; ``simulate_s``: seconds of simulating its proposals;
            ``improve_s``: seconds of local changes to the best of them.
        predicted: the simulator's figures; None without a simulation, as in a plan made by hand.
        granularity: granularity of the capture; a run captures the model with the same one, so
            that operator names agree.
        device: device on which the profile was measured, or for which it was estimated.
        options: options of the model as (name, value) pairs; with ``model`` they rebuild it.
        notes: remarks on the figures.
        machines: the cluster itself; None where only its name is known.
        mode: ``sync``, all stages update their weights together after every step; ``async``, the
            next mini-batches follow without a flush and each stage updates its own weights after
            its backward. The in-flight counts of an asynchronous plan are those of the full
            pipeline and may exceed the micro-batches of one mini-batch.
        policy: key of ``weights.POLICIES``; empty for ``sync``.
        round_robin: replicas take whole mini-batches in turn, for ``async``, see
            ``schedule.asynchronous``. The in-flight counts are those of split mini-batches.
        shard_optimizer: replicas of a stage shard its optimizer state, see ``Pipeline``.
        sparse_embeddings: embedding tables have sparse gradients, see ``ComputeOptions``.
        model_size: size of the planned model; None for a plan made by hand.
        interrupted: the search was ended by Ctrl-C.
        rewrites: rewrites of the captured program, with their sites; see ``graph.rewrites``.
        precision: autocast under which its costs hold, and which training has by default.
    """

    stage_graph: StageGraph
    schedule: str
    planner: str
    model: str
    cluster: str
    profile: str
    search_s: float
    simulate_s: float
    predicted: Prediction | None
    granularity: Granularity = "layer"
    device: str = ""
    options: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    improve_s: float = 0.0
    machines: Cluster | None = None
    mode: str = "sync"
    policy: str = ""
    round_robin: bool = False
    shard_optimizer: bool = False
    sparse_embeddings: bool = False
    model_size: ModelSize | None = None
    interrupted: bool = False
    rewrites: tuple[str, ...] = ()
    precision: Precision = "fp32"

    @property
    def figures(self) -> Prediction:
        """The prediction of a plan that has one.

        Raises:
            ValueError: if it has none.
        """
        if self.predicted is None:
            raise ValueError("the plan was made by hand and has not been simulated")
        return self.predicted

    def predicting(self, predicted: Prediction, cluster: Cluster) -> Plan:
        """Return the plan with a new prediction, for this cluster, without notes on the old one."""
        old = self.predicted
        is_same = old is not None and math.isclose(old.step_s, predicted.step_s, rel_tol=1e-3)
        stale = (CHANGED,) if is_same else (CHANGED, AS_WRITTEN)
        notes = tuple(note for note in self.notes if not note.endswith(stale))
        return replace(
            self, predicted=predicted, notes=notes, cluster=cluster.name, machines=cluster
        )

    @property
    def costs(self) -> str:
        """Sentence on the origin of the costs."""
        return f"costs: {self.profile or 'none, the plan was made by hand'}"

    def other_model(self, graph: OpGraph) -> str:
        """Return a warning if the plan was made for a model of another size, else an empty text."""
        planned, size = self.model_size, ModelSize.of(graph)
        if planned is not None and graph.precision != self.precision:  # values have other sizes
            size = replace(size, value_bytes=planned.value_bytes)
        if planned is None or planned == size:
            return ""
        sizes = (
            f"parameters of {memory_text(model.parameter_bytes)} and values of "
            f"{memory_text(model.value_bytes)} per sample"
            for model in (planned, size)
        )
        return (
            f"the plan was made for a model with {next(sizes)}, but this one has {next(sizes)}: "
            "it is cut at operators of the same names, but what the plan says of time and memory "
            "is not of this model, and another plan may be faster; plan this model anew"
        )

    def with_values_of(self, graph: OpGraph) -> Plan:
        """Return the plan with the size of a graph's values, which may be of another precision."""
        if self.model_size is None:
            return self
        size = replace(self.model_size, value_bytes=ModelSize.of(graph).value_bytes)
        return replace(self, model_size=size)

    def summary(self, gains: Sequence[str] = ()) -> str:
        """Return the predicted figures and a table of the stages, as plain text.

        Many stages that are alike have one line.

        Args:
            gains: lines about other plans, which follow the step.
        """
        graph, predicted, prediction = self.stage_graph, self.predicted, NOT_PREDICTED
        if predicted is not None:
            prediction = predicted.text(graph.batch_size, self.mode)
        count = len(graph.devices)
        shape = f"{len(graph)} stages, depth {graph.depth}"
        if len(graph) == 1:
            shape = "plain data parallelism" if count > 1 else "one stage"
        most = max(map(len, graph.stages_of.values()))
        shared = f" with up to {most} stages each" if graph.shares_devices else ""
        is_async = self.mode == "async"
        is_shared = self.shard_optimizer and any(stage.replicas > 1 for stage in graph.stages)
        how = f"asynchronous {self.schedule}, {self.policy}" if is_async else self.schedule
        lines = [
            prediction,
            *gains,
            *(predicted.bounds(graph) if predicted is not None else ()),
            f"{shape}, on {count} device{'s' if count > 1 else ''}{shared}, {how}, "
            f"batch {graph.batch_size}",
            *_stage_lines(graph),
            self.costs,
            *(["replicas each keep a shard of the optimizer's state"] if is_shared else []),
            *([_turns_text(graph)] if self.round_robin else []),
            *([_SPARSE] if self.sparse_embeddings else []),
            *self.notes,
        ]
        return "\n".join(lines)


def _turns_text(graph: StageGraph) -> str:
    """Return a line on replicas that take mini-batches in turn: updates per stage."""
    stages: dict[int, list[int]] = {}
    for s, stage in enumerate(graph.stages):
        stages.setdefault(stage.replicas, []).append(s)
    counts = (f"for {n if n > 1 else 'each'} in stage {ranges(stages[n])}" for n in sorted(stages))
    how = "replicas of a stage take mini-batches in turn, each of them whole: one update"
    return f"{how} {', '.join(counts)}"


def _stage_lines(graph: StageGraph) -> list[str]:
    """Return a line for each stage, or of more than twelve stages one for all that are alike."""
    modes = _modes(graph)
    after = [", ".join(map(str, before)) or "-" for before in graph.predecessors]
    devices = [ranges(stage.devices) for stage in graph.stages]
    columns = [
        (
            f"micro-batch {stage.microbatch_size:4d}",
            f"in flight {stage.in_flight:3d}",
            *modes[s],
            f"{len(stage.operators):3d} operator{'s' if len(stage.operators) > 1 else ''}",
        )
        for s, stage in enumerate(graph.stages)
    ]
    if len(graph) <= 12:
        wide, wider = max(8, *map(len, after)), max(10, *map(len, devices))
        return [
            f"  stage {s:2d}  after {after[s]:{wide}s}  devices {devices[s]:{wider}s}  "
            f"{'  '.join(columns[s])}: {operators_text(stage.operators)}"
            for s, stage in enumerate(graph.stages)
        ]
    alike: dict[tuple[tuple[str, ...], int, bool], list[int]] = {}
    for s, stage in enumerate(graph.stages):
        alike.setdefault((columns[s], stage.replicas, after[s] == "-"), []).append(s)
    lines = []
    for (parts, replicas, is_first), stages in alike.items():
        words = ", ".join(" ".join(part.split()) for part in parts if part.strip())
        first = stages[0]
        plural, each = ("s", " each") if len(stages) > 1 else ("", "")
        before = "-" if is_first else f"{after[first]}{', ...' if each else ''}"
        lines.append(
            f"  stage{plural} {ranges(stages)}, after {before}, {replicas} "
            f"device{'s' if replicas > 1 else ''}{each}, {words}{each}: "
            f"{operators_text(graph.stages[first].operators)}{', ...' if each else ''}"
        )
    return lines


def operators_text(operators: Sequence[str]) -> str:
    """Format operator names in one line: the first and the last, with dots in between."""
    if len(operators) < 3:
        return ", ".join(operators)
    return f"{operators[0]} .. {operators[-1]}"


def _modes(graph: StageGraph) -> list[tuple[str, ...]]:
    """Format k and recomputation per stage, as columns if any stage uses them."""
    stages, columns = graph.stages, []
    groups = [graph.group_size(s) for s in range(len(stages))]
    if any(size > 1 for size in groups):
        columns.append([f"k {size:2d}" for size in groups])
    if any(stage.recompute for stage in stages):
        columns.append([f"{'recompute' if stage.recompute else '':9s}" for stage in stages])
    return [tuple(column[s] for column in columns) for s in range(len(stages))]


def ranges(numbers: Sequence[int]) -> str:
    """Format numbers with runs joined, such as ``0-3,6``."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
