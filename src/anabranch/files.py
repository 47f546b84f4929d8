"""Profiles, clusters and plans as JSON files.

What a reader may believe about a file is written down here as pydantic models; the core types
behind them stay plain dataclasses. Units are part of the key names. Operators go by name, so a file
can be read and edited by people:

    {
      "schema": "anabranch.cluster/1",
      "name": "two boxes",
      "device": "v100",
      "memory_bytes": 17179869184,
      "cores": 0,
      "levels": [
        {"name": "node", "size": 4, "bandwidth_bytes_per_s": 45000000000.0, "latency_s": 5e-06},
        {"name": "network", "size": 2, "bandwidth_bytes_per_s": 12500000000.0, "latency_s": 1e-05}
      ]
    }
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from anabranch.cluster import Cluster, Level
from anabranch.errors import FileFormatError
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Parameter, Value
from anabranch.jsonfile import explain, read_document, write_document
from anabranch.planner.stages import Plan, Prediction, Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile

PROFILE = "anabranch.profile/1"
CLUSTER = "anabranch.cluster/1"
PLAN = "anabranch.plan/1"

LARGEST_SIZE = 2**60
"""Bytes: an exbibyte. Whatever has more is a mistake."""
MOST_DEVICES = 10**6
"""No cluster has a million devices; a product of level sizes quickly would."""

Path_ = str | os.PathLike[str]


def save_profile(profile: Profile, path: Path_) -> None:
    """Write a profile file.

    Raises:
        FileFormatError: if it cannot be written, or could not be read again.
    """
    _save(path, _ProfileFile, profile_to_dict(profile))


def load_profile(path: Path_) -> Profile:
    """Read a profile file.

    Raises:
        FileFormatError: naming file, key and value.
    """
    return _build(path, _to_profile, read_document(path, PROFILE, _ProfileFile))


def save_cluster(cluster: Cluster, path: Path_) -> None:
    """Write a cluster file.

    Raises:
        FileFormatError: if it cannot be written, or could not be read again.
    """
    _save(path, _ClusterFile, cluster_to_dict(cluster))


def load_cluster(text: Path_) -> Cluster:
    """A cluster by name, such as ``summit:8x4``, or from a cluster file.

    Raises:
        FileFormatError: naming file, key and value.
        ValueError: if the text is neither a file nor the name of a preset; the message lists them.
    """
    path = Path(text)
    looks_like_a_file = path.suffix == ".json" or os.sep in os.fspath(text)
    if isinstance(text, str) and not looks_like_a_file and not _exists(path):
        return Cluster.preset(text)
    return _build(path, _to_cluster, read_document(path, CLUSTER, _ClusterFile))


def save_plan(plan: Plan, path: Path_) -> None:
    """Write a plan file.

    Raises:
        FileFormatError: if it cannot be written, or could not be read again.
    """
    _save(path, _PlanFile, plan_to_dict(plan))


def load_plan(path: Path_) -> Plan:
    """Read a plan file.

    Raises:
        FileFormatError: naming file, key and value.
    """
    return _build(path, _to_plan, read_document(path, PLAN, _PlanFile))


def profile_to_dict(profile: Profile) -> dict[str, Any]:
    """The document that ``save_profile`` writes."""
    graph = profile.graph
    return {
        "schema": PROFILE,
        "name": graph.name,
        "granularity": graph.granularity,
        "device": profile.device,
        "source": profile.source,
        "proportional": profile.proportional,
        "samples": list(profile.samples),
        "parameters": [
            {"name": p.name, "nbytes": p.nbytes, "trainable": p.trainable} for p in graph.parameters
        ],
        "operators": [
            {
                "name": op.name,
                "kind": op.kind,
                "parameters": list(op.parameters),
                "forward_s": list(cost.forward_s),
                "backward_s": list(cost.backward_s),
                "kept_bytes_per_sample": cost.kept_bytes,
            }
            for op, cost in zip(graph.ops, profile.costs, strict=True)
        ],
        "values": [
            {
                "name": value.name,
                "producer": None if value.producer == BATCH else graph.ops[value.producer].name,
                "consumers": [graph.ops[c].name for c in value.consumers],
                "nbytes": value.nbytes,
                "batched": value.batched,
                "grad": value.grad,
            }
            for value in graph.values
        ],
    }


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """The document that ``save_cluster`` writes."""
    return {
        "schema": CLUSTER,
        "name": cluster.name,
        "device": cluster.device,
        "memory_bytes": cluster.memory_bytes,
        "cores": cluster.cores,
        "levels": [
            {
                "name": level.name,
                "size": level.size,
                "bandwidth_bytes_per_s": level.bandwidth,
                "latency_s": level.latency_s,
            }
            for level in cluster.levels
        ],
    }


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The document that ``save_plan`` writes, which is also what the command line prints."""
    graph = plan.stage_graph
    step_s = plan.predicted.step_s
    return {
        "schema": PLAN,
        "planner": plan.planner,
        "model": plan.model,
        "options": dict(plan.options),
        "granularity": plan.granularity,
        "device": plan.device,
        "cluster": plan.cluster,
        "profile": plan.profile,
        "batch_size": graph.batch_size,
        "schedule": plan.schedule,
        "depth": graph.depth,
        "search_s": plan.search_s,
        "simulate_s": plan.simulate_s,
        "predicted": {
            "step_s": step_s,
            "samples_per_s": graph.batch_size / step_s if step_s else 0.0,
            "bottleneck_s_per_sample": plan.predicted.bottleneck_s_per_sample,
            "bubble": plan.predicted.bubble,
            "device_peak_bytes": list(plan.predicted.device_peak_bytes),
        },
        "stages": [
            {
                "operators": list(stage.operators),
                "devices": list(stage.devices),
                "microbatch_size": stage.microbatch_size,
                "k": stage.k,
                "in_flight": stage.in_flight,
                "recompute": stage.recompute,
            }
            for stage in graph.stages
        ],
        "edges": [list(edge) for edge in graph.edges],
        "notes": list(plan.notes),
    }


