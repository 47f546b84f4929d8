"""Which reader gets a file, and that nothing but a refusal comes of any other file."""

from __future__ import annotations

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
from anabranch.profile.readers import is_foreign, read_profile
from tests.profile.readers.test_dnn_partitioning import LAYERS, OPERATORS
from tests.profile.readers.test_pipedream import LINES
from tests.profile.readers.test_piper import BERT, GNMT
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
def test_read_and_kept_in_our_own_format(tmp_path: Path, name: str, samples: int | None) -> None:
    """Whatever is read can be saved, loads as the same, and is then no longer foreign."""
    path = tmp_path / name
    path.write_text(GOOD[name])
    found = read_profile(path, samples)
    assert is_foreign(path)
    save_profile(found, tmp_path / "ours.json")
    assert load_profile(tmp_path / "ours.json") == found
    assert not is_foreign(tmp_path / "ours.json")


def test_the_name_of_the_file_does_not_matter(tmp_path: Path) -> None:
    """Content does: every good file under the name of another."""
    for text in GOOD.values():
        (tmp_path / "profile").write_text(text)
        assert read_profile(tmp_path / "profile").source == "imported"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n\t\n", "is empty"),
        ("hello\nworld", 'is no profile: it starts with "hello"'),
        ("1.5 2.5\n", 'is no profile: it starts with "1.5 2.5"'),
        ("{", "is no JSON"),
        ("[1, 2]", "is JSON, but no object"),
        ("{}", "is JSON with no keys, which is no profile"),
        ('{"nodes": []}', 'is JSON with "nodes", which is no profile'),
        ('{"nodes": 3, "a": 1}', 'is JSON with "nodes", "a", which is no profile'),
        ('{"schema": "anabranch.plan/1"}', 'has the schema "anabranch.plan/1"'),
        ("3 0 0 1\n2 64 128 1 1 64 64 1 1\n", "is a plan of GraphPipe's runtime (3 operators"),
        ("3 0 0 1", "is a plan of GraphPipe's runtime (3 operators"),
        ("3 0 0 1 1", "is no profile"),
        ("99999999999999999999 1", "is no profile"),
        (b"\xff\xfe\x00", "is no text in UTF-8"),
    ],
)
def test_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    """The message says what the file is, and what can be read."""
    path = tmp_path / "file"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileFormatError) as caught:
        read_profile(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    """Missing, or a folder."""
    with pytest.raises(FileFormatError, match="does not exist"):
        read_profile(tmp_path / "nothing.txt")
    with pytest.raises(FileFormatError, match="is a folder"):
        is_foreign(tmp_path)


def test_samples_are_a_count(tmp_path: Path) -> None:
    """A wrong argument is no fault of the file."""
    for samples in (0, -1, 2**41):
        with pytest.raises(ValueError, match=f"samples is {samples}"):
            read_profile(tmp_path / "nothing.txt", samples)


@same_folder
@given(text=st.text(max_size=300))
def test_any_text(tmp_path: Path, text: str) -> None:
    """Nothing but a profile or a refusal."""
    path = tmp_path / "f"
    path.write_bytes(text.encode(errors="replace"))
    with contextlib.suppress(FileFormatError):
        read_profile(path)


COLUMNS = ["forward_compute_time=1", "backward_compute_time=2.5e3", "activation_size=[1;2]"]
COLUMNS += ["activation_size=64", "parameter_size=9", "parameter_size=nan", "stage_id=3"]
OTHERS = ["node1", "node2", "node3", "--", "Input", "Conv2d(3)", "Embedding(5,4)", "-1", "1e999"]
WORDS = st.sampled_from([*COLUMNS, *OTHERS, *"=,[];²\t\n\r\x0b\x00\u2028"])


@same_folder
@given(words=st.lists(WORDS, max_size=40), gap=st.sampled_from(["", " ", " -- ", ", "]))
def test_any_words_of_the_format(tmp_path: Path, words: list[str], gap: str) -> None:
    """Texts that look like PipeDream's, most of them broken."""
    path = tmp_path / "f"
    path.write_bytes(("node1 -- " + gap.join(words)).encode())
    with contextlib.suppress(FileFormatError):
        read_profile(path)


@same_folder
@given(data=st.data())
def test_any_line_replaced_by_anything(tmp_path: Path, data: st.DataObject) -> None:
    """A good file with one line, or one character, changed."""
    lines = list(LINES)
    i = data.draw(st.integers(0, len(lines) - 1))
    at = data.draw(st.integers(0, len(lines[i])))
    lines[i] = lines[i][:at] + data.draw(st.text(max_size=4)) + lines[i][at + 1 :]
    path = tmp_path / "f"
    path.write_bytes("\n".join(lines).encode(errors="replace"))
    with contextlib.suppress(FileFormatError):
        save_profile(read_profile(path), tmp_path / "ours.json")


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
def test_published_plans_are_no_profiles() -> None:
    """All seven of GraphPipe's."""
    plans = sorted((SHARED / "graphpipe-plans").glob("*.txt"))
    assert len(plans) == 7
    for path in plans:
        with pytest.raises(FileFormatError, match="is a plan of GraphPipe's runtime"):
            read_profile(path)


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
