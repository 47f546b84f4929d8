"""Profile, cluster and plan files: what is written comes back, and what is broken is named."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.errors import FileFormatError
from anabranch.files import (
    load_cluster,
    load_plan,
    load_profile,
    plan_to_dict,
    profile_to_dict,
    save_cluster,
    save_plan,
    save_profile,
)
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Parameter, Value
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.profile.profile import OpCost, Profile, Sharded
from tests.strategies import clusters, plans, profiles

# The folder is the same for all examples of a property; every example overwrites its file.
same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

PROFILE: dict[str, Any] = {
    "schema": "anabranch.profile/1",
    "name": "tower",
    "granularity": "layer",
    "device": "cpu",
    "source": "measured",
    "proportional": False,
    "samples": [1, 4],
    "parameters": [{"name": "layer.weight", "nbytes": 400, "trainable": True}],
    "operators": [
        {
            "name": "layer",
            "kind": "Linear",
            "parameters": ["layer.weight"],
            "forward_s": [0.001, 0.002],
            "backward_s": [0.002, 0.004],
            "kept_bytes_per_sample": 40,
        },
        {
            "name": "loss",
            "kind": "",
            "parameters": [],
            "forward_s": [0.0, 0.0],
            "backward_s": [0.0, 0.0],
            "kept_bytes_per_sample": 0,
        },
    ],
    "values": [
        {
            "name": "image",
            "producer": None,
            "consumers": ["layer"],
            "nbytes": 40,
            "batched": True,
            "grad": False,
        },
        {
            "name": "",
            "producer": "layer",
            "consumers": ["loss"],
            "nbytes": 40,
            "batched": True,
            "grad": True,
        },
    ],
}

CLUSTER: dict[str, Any] = {
    "schema": "anabranch.cluster/1",
    "name": "two boxes",
    "device": "v100",
    "memory_bytes": 17179869184,
    "cores": 0,
    "levels": [
        {"name": "node", "size": 4, "bandwidth_bytes_per_s": 45e9, "latency_s": 5e-6},
        {"name": "network", "size": 2, "bandwidth_bytes_per_s": 12.5e9, "latency_s": 1e-5},
    ],
}

# Two branches that meet: 0 -> 2 <- 1, eight samples in micro-batches of two.
PLAN: dict[str, Any] = {
    "schema": "anabranch.plan/1",
    "planner": "graphpipe",
    "model": "two-branch",
    "options": {"preset": "small"},
    "granularity": "layer",
    "device": "cpu",
    "cluster": "local:4",
    "profile": "measured, cpu, at 1, 2 samples",
    "batch_size": 8,
    "schedule": "1f1b",
    "depth": 2,
    "search_s": 0.25,
    "simulate_s": 0.5,
    "improve_s": 0.0,
    "predicted": {
        "step_s": 0.5,
        "samples_per_s": 16.0,
        "bottleneck_s_per_sample": 0.05,
        "bubble": 0.25,
        "device_peak_bytes": [100, 100, 300, 300],
    },
    "stages": [
        {
            "operators": ["left"],
            "devices": [0],
            "microbatch_size": 2,
            "k": 1,
            "in_flight": 2,
            "recompute": False,
            "tensor": 1,
        },
        {
            "operators": ["right"],
            "devices": [1],
            "microbatch_size": 2,
            "k": 1,
            "in_flight": 2,
            "recompute": True,
            "tensor": 1,
        },
        {
            "operators": ["join", "loss"],
            "devices": [2, 3],
            "microbatch_size": 2,
            "k": 1,
            "in_flight": 1,
            "recompute": False,
            "tensor": 2,
        },
    ],
    "edges": [[0, 2], [1, 2]],
    "notes": [],
}

# The same tower on two and on four devices; the order of the operators does not matter.
SHARDED: dict[str, Any] = PROFILE | {
    "sharded": [
        {
            "degree": degree,
            "operators": [
                {
                    "name": "layer",
                    "forward_s": [0.001 / degree, 0.002 / degree],
                    "backward_s": [0.002 / degree, 0.004 / degree],
                    "kept_bytes_per_sample": 40 // degree,
                    "parameter_bytes": 400 // degree,
                },
                {
                    "name": "loss",
                    "forward_s": [0.0, 0.0],
                    "backward_s": [0.0, 0.0],
                    "kept_bytes_per_sample": 0,
                    "parameter_bytes": 0,
                },
            ],
        }
        for degree in (2, 4)
    ]
}

KINDS: dict[str, tuple[dict[str, Any], Callable[[Path], object]]] = {
    "profile": (PROFILE, load_profile),
    "cluster": (CLUSTER, load_cluster),
    "plan": (PLAN, load_plan),
    "sharded": (SHARDED, load_profile),
}


def refusal(path: Path, load: Callable[[Path], object], text: str | bytes) -> str:
    """Write a file that nobody should accept; what the refusal says after the file's name."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileFormatError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    return message.removeprefix(str(path)).removeprefix(":").strip()


