"""Each published format finds its reader; any other file is refused."""

import contextlib
import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.errors import FileFormatError
from anabranch.files import load_profile, save_profile
from benchmarks.planners.published import read_profile
from benchmarks.planners.published.__main__ import main
from tests.benchmarks.published.test_dnn_partitioning import LAYERS, OPERATORS
from tests.benchmarks.published.test_piper import BERT, GNMT
from tests.files.test_pipedream import LINES
from tests.shared_profiles import SHARED, needs_shared

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
GOOD = {
    "graph.txt": "\n".join(LINES),
    "bert.json": json.dumps(BERT),
    "gnmt.json": json.dumps(GNMT),
    "layers.json": json.dumps(LAYERS),
    "operators.json": json.dumps(OPERATORS),
}


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("samples", [None, 3])
def test_read_and_kept_in_our_own_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, samples: int | None
) -> None:
    """The command turns every format into ours, as the function does."""
    path, ours = tmp_path / name, tmp_path / "ours.json"
    path.write_text(GOOD[name])
    more = ["--samples", str(samples)] if samples else []
    monkeypatch.setattr("sys.argv", ["published", str(path), "-o", str(ours), *more])
    main()
    assert load_profile(ours) == read_profile(path, samples)


@pytest.mark.parametrize("text", ["{", "{}", '{"nodes": []}', '{"schema": "anabranch.plan/1"}'])
def test_other_json_is_refused(tmp_path: Path, text: str) -> None:
    """With the file."""
    (tmp_path / "file").write_text(text)
    with pytest.raises(FileFormatError, match="file is "):
        read_profile(tmp_path / "file")


def test_the_name_of_the_file_does_not_matter(tmp_path: Path) -> None:
    """Content does: every good file under the name of another."""
    for text in GOOD.values():
        (tmp_path / "profile").write_text(text)
        assert read_profile(tmp_path / "profile").source == "imported"


@same_folder
@given(data=st.data(), document=st.sampled_from([BERT, GNMT, LAYERS, OPERATORS]), value=JSON)
def test_any_entry_replaced_by_anything(
    tmp_path: Path, data: st.DataObject, document: dict[str, Any], value: object
) -> None:
    """Whatever stands in one place of a file, it can be read and saved, or is refused."""
    changed = copy.deepcopy(document)
    place: Any = changed
    while True:
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = value
    path = tmp_path / "f.json"
    path.write_text(json.dumps(changed))
    with contextlib.suppress(FileFormatError):
        save_profile(read_profile(path), tmp_path / "ours.json")


@needs_shared
def test_every_published_profile_can_be_kept(tmp_path: Path) -> None:
    """All 33, each the same after it went through our own format, with times that can be."""
    files = [*SHARED.glob("[dp]*/**/*.txt"), *SHARED.glob("[dp]*/**/*.json")]
    files = [path for path in files if "LICENSE" not in path.name]
    assert len(files) == 33
    for path in files:
        found = read_profile(path)
        save_profile(found, tmp_path / "ours.json")
        assert load_profile(tmp_path / "ours.json") == found
        each = [cost.forward_s[0] + cost.backward_s[0] for cost in found.costs]
        assert math.isfinite(sum(each))
        assert 1e-6 < sum(each) / found.samples[0] < 2