def _check_text(text: str) -> str:
    # Escape sequences and line breaks would reach terminals and reports; half a surrogate pair
    # cannot be encoded.
    if not text.isprintable():
        raise ValueError("it should not contain control characters")
    return text


def _check_name(name: str) -> str:
    # Names may end up in file names (of checkpoints, reports); none may point out of a folder.
    if name[0] in "/~" or "\\" in name or ".." in name.split("/") or re.match(r"[A-Za-z]:/", name):
        raise ValueError("it should be a name, not a path")
    return _check_text(name)


_Text = Annotated[str, Field(max_length=2000), AfterValidator(_check_text)]
_Name = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_check_name)]
_Size = Annotated[int, Field(ge=0, le=LARGEST_SIZE)]
_Seconds = Annotated[float, Field(ge=0, le=1e9)]
_Samples = Annotated[int, Field(ge=1, le=2**40)]
_Index = Annotated[int, Field(ge=0, lt=MOST_DEVICES)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _Parameter(_Strict):
    name: _Name
    nbytes: _Size
    trainable: bool


class _Operator(_Strict):
    name: _Name
    kind: _Text
    parameters: list[_Name]
    forward_s: list[_Seconds]
    backward_s: list[_Seconds]
    kept_bytes_per_sample: _Size


class _Value(_Strict):
    name: Annotated[str, Field(max_length=1000), AfterValidator(lambda s: s and _check_name(s))]
    producer: _Name | None
    consumers: list[_Name]
    nbytes: _Size
    batched: bool
    grad: bool


class _ProfileFile(_Strict):
    schema_: Literal["anabranch.profile/1"] = Field(alias="schema")
    name: _Text
    granularity: _Text
    device: _Text
    source: Literal["measured", "estimated", "imported"]
    proportional: bool
    samples: list[_Samples]
    parameters: list[_Parameter]
    operators: list[_Operator]
    values: list[_Value]


class _Level(_Strict):
    name: _Text
    size: Annotated[int, Field(ge=1, le=MOST_DEVICES)]
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0, le=1e18)]
    latency_s: _Seconds


class _ClusterFile(_Strict):
    schema_: Literal["anabranch.cluster/1"] = Field(alias="schema")
    name: _Text
    device: _Text
    memory_bytes: Annotated[int, Field(ge=1, le=LARGEST_SIZE)]
    cores: Annotated[int, Field(ge=0, le=MOST_DEVICES)] = 0
    levels: Annotated[list[_Level], Field(min_length=1, max_length=100)]


class _Stage(_Strict):
    operators: Annotated[list[_Name], Field(min_length=1)]
    devices: Annotated[list[_Index], Field(min_length=1)]
    microbatch_size: _Samples
    k: _Samples = 1
    in_flight: Annotated[int, Field(ge=0, le=2**40)] = 0
    recompute: bool = False


class _Prediction(_Strict):
    step_s: _Seconds
    samples_per_s: Annotated[float, Field(ge=0)]
    bottleneck_s_per_sample: _Seconds
    bubble: Annotated[float, Field(ge=-1e-6, le=1)]  # rounding may take it just below 0
    device_peak_bytes: list[_Size]


class _PlanFile(_Strict):
    schema_: Literal["anabranch.plan/1"] = Field(alias="schema")
    planner: _Text
    model: _Text
    options: dict[_Text, _Text] = Field(default_factory=dict)
    granularity: _Text = "layer"
    device: _Text = ""
    cluster: _Text
    profile: _Text
    batch_size: _Samples
    schedule: _Text
    depth: int
    search_s: _Seconds
    simulate_s: _Seconds
    predicted: _Prediction
    stages: Annotated[list[_Stage], Field(min_length=1)]
    edges: list[Annotated[list[_Index], Field(min_length=2, max_length=2)]]
    notes: list[_Text]


