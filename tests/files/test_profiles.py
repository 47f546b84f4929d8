"""Profile files: what is written comes back."""

import copy
import json
import re
from pathlib import Path

from hypothesis import given

from anabranch.files import load_profile, save_profile
from anabranch.files.profiles import profile_to_dict
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Parameter, Value
from anabranch.profile.profile import OpCost, Profile
from tests.files.documents import PROFILE, same_folder
from tests.strategies import profiles


def test_the_profile_of_the_page(tmp_path: Path) -> None:
    """The graph that docs/how-to-choose.md writes by hand is two towers and their loss."""
    page = Path(__file__).parents[2] / "docs" / "how-to-choose.md"
    (document,) = re.findall(r"```json\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "p.json").write_text(document)
    assert load_profile(tmp_path / "p.json").graph.edges == ((0, 2), (1, 2))


def test_profile_by_eye(tmp_path: Path) -> None:
    """The document above is this profile."""
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    assert load_profile(tmp_path / "p.json") == Profile(
        graph=OpGraph(
            ops=(Op("layer", ("layer.weight",), "Linear"), Op("loss")),
            values=(Value(BATCH, (0,), 40, grad=False, name="image"), Value(0, (1,), 40)),
            parameters=(Parameter("layer.weight", 400),),
        ),
        samples=(1, 4),
        costs=(OpCost((0.001, 0.002), (0.002, 0.004), 40), OpCost((0.0, 0.0), (0.0, 0.0), 0)),
        device="cpu",
        source="measured",
    )


def test_gradients_of_weights_are_written_where_they_are_known(tmp_path: Path) -> None:
    """One key of an operator; a file without it is as it was before."""
    document = copy.deepcopy(PROFILE)
    document["operators"][0]["weight_s"] = [0.0005, 0.0015]
    (tmp_path / "p.json").write_text(json.dumps(document))
    profile = load_profile(tmp_path / "p.json")
    assert [cost.weight_s for cost in profile.costs] == [(0.0005, 0.0015), ()]
    assert profile_to_dict(profile) == document


@same_folder
@given(profile=profiles())
def test_profile_comes_back(profile: Profile, tmp_path: Path) -> None:
    """What is saved loads as an equal profile, with the names that equality leaves out."""
    save_profile(profile, tmp_path / "p.json")
    loaded = load_profile(tmp_path / "p.json")
    assert loaded == profile
    assert loaded.graph.name == profile.graph.name
    assert loaded.graph.granularity == profile.graph.granularity
