"""Plan files: the stages, their devices, and the simulator's figures."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from anabranch.errors import AnabranchError
from anabranch.files.clusters import ClusterFile, cluster_to_dict, to_cluster
from anabranch.files.jsonfile import (
    LIMITS,
    FilePath,
    Index,
    Name,
    Samples,
    Seconds,
    Size,
    Strict,
    Text,
    build,
    document_fields,
    from_document,
    read_document,
    save,
    validate,
)
from anabranch.graph.opgraph import Granularity, Precision
from anabranch.plans.plan import CHANGED, Mode, Plan, Prediction
from anabranch.plans.stages import MOST_MICROBATCHES, Stage, StageGraph
from anabranch.schedule import asynchronous, rule_named
from anabranch.weights import POLICIES

_ANEW = "leave predicted out of a plan that was changed, simulate predicts it anew"

PLAN = "anabranch.plan/1"


def _check_policy(name: str) -> str:
    if name and name not in POLICIES:
        raise ValueError(f"it should be one of {', '.join(POLICIES)}")
    return name


def save_plan(plan: Plan, path: FilePath) -> None:
    """Write a plan file; raises FileFormatError if that fails or it could not be read again."""
    save(path, _PlanFile, plan_to_dict(plan))


def load_plan(path: FilePath) -> Plan:
    """Read a plan file; raises FileFormatError, which names file, key and value."""
    return build(path, _to_plan, read_document(path, PLAN, _PlanFile))


def plan_from_dict(document: dict[str, Any]) -> Plan:
    """Return the plan of a document that ``plan_to_dict`` made on rank 0."""
    where = "the plan of rank 0"
    return build(where, _to_plan, validate(document, _PlanFile, where))


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Return the document that ``save_plan`` writes and the command line prints.

    ``machines`` has the cluster as in a cluster file, so that a plan for a cluster of the user can
    be checked and simulated without that file. It is left out if the plan has only its name, as
    ``model_size`` is in a plan made by hand. Only asynchronous plans have ``mode`` and ``policy``;
    ``round_robin``, ``shard_optimizer``, ``sparse_embeddings`` and ``interrupted`` are written if
    true, ``precision`` for bf16 and fp16.
    """
    graph, machines = plan.stage_graph, plan.machines
    document = document_fields(
        plan,
        _PlanFile,
        schema_=PLAN,
        options=dict(plan.options),
        machines=machines and cluster_to_dict(machines),
        batch_size=graph.batch_size,
        depth=graph.depth,
        shape=graph.shape,
        predicted=plan.predicted and _prediction(plan.predicted, graph),
        stages=[document_fields(stage, _StageEntry, tensor=1) for stage in graph.stages],
        edges=[list(edge) for edge in graph.edges],
    )
    if plan.predicted is not None:
        document["predicted"]["digest"] = _digest(document)
    return document


_BESIDES = (
    *("planner", "profile", "model_size", "interrupted"),
    *("depth", "shape", "predicted", "notes"),
)
"""Keys of a plan on which no prediction depends, besides those for the seconds of its search."""


def _digest(document: dict[str, Any]) -> str:
    """Return a digest of everything on which predictions depend, to notice a changed plan."""
    kept = {k: v for k, v in document.items() if k not in _BESIDES and not k.endswith("_s")}
    # 1 and 1.0 are alike.
    alike = json.dumps(json.loads(json.dumps(kept), parse_int=float), sort_keys=True)
    return hashlib.sha256(alike.encode()).hexdigest()[:16]


def _prediction(predicted: Prediction, graph: StageGraph) -> dict[str, Any]:
    rate = _samples_per_s(predicted.step_s, graph)
    return document_fields(predicted, _PredictionEntry, samples_per_s=rate, digest="")


def _samples_per_s(step_s: float, graph: StageGraph) -> float:
    return graph.batch_size / step_s if step_s else 0.0


