"""Plan files: what is written comes back; modes, clusters and the contract of the document."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.errors import FileFormatError
from anabranch.files import load_plan, plan_to_dict, save_cluster, save_plan
from anabranch.graph.opgraph import ModelSize
from anabranch.plans.plan import CHANGED, Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from tests.files.documents import CLUSTER, PLAN, edited, refusal, same_folder
from tests.strategies import clusters, plans


def test_plan_by_eye(tmp_path: Path) -> None:
    """The document above is this plan."""
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    assert load_plan(tmp_path / "plan.json") == Plan(
        stage_graph=StageGraph(
            stages=(
                Stage(("left",), (0,), 2, in_flight=2),
                Stage(("right",), (1,), 2, in_flight=2, recompute=True),
                Stage(("join", "loss"), (2, 3), 2, in_flight=1),
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


def test_plans_without_a_tensor_degree(tmp_path: Path) -> None:
    """The key may be left out."""
    older = copy.deepcopy(PLAN)
    for stage in older["stages"]:
        del stage["tensor"]
    (tmp_path / "plan.json").write_text(json.dumps(older))
    assert plan_to_dict(load_plan(tmp_path / "plan.json"))["stages"] == PLAN["stages"]


@same_folder
@given(plan=plans(), shared=st.booleans())
def test_plan_comes_back(plan: Plan, shared: bool, tmp_path: Path) -> None:
    """What is saved loads as an equal plan, and the file is what the command line prints."""
    plan = dataclasses.replace(plan, shard_optimizer=shared and plan.mode == "sync")
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
    ("trait", "value"),
    [
        ("shard_optimizer", True),
        ("sparse_embeddings", True),
        ("interrupted", True),
        ("model_size", ModelSize(2**20, 108)),
    ],
)
def test_what_is_so_of_a_plan_is_written(trait: str, value: object, tmp_path: Path) -> None:
    """Where it is another way than the default, so that whoever reads the file takes it over."""
    (tmp_path / "in.json").write_text(json.dumps(PLAN))
    plan = load_plan(tmp_path / "in.json")
    assert trait not in plan_to_dict(plan)
    save_plan(dataclasses.replace(plan, **{trait: value}), tmp_path / "out.json")
    assert getattr(load_plan(tmp_path / "out.json"), trait) == value


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mode": "asynchronous"}, "mode is"),
        ({"mode": "async", "policy": "hoard"}, "policy is"),
        ({"mode": "async"}, "mode is 'async', but policy is empty; it takes one of naive, stash"),
        ({"policy": "stash"}, "policy is 'stash', but mode is 'sync'"),
        ({"mode": "async", "policy": "stash", "shard_optimizer": True}, "shard_optimizer is true"),
        ({"round_robin": True}, "round_robin is true, but mode is 'sync'"),
        (
            {"mode": "async", "policy": "stash", "sparse_embeddings": True},
            "sparse_embeddings is true",
        ),
        ({"mode": None}, "mode is null"),
    ],
)
def test_modes_that_do_not_exist(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Unknown names, and a policy where there is nothing for it to do."""
    text = json.dumps(PLAN | keys)
    assert refusal(tmp_path / "plan.json", load_plan, text).startswith(message)


@pytest.mark.parametrize(
    ("key", "value", "stale"),
    [
        ("microbatch_size", 1, True),
        ("in_flight", 2, True),
        ("schedule", "1f1b-deep", True),
        ("options", {"layers": "8"}, True),
        ("notes", ["mine"], False),
        ("search_s", 9.0, False),
    ],
)
def test_a_prediction_of_another_plan_is_left_out(
    key: str, value: object, stale: bool, tmp_path: Path
) -> None:
    """What decides about the step was changed by hand, and its prediction left as it was."""
    plan = Plan(
        StageGraph((Stage(("a",), (0,), 2, in_flight=1),), (), 4),
        **{"schedule": "1f1b", "planner": "even", "model": "m", "cluster": "local:1"},
        **{"profile": "measured", "search_s": 0.0, "simulate_s": 0.0},
        predicted=Prediction(0.5, 0.1, 0.0, (7,)),
    )
    document = plan_to_dict(plan)
    (document if key in document else document["stages"][0])[key] = value
    (tmp_path / "plan.json").write_text(json.dumps(document, indent=3))
    read = load_plan(tmp_path / "plan.json")
    assert (read.predicted is None) == (CHANGED in read.notes) == stale


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
        "period_s": None,
        "exposed_sums": None,
        "bound_s": None,
        "enough_devices": None,
        "enough_step_s": None,
        "digest": document["predicted"]["digest"],
    }
    assert len(document["predicted"]["digest"]) == 16
    assert (document["depth"], document["batch_size"]) == (1, 8)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"batch_size": 10**6}, r"stages\[0\].microbatch_size is 1, which .* into 1000000 micro-"),
        ({"granularity": "none"}, "granularity is \"none\"; it should be 'operator', 'layer' or"),
    ],
)
def test_what_would_take_all_time_or_is_unknown_is_refused(
    keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Before anything is made of it: so many micro-batches take minutes and gigabytes."""
    stages = [{"operators": ["a"], "devices": [0], "microbatch_size": 1}]
    document = {
        "schema": "anabranch.plan/1", "planner": "", "model": "", "device": "", "cluster": "",
        "profile": "", "batch_size": 8, "schedule": "1f1b", "depth": 1, "search_s": 0.0,
        "simulate_s": 0.0, "predicted": None, "stages": stages, "edges": [],
    }  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    assert load_plan(path).stage_graph.batch_size == 8
    path.write_text(json.dumps(document | keys))
    with pytest.raises(FileFormatError, match=said):
        load_plan(path)
