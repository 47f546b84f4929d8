"""Profile files: what is written comes back."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from anabranch.files import (
    load_plan,
    load_profile,
    profile_to_dict,
    save_profile,
)
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Parameter, Value
from anabranch.profile.profile import OpCost, Profile, Sharded
from tests.files.documents import (
    PLAN,
    PROFILE,
    SHARDED,
    same_folder,
)
from tests.strategies import profiles


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
