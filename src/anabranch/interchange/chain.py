"""Conversion of a plan to a pipeline of ``torch.distributed.pipelining``, or reasons against it.

PyTorch's pipelining runs chains: a stage sends to the next one only, all stages have the same equal
micro-batches, and data parallelism repeats the whole pipeline, so all stages have as many replicas.
The schedule is a file with a line per rank of a pipeline and a cell per action::

    0F0,0F1,0B0,0B1        rank 0 has stage 0
    1F0,1B0,1F1,1B1        rank 1 has stage 1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from anabranch.errors import NotExpressibleError
from anabranch.graph.opgraph import OpGraph
from anabranch.plans.edges import edge_values
from anabranch.plans.plan import Plan
from anabranch.plans.stages import StageGraph
from anabranch.plans.whole_batch import whole_batch_stages
from anabranch.schedule import compute_order


@dataclass(frozen=True)
class StageChain:
    """A pipeline of PyTorch.

    Attributes:
        ranks: rank of each stage in a pipeline.
        replicas: number of pipelines side by side, each with its slice of every micro-batch.
        microbatch_size: samples of a micro-batch in one pipeline.
        num_microbatches: micro-batches of a step.
        csv: compute actions, a line per rank, as ``_PipelineScheduleRuntime._load_csv`` reads them.
    """

    plan: Plan
    ranks: tuple[int, ...]
    replicas: int
    microbatch_size: int
    num_microbatches: int
    csv: str

    @property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1


_BRANCHES = (
    "a model with branches cannot be cut between them, because PyTorch's pipelining sends to the "
    "next stage only; anabranch plan with --planner data-parallel --rewrite none has one stage, "
    "which PyTorch can read"
)
_ROW = (
    "anabranch plan with --planner sequential --max-replicas 1 --rewrite none makes stages in a "
    "row that are alike in size; where a value passes over a stage in that row too, as between "
    "branches, --planner data-parallel has one stage, which PyTorch can read"
)


def require_chain(plan: Plan) -> None:
    """Refuse a plan that is no pipeline of PyTorch for any model; see ``chain_of``."""
    if reasons := [*_reasons(plan)]:
        raise not_expressible("PyTorch's pipelining", reasons, _ROW)


def chain_of(plan: Plan, model: OpGraph) -> StageChain:
    """Convert a plan to a pipeline of PyTorch.

    Raises:
        NotExpressibleError: with every reason why that is impossible.
    """
    graph = plan.stage_graph
    if reasons := [*_reasons(plan), *_model_reasons(graph, model)]:
        way = _BRANCHES if any(_skipped(graph, model)) else _ROW
        raise not_expressible("PyTorch's pipelining", reasons, way)
    rows = list(dict.fromkeys(frozenset(stage.devices) for stage in graph.stages))
    lists = compute_order(graph, plan.schedule).actions
    replicas = graph.stages[0].replicas
    return StageChain(
        plan,
        tuple(rows.index(frozenset(stage.devices)) for stage in graph.stages),
        replicas,
        graph.stages[0].microbatch_size // replicas,
        graph.num_microbatches(0),
        "".join(",".join(map(str, lists[min(devices)])) + "\n" for devices in rows),
    )


def not_expressible(program: str, reasons: list[str], way: str) -> NotExpressibleError:
    """Return the error for a plan that another program cannot express; ``way`` is a way on."""
    why = "; ".join(reasons)
    return NotExpressibleError(
        f"this plan has no form that {program} could read: {why}; {way}, or train with anabranch"
    )


def _reasons(plan: Plan) -> Iterator[str]:
    """Generate the reasons why PyTorch's pipelining cannot express a plan."""
    if plan.mode == "async":
        yield f"it is asynchronous ({plan.policy}), and PyTorch updates weights after every step"
    if plan.rewrites:
        yield f"it rewrites the model ({', '.join(plan.rewrites)}), and PyTorch runs it as it is"
    yield from _edge_reasons(plan.stage_graph)
    yield from _size_reasons(plan.stage_graph)


def _model_reasons(graph: StageGraph, model: OpGraph) -> Iterator[str]:
    """Generate the reasons why it cannot express a model in these stages."""
    for source, target in _skipped(graph, model):
        reads = f"stage {target} reads a value of stage {source}"
        yield f"{reads}, and PyTorch sends to the next only"
    for s in whole_batch_stages(graph, model):
        if graph.num_microbatches(s) > 1 or graph.stages[s].replicas > 1:
            yield f"stage {s} compares samples of the whole batch with each other"
    stage_of = {name: s for s, stage in enumerate(graph.stages) for name in stage.operators}
    holders: dict[str, set[int]] = defaultdict(set)
    for op in model.ops:
        for name in op.parameters:
            holders[name].add(stage_of[op.name])
    for name, stages in holders.items():
        if len(stages) > 1:
            shared = f"stages {_listed(stages)} share the weight {name}"
            yield f"{shared}, whose gradient PyTorch adds up nowhere"


def _edge_reasons(graph: StageGraph) -> Iterator[str]:
    for s, before in enumerate(graph.predecessors):
        if len(before) > 1 or (s and not before):
            waits = f"waits for stages {_listed(before)}" if before else "waits for none"
            if graph.shape == "graph":
                yield f"its stages form a graph, in which stage {s} {waits}, and PyTorch's a chain"
                return


def _skipped(graph: StageGraph, model: OpGraph) -> list[tuple[int, int]]:
    """Return edges of a chain whose values pass over a stage; none for stages that form a graph."""
    if graph.shape == "graph":
        return []
    return [(x, y) for x, y in edge_values(graph, model) if y > x + 1]


def _size_reasons(graph: StageGraph) -> Iterator[str]:
    sizes = sorted({stage.microbatch_size for stage in graph.stages})
    replicas = sorted({stage.replicas for stage in graph.stages})
    if len(sizes) > 1:
        yield f"its stages have micro-batches of {_listed(sizes)} samples, and PyTorch one size"
    if any(graph.batch_size % size for size in sizes):
        yield f"the last micro-batch of {graph.batch_size} samples is smaller than the others"
    if len(replicas) > 1:
        yield f"its stages have {_listed(replicas)} replicas, and PyTorch repeats whole pipelines"
    elif any(size % replicas[0] for size in sizes):
        yield f"{replicas[0]} replicas have unequal slices of a micro-batch"
    groups = {frozenset(stage.devices) for stage in graph.stages}
    if sum(map(len, groups)) > len(graph.devices):
        yield "stages share some of their devices, and on PyTorch's ranks all or none"


def _listed(numbers: object) -> str:
    *most, last = map(str, sorted(numbers))  # type: ignore[call-overload]
    return f"{', '.join(most)} and {last}" if most else last