def test_profile_by_eye(tmp_path: Path) -> None:
    """The document above is this profile."""
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    assert load_profile(tmp_path / "p.json") == Profile(
        graph=OpGraph(
            ops=(Op("layer", ("layer.weight",), "Linear"), Op("loss")),
            values=(
                Value(BATCH, (0,), 40, grad=False, name="image"),
                Value(0, (1,), 40),
            ),
            parameters=(Parameter("layer.weight", 400),),
        ),
        samples=(1, 4),
        costs=(OpCost((0.001, 0.002), (0.002, 0.004), 40), OpCost((0.0, 0.0), (0.0, 0.0), 0)),
        device="cpu",
        source="measured",
    )


def test_tensor_parallelism_by_eye(tmp_path: Path) -> None:
    """What each of two, and of four devices does of the same operators."""
    document = copy.deepcopy(SHARDED)
    document["sharded"][0]["operators"].reverse()
    (tmp_path / "p.json").write_text(json.dumps(document))
    nothing = OpCost((0.0, 0.0), (0.0, 0.0), 0)
    assert load_profile(tmp_path / "p.json").sharded == (
        Sharded(2, (OpCost((0.0005, 0.001), (0.001, 0.002), 20), nothing), (200, 0)),
        Sharded(4, (OpCost((0.00025, 0.0005), (0.0005, 0.001), 10), nothing), (100, 0)),
    )


def test_files_from_before_tensor_parallelism(tmp_path: Path) -> None:
    """They lack the keys that came with it, and load as ever; profiles are still written so."""
    older = copy.deepcopy(PLAN)
    for stage in older["stages"]:
        del stage["tensor"]
    (tmp_path / "plan.json").write_text(json.dumps(older))
    graph = load_plan(tmp_path / "plan.json").stage_graph
    assert [stage.tensor for stage in graph.stages] == [1, 1, 1]
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    assert profile_to_dict(load_profile(tmp_path / "p.json")) == PROFILE


def test_cluster_by_eye(tmp_path: Path) -> None:
    """The document above is two Summit nodes under another name."""
    (tmp_path / "c.json").write_text(json.dumps(CLUSTER))
    cluster = load_cluster(tmp_path / "c.json")
    assert cluster.name == "two boxes"
    assert cluster.levels == Cluster.preset("summit:2x4").levels
    assert cluster.memory_bytes == 16 * 2**30


def test_plan_by_eye(tmp_path: Path) -> None:
    """The document above is this plan."""
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    assert load_plan(tmp_path / "plan.json") == Plan(
        stage_graph=StageGraph(
            stages=(
                Stage(("left",), (0,), 2, in_flight=2),
                Stage(("right",), (1,), 2, in_flight=2, recompute=True),
                Stage(("join", "loss"), (2, 3), 2, in_flight=1, tensor=2),
            ),
            edges=((0, 2), (1, 2)),
            batch_size=8,
        ),
        schedule="1f1b",
        planner="graphpipe",
        model="two-branch",
        cluster="local:4",
        profile="measured, cpu, at 1, 2 samples",
        search_s=0.25,
        simulate_s=0.5,
        predicted=Prediction(0.5, 0.05, 0.25, (100, 100, 300, 300)),
        device="cpu",
        options=(("preset", "small"),),
    )