_File = TypeVar("_File", bound=_Strict)
_Core = TypeVar("_Core")


def _save(path: Path_, model: type[_Strict], document: Mapping[str, Any]) -> None:
    try:
        model.model_validate(document)
    except ValidationError as error:
        raise FileFormatError(
            f"{os.fspath(path)} would not be readable: {explain(error)}"
        ) from None
    write_document(path, document)


def _build(path: Path_, build: Callable[[_File], _Core], file: _File) -> _Core:
    """From the validated document to the core type, whose own conditions come last."""
    try:
        return build(file)
    except ValueError as error:
        raise FileFormatError(f"{os.fspath(path)}: {error}") from None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or has a null byte in it
        return False


def _to_profile(file: _ProfileFile) -> Profile:
    index: dict[str, int] = {}
    for i, op in enumerate(file.operators):
        if index.setdefault(op.name, i) != i:
            raise ValueError(
                f'operators[{i}].name is "{op.name}", and so is operators[{index[op.name]}].name'
            )

    def find(name: str, where: str) -> int:
        if name not in index:
            raise ValueError(f'{where} is "{name}"; no operator has this name')
        return index[name]

    values = tuple(
        Value(
            producer=BATCH if v.producer is None else find(v.producer, f"values[{i}].producer"),
            consumers=tuple(
                find(c, f"values[{i}].consumers[{j}]") for j, c in enumerate(v.consumers)
            ),
            nbytes=v.nbytes,
            batched=v.batched,
            grad=v.grad,
            name=v.name,
        )
        for i, v in enumerate(file.values)
    )
    graph = OpGraph(
        ops=tuple(Op(op.name, tuple(op.parameters), op.kind) for op in file.operators),
        values=values,
        parameters=tuple(Parameter(p.name, p.nbytes, p.trainable) for p in file.parameters),
        name=file.name,
        granularity=file.granularity,
    )
    costs = tuple(
        OpCost(tuple(op.forward_s), tuple(op.backward_s), op.kept_bytes_per_sample)
        for op in file.operators
    )
    return Profile(
        graph, tuple(file.samples), costs, file.device, file.source, proportional=file.proportional
    )


def _to_cluster(file: _ClusterFile) -> Cluster:
    devices = math.prod(level.size for level in file.levels)
    if devices > MOST_DEVICES:
        raise ValueError(
            f"levels multiply to {devices} devices; at most {MOST_DEVICES} are allowed"
        )
    levels = tuple(
        Level(level.name, level.size, level.bandwidth_bytes_per_s, level.latency_s)
        for level in file.levels
    )
    return Cluster(file.name, file.device, file.memory_bytes, levels, file.cores)


def _to_plan(file: _PlanFile) -> Plan:
    graph = StageGraph(
        stages=tuple(_to_stage(i, stage) for i, stage in enumerate(file.stages)),
        edges=tuple((a, b) for a, b in file.edges),
        batch_size=file.batch_size,
    )
    predicted = file.predicted
    if file.depth != graph.depth:
        raise ValueError(f"depth is {file.depth}, but the edges make it {graph.depth}")
    if len(predicted.device_peak_bytes) != len(graph.devices):
        raise ValueError(
            f"predicted.device_peak_bytes has {len(predicted.device_peak_bytes)} entries; "
            f"the stages use {len(graph.devices)} devices"
        )
    samples_per_s = file.batch_size / predicted.step_s if predicted.step_s else 0.0
    if not math.isclose(predicted.samples_per_s, samples_per_s, rel_tol=1e-6):
        raise ValueError(
            f"predicted.samples_per_s is {predicted.samples_per_s:g}, "
            f"but batch_size / predicted.step_s is {samples_per_s:g}"
        )
    return Plan(
        stage_graph=graph,
        schedule=file.schedule,
        planner=file.planner,
        model=file.model,
        cluster=file.cluster,
        profile=file.profile,
        search_s=file.search_s,
        simulate_s=file.simulate_s,
        predicted=Prediction(
            predicted.step_s,
            predicted.bottleneck_s_per_sample,
            predicted.bubble,
            tuple(predicted.device_peak_bytes),
        ),
        granularity=file.granularity,
        device=file.device,
        options=tuple(file.options.items()),
        notes=tuple(file.notes),
    )


def _to_stage(index: int, stage: _Stage) -> Stage:
    try:
        return Stage(
            tuple(stage.operators),
            tuple(stage.devices),
            stage.microbatch_size,
            stage.k,
            stage.in_flight,
            stage.recompute,
        )
    except ValueError as error:
        raise ValueError(f"stages[{index}]: {error}") from None