class _StageEntry(Strict):
    operators: Annotated[list[Name], Field(min_length=1)]
    devices: Annotated[list[Index], Field(min_length=1)]
    microbatch_size: Samples
    k: Samples = 1
    in_flight: Annotated[int, Field(ge=0, le=LIMITS.samples)] | None = None
    recompute: bool = False
    load: Annotated[float, Field(ge=0)] = 1.0
    backward_factor: Annotated[float, Field(ge=0)] = 2.0
    weight_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    message: Annotated[float, Field(ge=0)] = 0.0
    tensor: Annotated[int, Field(ge=1, le=LIMITS.devices)] = 1


class _PredictionEntry(Strict):
    brief = ("data_parallel_s", "chain_s", "limit")
    step_s: Seconds
    samples_per_s: Annotated[float, Field(ge=0)]
    bottleneck_s_per_sample: Seconds
    bubble: Annotated[float, Field(ge=-1e-6, le=1)]  # rounding may take it just below 0
    device_peak_bytes: list[Size]
    period_s: Seconds | None = None
    exposed_sums: Annotated[float, Field(ge=-1e-6, le=1)] | None = None
    bound_s: Seconds | None = None
    enough_devices: Annotated[int, Field(ge=1, le=LIMITS.devices)] | None = None
    enough_step_s: Seconds | None = None
    data_parallel_s: Seconds | None = None
    chain_s: Seconds | None = None
    limit: str = ""
    digest: str = ""


class _ModelSizeEntry(Strict):
    parameter_bytes: Size
    value_bytes: Size


class _PlanFile(Strict):
    brief = (
        *("rewrites", "machines", "model_size", "mode", "policy", "round_robin", "shard_optimizer"),
        *("sparse_embeddings", "interrupted", "predicted", "precision"),
    )
    schema_: Literal["anabranch.plan/1"] = Field(alias="schema")
    planner: Text = ""
    model: Text
    options: dict[Text, Text] = Field(default_factory=dict)
    granularity: Granularity = "layer"
    rewrites: list[Text] = Field(default_factory=list)
    precision: Precision = "fp32"
    device: Text = ""
    cluster: Text
    machines: ClusterFile | None = None
    profile: Text = ""
    model_size: _ModelSizeEntry | None = None
    batch_size: Samples
    schedule: Text
    mode: Mode = "sync"
    policy: Annotated[str, AfterValidator(_check_policy)] = ""
    round_robin: bool = False
    shard_optimizer: bool = False
    sparse_embeddings: bool = False
    interrupted: bool = False
    depth: int | None = None
    shape: Literal["graph", "chain"] | None = None
    search_s: Seconds = 0.0
    simulate_s: Seconds = 0.0
    improve_s: Seconds = 0.0
    predicted: _PredictionEntry | None = None
    stages: Annotated[list[_StageEntry], Field(min_length=1)]
    edges: list[Annotated[list[Index], Field(min_length=2, max_length=2)]]
    notes: list[Text] = Field(default_factory=list)


def _to_plan(file: _PlanFile) -> Plan:
    _check_mode(file)
    graph = _in_flight(file, _to_graph(file))
    if file.depth not in (None, graph.depth):
        raise ValueError(f"depth is {file.depth}, but the edges make it {graph.depth}")
    if file.shape not in (None, graph.shape):
        raise ValueError(f"shape is {file.shape!r}, but the edges make it {graph.shape!r}")
    machines = file.machines and to_cluster(file.machines)
    if machines is not None and machines.name != file.cluster:
        raise ValueError(
            f"cluster is {file.cluster!r}, but machines describes {machines.name!r}; leave out "
            "machines, or write its name to cluster"
        )
    predicted, notes = file.predicted, tuple(file.notes)
    if predicted is not None and predicted.digest:
        written = file.model_dump(mode="json", by_alias=True, exclude_unset=True)
        if predicted.digest != _digest(written):
            predicted, notes = None, (*notes, CHANGED)
    return from_document(
        Plan,
        file,
        stage_graph=graph,
        predicted=_to_prediction(predicted, graph) if predicted is not None else None,
        notes=notes,
        options=tuple(file.options.items()),
        machines=machines,
    )