@st.composite
def sharded_profiles(draw: st.DrawFn) -> Profile:
    """Any profile, with the costs of any degrees of tensor parallelism."""
    profile = draw(profiles())
    degrees = draw(st.sets(st.integers(2, 16), max_size=2))
    sharded = [
        Sharded(
            degree,
            tuple(
                OpCost(
                    tuple(seconds / degree for seconds in cost.forward_s),
                    cost.backward_s,
                    draw(st.integers(0, 2**40)),
                )
                for cost in profile.costs
            ),
            tuple(draw(st.integers(0, 2**40)) for _ in profile.costs),
        )
        for degree in sorted(degrees)
    ]
    return dataclasses.replace(profile, sharded=tuple(sharded))


@same_folder
@given(profile=sharded_profiles())
def test_profile_comes_back(profile: Profile, tmp_path: Path) -> None:
    """What is saved loads as an equal profile, with the names that equality leaves out."""
    save_profile(profile, tmp_path / "p.json")
    loaded = load_profile(tmp_path / "p.json")
    assert loaded == profile
    assert loaded.graph.name == profile.graph.name
    assert loaded.graph.granularity == profile.graph.granularity


@same_folder
@given(cluster=clusters())
def test_cluster_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    """What is saved loads as an equal cluster."""
    save_cluster(cluster, tmp_path / "c.json")
    assert load_cluster(str(tmp_path / "c.json")) == cluster


@same_folder
@given(plan=plans(), grouped=st.booleans())
def test_plan_comes_back(plan: Plan, grouped: bool, tmp_path: Path) -> None:
    """What is saved loads as an equal plan, and the file is what the command line prints."""
    if grouped:  # all devices of a stage hold one replica together
        graph = plan.stage_graph
        stages = tuple(dataclasses.replace(s, tensor=len(s.devices)) for s in graph.stages)
        plan = dataclasses.replace(plan, stage_graph=dataclasses.replace(graph, stages=stages))
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text()) == plan_to_dict(plan)


@same_folder
@given(plan=plans(), cluster=clusters())
def test_a_plan_keeps_its_cluster(plan: Plan, cluster: Cluster, tmp_path: Path) -> None:
    """All of it, as a cluster file would hold it; where only its name is known, nothing."""
    assert "machines" not in plan_to_dict(plan)
    plan = dataclasses.replace(plan, cluster=cluster.name, machines=cluster)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    save_cluster(cluster, tmp_path / "c.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["machines"] == json.loads((tmp_path / "c.json").read_text())


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("machines", "name"), "others", "cluster is 'local:4', but machines describes 'others'"),
        (("machines", "memory_bytes"), 0, "machines.memory_bytes is 0"),
        (("machines", "schema"), "anabranch.cluster/2", "machines.schema is"),
        (("machines", "levels", 0, "size"), 10**6 + 1, "machines.levels[0].size is"),
    ],
)
def test_a_plans_cluster_is_read_with_suspicion(
    path: tuple[int | str, ...], value: object, message: str, tmp_path: Path
) -> None:
    """As a cluster file is; and it is the one that the plan names."""
    document = PLAN | {"machines": CLUSTER | {"name": "local:4"}}
    (tmp_path / "plan.json").write_text(edited(document, path, value))
    with pytest.raises(FileFormatError) as refused:
        load_plan(tmp_path / "plan.json")
    assert message in str(refused.value)


def test_bytes_are_a_function_of_the_plan(tmp_path: Path) -> None:
    """Saving twice, or after loading, gives the same bytes; they end with a line break."""
    (tmp_path / "in.json").write_text(json.dumps(PLAN))
    save_plan(load_plan(tmp_path / "in.json"), tmp_path / "a.json")
    save_plan(load_plan(tmp_path / "a.json"), tmp_path / "b.json")
    data = (tmp_path / "a.json").read_bytes()
    assert data == (tmp_path / "b.json").read_bytes()
    assert data.endswith(b"}\n")


def test_modes_in_plan_files(tmp_path: Path) -> None:
    """Files without them are synchronous, and synchronous plans are still written so."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    plan = load_plan(path)
    assert (plan.mode, plan.policy) == ("sync", "")
    assert not {"mode", "policy"} & plan_to_dict(plan).keys()
    path.write_text(json.dumps(PLAN | {"mode": "async", "policy": "stash"}))
    plan = load_plan(path)
    assert (plan.mode, plan.policy) == ("async", "stash")
    document = plan_to_dict(plan)
    assert (document["mode"], document["policy"]) == ("async", "stash")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mode": "asynchronous"}, "mode is"),
        ({"mode": "async", "policy": "hoard"}, "policy is"),
        ({"mode": "async"}, "mode is 'async', but policy is empty; it takes one of naive, stash"),
        ({"policy": "stash"}, "policy is 'stash', but mode is 'sync'"),
        ({"mode": None}, "mode is null"),
    ],
)
def test_modes_that_do_not_exist(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Unknown names, and a policy where there is nothing for it to do."""
    text = json.dumps(PLAN | keys)
    assert refusal(tmp_path / "plan.json", load_plan, text).startswith(message)


def test_file_is_for_people(tmp_path: Path) -> None:
    """One level per line, as a person would have written it."""
    save_cluster(Cluster.preset("summit:8x4"), tmp_path / "c.json")
    assert (tmp_path / "c.json").read_text() == (
        "{\n"
        '  "schema": "anabranch.cluster/1",\n'
        '  "name": "summit:8x4",\n'
        '  "device": "v100",\n'
        '  "memory_bytes": 17179869184,\n'
        '  "cores": 0,\n'
        '  "levels": [\n'
        '    {"name": "node", "size": 4, "bandwidth_bytes_per_s": 45000000000, '
        '"latency_s": 5e-06},\n'
        '    {"name": "network", "size": 8, "bandwidth_bytes_per_s": 12500000000.0, '
        '"latency_s": 1e-05}\n'
        "  ]\n"
        "}\n"
    )


def test_contract_of_the_plan_document() -> None:
    """What other programs may rely on."""
    assert {"planner", "stages", "edges", "depth", "search_s", "predicted"} <= PLAN.keys()
    plan = Plan(
        StageGraph((Stage(("a", "b"), (0,), 2, in_flight=1),), (), 8),
        schedule="1f1b",
        planner="even",
        model="m",
        cluster="local:1",
        profile="measured",
        search_s=0.0,
        simulate_s=0.0,
        predicted=Prediction(0.5, 0.0625, 0.0, (7,)),
    )
    document = plan_to_dict(plan)
    assert document.keys() == PLAN.keys()
    assert document["stages"][0].keys() == PLAN["stages"][0].keys()
    assert document["predicted"] == {
        "step_s": 0.5,
        "samples_per_s": 16.0,
        "bottleneck_s_per_sample": 0.0625,
        "bubble": 0.0,
        "device_peak_bytes": [7],
    }
    assert (document["depth"], document["batch_size"]) == (1, 8)


def edited(document: dict[str, Any], path: tuple[int | str, ...], value: object) -> str:
    """The document with one entry replaced (or left out: ``...``), as JSON."""
    result = copy.deepcopy(document)
    place: Any = result
    for part in path[:-1]:
        place = place[part]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(result)