def _to_graph(file: _PlanFile) -> StageGraph:
    for i, stage in enumerate(file.stages):
        count = -(-file.batch_size // stage.microbatch_size)
        if count > MOST_MICROBATCHES:
            raise ValueError(
                f"stages[{i}].microbatch_size is {stage.microbatch_size}, which cuts the batch of "
                f"{file.batch_size} samples into {count} micro-batches; a stage has "
                f"{MOST_MICROBATCHES} at most: write a larger microbatch_size or a smaller "
                "batch_size"
            )
    stages = tuple(_to_stage(i, stage) for i, stage in enumerate(file.stages))
    return StageGraph(stages, tuple((a, b) for a, b in file.edges), file.batch_size)


def _in_flight(file: _PlanFile, graph: StageGraph) -> StageGraph:
    """Set the in-flight counts of the schedule if the file has none.

    A schedule that does not exist, or does not fit the stages, is refused when the plan is used.
    """
    missing = [i for i, stage in enumerate(file.stages) if stage.in_flight is None]
    if not missing:
        return graph
    if len(missing) < len(file.stages):
        raise ValueError(
            f"stages[{missing[0]}].in_flight is missing, but other stages have it; write it for "
            "all stages, or for none to have the schedule's"
        )
    with suppress(AnabranchError, ValueError):
        is_async = file.mode == "async"
        return asynchronous.warm_up(graph) if is_async else rule_named(file.schedule).warm_up(graph)
    return graph


def _to_prediction(predicted: _PredictionEntry, graph: StageGraph) -> Prediction:
    if len(predicted.device_peak_bytes) != len(graph.devices):
        raise ValueError(
            f"predicted.device_peak_bytes has {len(predicted.device_peak_bytes)} entries; "
            f"the stages use {len(graph.devices)} devices; {_ANEW}"
        )
    samples_per_s = _samples_per_s(predicted.step_s, graph)
    if not math.isclose(predicted.samples_per_s, samples_per_s, rel_tol=1e-6):
        raise ValueError(
            f"predicted.samples_per_s is {predicted.samples_per_s:g}, "
            f"but batch_size / predicted.step_s is {samples_per_s:g}; {_ANEW}"
        )
    return from_document(Prediction, predicted)


def _check_mode(file: _PlanFile) -> None:
    is_sync = file.mode == "sync"
    refused = {
        f"policy is {file.policy!r}, but mode is 'sync', where all weights have one version; leave "
        "out the policy, or write 'async' to mode": is_sync and file.policy,
        "round_robin is true, but mode is 'sync', where replicas split every micro-batch; leave it "
        "out, or write 'async' to mode": is_sync and file.round_robin,
        f"mode is 'async', but policy is empty; it takes one of {', '.join(POLICIES)}": not (
            is_sync or file.policy
        ),
        "shard_optimizer is true, but mode is 'async', where every replica makes its own versions "
        "of the weights; leave it out": not is_sync and file.shard_optimizer,
        "sparse_embeddings is true, but mode is 'async', where gradients of tables are what the "
        "model asks for; leave it out": not is_sync and file.sparse_embeddings,
    }
    for why, holds in refused.items():
        if holds:
            raise ValueError(why)


def _to_stage(index: int, stage: _StageEntry) -> Stage:
    if stage.tensor > 1:
        raise ValueError(
            f"stages[{index}].tensor is {stage.tensor}: every replica of the stage would share its "
            "operators among several devices (tensor parallelism), which is neither planned nor "
            "run here; plan the model anew"
        )
    try:
        return from_document(Stage, stage, in_flight=stage.in_flight or 0)
    except ValueError as error:
        raise ValueError(f"stages[{index}]: {error}") from None