BROKEN: list[tuple[str, tuple[int | str, ...], object, str]] = [
    # unknown, missing
    ("plan", ("stagse",), [], "unknown key stagse"),
    ("plan", ("stages", 1, "device"), [0], "unknown key stages[1].device"),
    ("plan", ("stages", 2, "devices"), ..., "key stages[2].devices is missing"),
    ("profile", ("operators", 0, "forward_s"), ..., "key operators[0].forward_s is missing"),
    ("cluster", ("levels", 1, "size"), ..., "key levels[1].size is missing"),
    # wrong type: nothing is converted
    ("plan", ("batch_size",), "8", 'batch_size is "8"; it should be a valid integer'),
    ("plan", ("batch_size",), 8.0, "batch_size is 8.0; it should be a valid integer"),
    ("plan", ("batch_size",), True, "batch_size is true; it should be a valid integer"),
    ("plan", ("stages", 0, "recompute"), 1, "stages[0].recompute is 1; it should be a valid bool"),
    ("plan", ("stages", 0, "tensor"), True, "stages[0].tensor is true; it should be a valid integ"),
    ("plan", ("stages", 0, "devices", 0), "0", 'stages[0].devices[0] is "0"'),
    ("plan", ("edges", 0), [0, 1, 2], "edges[0] is [0, 1, 2]"),
    ("plan", ("policy",), "stahs", 'policy is "stahs"; it should be one of naive, stash'),
    ("profile", ("operators",), {}, "operators is {}; it should be a valid list"),
    ("profile", ("operators", 0, "name"), None, "operators[0].name is null"),
    ("cluster", ("name",), 7, "name is 7; it should be a valid string"),
    # numbers that cannot be
    ("profile", ("operators", 0, "forward_s", 1), float("nan"), "operators[0].forward_s[1] is nan"),
    ("profile", ("operators", 0, "forward_s", 1), float("inf"), "operators[0].forward_s[1] is inf"),
    ("profile", ("operators", 0, "backward_s", 0), -0.5, "operators[0].backward_s[0] is -0.5"),
    ("profile", ("parameters", 0, "nbytes"), 2**61, "parameters[0].nbytes is 2305843009213693952"),
    ("profile", ("values", 1, "nbytes"), -1, "values[1].nbytes is -1"),
    ("profile", ("samples", 0), 0, "samples[0] is 0"),
    ("profile", ("operators", 0, "forward_s", 0), 10**400, "operators[0].forward_s[0]"),
    ("cluster", ("memory_bytes",), 10**300, "memory_bytes is 1"),
    ("cluster", ("memory_bytes",), 0, "memory_bytes is 0"),
    ("cluster", ("levels", 0, "bandwidth_bytes_per_s"), 0, "levels[0].bandwidth_bytes_per_s is 0"),
    ("cluster", ("levels", 0, "size"), 10**9, "levels[0].size is 1000000000"),
    ("cluster", ("levels",), [], "levels is []"),
    ("plan", ("stages", 0, "devices", 0), -1, "stages[0].devices[0] is -1"),
    ("plan", ("stages", 0, "devices", 0), 10**6, "stages[0].devices[0] is 1000000"),
    ("plan", ("options", "layers"), 2, "options.layers is 2; it should be a valid string"),
    ("plan", ("options",), {"a\nb": "2"}, "options"),
    ("plan", ("predicted", "bubble"), 1.5, "predicted.bubble is 1.5"),
    # text that could do harm
    ("profile", ("operators", 0, "name"), "../../etc/passwd", "should be a name, not a path"),
    ("profile", ("parameters", 0, "name"), "/etc/passwd", "parameters[0].name is"),
    ("profile", ("parameters", 0, "name"), "C:/windows", "should be a name, not a path"),
    ("profile", ("parameters", 0, "name"), "a\\b", "should be a name, not a path"),
    ("profile", ("operators", 0, "name"), "a\x1b[31m", "should not contain control characters"),
    ("profile", ("operators", 0, "name"), "", "operators[0].name is"),
    ("profile", ("operators", 0, "name"), "x" * 1001, "operators[0].name is"),
    ("plan", ("model",), "line\nbreak", "model is"),
    ("cluster", ("name",), "\ud800", "name is"),
    # parts that do not fit together
    ("profile", ("values", 1, "producer"), "leyer", 'values[1].producer is "leyer"; no operator'),
    ("profile", ("values", 1, "consumers", 0), "los", 'values[1].consumers[0] is "los"'),
    ("profile", ("operators", 0, "parameters", 0), "w", "layer reads parameter w"),
    (
        "profile",
        ("operators", 1, "name"),
        "layer",
        'operators[1].name is "layer", and so is operators[0].name',
    ),
    ("profile", ("operators", 0, "forward_s"), [0.1], "operator layer lacks a time"),
    ("profile", ("samples",), [4, 1], "sample counts (4, 1) are not ascending"),
    ("profile", ("proportional",), True, "exactly one sample count"),
    ("plan", ("edges",), [[0, 3], [1, 2]], "stage edge 0 -> 3"),
    ("plan", ("edges",), [[2, 0]], "stage edge 2 -> 0"),
    ("plan", ("depth",), 3, "depth is 3, but the edges make it 2"),
    ("plan", ("predicted", "device_peak_bytes"), [1], "device_peak_bytes has 1 entries"),
    ("plan", ("predicted", "samples_per_s"), 17.0, "predicted.samples_per_s is 17"),
    ("plan", ("stages", 2, "devices"), [2, 2], "stages[2]: a stage"),
    ("plan", ("stages", 2, "tensor"), 3, "stages[2]: 2 devices are no whole number of groups of 3"),
    ("plan", ("stages", 2, "tensor"), 0, "stages[2].tensor is 0"),
    ("profile", ("sharded",), None, "sharded is null; it should be a valid list"),
    ("sharded", ("sharded", 0, "degree"), 1, "sharded[0].degree is 1"),
    ("sharded", ("sharded", 1, "degree"), 2, "degrees of tensor parallelism [2, 2] do not ascend"),
    (
        "sharded",
        ("sharded", 0, "operators", 0, "kind"),
        "",
        "unknown key sharded[0].operators[0].",
    ),
    ("sharded", ("sharded", 0, "operators", 1), ..., "sharded[0].operators lacks loss"),
    (
        "sharded",
        ("sharded", 0, "operators", 1, "name"),
        "los",
        'sharded[0].operators[1].name is "los',
    ),
    (
        "sharded",
        ("sharded", 0, "operators", 1, "name"),
        "layer",
        "and so is sharded[0].operators[",
    ),
    ("sharded", ("sharded", 0, "operators", 0, "forward_s"), [0.1], "operator layer lacks a time"),
    ("sharded", ("sharded", 0, "operators", 0, "parameter_bytes"), -1, "parameter_bytes is -1"),
    ("cluster", ("levels", 0, "size"), 600_000, "levels multiply to 1200000 devices"),
]


@pytest.mark.parametrize(("kind", "path", "value", "message"), BROKEN)
def test_broken_entry(
    tmp_path: Path, kind: str, path: tuple[int | str, ...], value: object, message: str
) -> None:
    """One wrong entry in a good file: the message names file, key path and value."""
    document, load = KINDS[kind]
    assert message in refusal(tmp_path / "f.json", load, edited(document, path, value))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("{", "is no JSON: Expecting property name"),
        ('{"a": 1,\n "b" 2}', "is no JSON: Expecting ':' delimiter at line 2, column 6"),
        ("[1, 2]", "holds [1, 2]; a"),
        ("null", "holds null; a"),
        ("NaN", "holds nan; a"),
        ("{}", "key schema is missing"),
        ('{"schema": 1}', "schema is 1; a"),
        ('{"schema": "graph.txt"}', 'schema is "graph.txt"; a'),
        ('{"schema": {}}', "schema is {}; a"),
        ('{"a": {"b": [0, {"c": 1, "c": 1}]}}', "key a.b[1].c is written twice"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 5000 + "]" * 5000, "nested too deeply"),
        ('{"a": ' + "9" * 5000 + "}", "holds an absurd number"),
        (b"\xff\xfe{}", "is no text in UTF-8 (byte 0)"),
        (b"\x80\x04K\x01.", "is no text in UTF-8"),
    ],
)
def test_not_our_file(tmp_path: Path, kind: str, text: str | bytes, message: str) -> None:
    """Whatever else a file may be, the message says what it is and not only that it is wrong."""
    assert message in refusal(tmp_path / "f.json", KINDS[kind][1], text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@same_folder
@given(data=st.data(), kind=st.sampled_from(sorted(KINDS)), value=JSON)
def test_any_entry_replaced_by_anything(
    tmp_path: Path, data: st.DataObject, kind: str, value: object
) -> None:
    """Whatever stands in one place of a file, it loads or is refused; nothing else happens."""
    document, load = KINDS[kind]
    path: list[int | str] = []
    place: Any = document
    while isinstance(place, (dict, list)) and place and (not path or data.draw(st.booleans())):
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        path.append(data.draw(st.sampled_from(keys)))
        place = place[path[-1]]
    file = tmp_path / "f.json"
    file.write_text(edited(document, tuple(path), value))
    with contextlib.suppress(FileFormatError):
        load(file)


def test_wrong_kind_of_file(tmp_path: Path) -> None:
    """A plan given where a profile was expected, and a file from the future."""
    path = tmp_path / "f.json"
    assert refusal(path, load_profile, json.dumps(PLAN)) == (
        "is a plan (anabranch.plan/1); a profile is needed here, "
        'with "schema": "anabranch.profile/1"'
    )
    newer = edited(PROFILE, ("schema",), "anabranch.profile/2")
    assert 'in version "2" of the format anabranch.profile; this anabranch reads version 1' in (
        refusal(path, load_profile, newer)
    )


def test_no_file(tmp_path: Path) -> None:
    """Missing, a folder, or a name that no file can have."""
    with pytest.raises(FileFormatError, match=r"nothing\.json does not exist"):
        load_plan(tmp_path / "nothing.json")
    with pytest.raises(FileFormatError, match="is a folder"):
        load_plan(tmp_path)
    with pytest.raises(FileFormatError, match="cannot be read"):
        load_plan("a\0b")
    with pytest.raises(FileFormatError, match="cannot be read"):
        load_plan("x" * 5000)


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    """Some editors put one in front; it changes nothing."""
    (tmp_path / "f.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(CLUSTER).encode())
    assert load_cluster(tmp_path / "f.json").name == "two boxes"


def test_cluster_by_name_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset's name, a path, or a file in the working folder; else the presets are listed."""
    monkeypatch.chdir(tmp_path)
    assert load_cluster("summit:2x4") == Cluster.preset("summit:2x4")
    Path("boxes").write_text(json.dumps(CLUSTER))
    assert load_cluster("boxes").name == "two boxes"
    with pytest.raises(FileFormatError, match=r"boxes\.json does not exist"):
        load_cluster("boxes.json")
    with pytest.raises(ValueError, match=r"unknown cluster 'summit'; write a JSON file or one of"):
        load_cluster("summit")
    with pytest.raises(ValueError, match="unknown cluster"):
        load_cluster("x\0")


def test_save_refuses_what_it_could_not_load(tmp_path: Path) -> None:
    """A name with a line break is refused when it is saved, not when it is missed."""
    profile = Profile(
        OpGraph((Op("a\nb"),), ()), (1,), (OpCost((0.0,), (0.0,), 0),), "cpu", "measured"
    )
    with pytest.raises(FileFormatError, match=r"operators\[0\]\.name"):
        save_profile(profile, tmp_path / "p.json")
    assert list(tmp_path.iterdir()) == []


def test_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash while writing: the old file is still whole and nothing else is left behind."""
    path = tmp_path / "c.json"
    save_cluster(Cluster.preset("summit:8x4"), path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileFormatError, match=r"c\.json cannot be written: No space left"):
        save_cluster(Cluster.preset("summit:2x4"), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_save_to_no_folder(tmp_path: Path) -> None:
    """The folder has to exist; a folder is no file."""
    with pytest.raises(FileFormatError, match="cannot be written: No such file"):
        save_cluster(Cluster.preset("local:1"), tmp_path / "missing" / "c.json")
    with pytest.raises(FileFormatError, match="cannot be written: Is a directory"):
        save_cluster(Cluster.preset("local:1"), tmp_path)


def test_save_follows_links_and_spares_devices(tmp_path: Path) -> None:
    """A symbolic link keeps pointing at its file, and /dev/null stays what it is."""
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    save_cluster(Cluster.preset("local:1"), link)
    assert link.is_symlink()
    assert load_cluster(real) == load_cluster(link)
    save_cluster(Cluster.preset("local:1"), os.devnull)
    assert not Path(os.devnull).is_file()
