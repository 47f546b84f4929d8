"""JSON files: read with suspicion, written whole or not at all."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.cluster import Cluster
from anabranch.errors import FileFormatError
from anabranch.files import load_cluster, load_plan, load_profile, save_cluster, save_profile
from anabranch.files.jsonfile import read_regular, write_text
from anabranch.graph.opgraph import Op, OpGraph
from anabranch.profile.profile import OpCost, Profile
from tests.files.documents import CLUSTER, KINDS, PLAN, PROFILE, edited, refusal, same_folder


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
        "  ],\n"
        '  "calibration": null\n'
        "}\n"
    )


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
    with pytest.raises(FileFormatError, match=r"page\.html cannot be written: No space left"):
        write_text(tmp_path / "page.html", "<html>")
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


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_only_a_regular_file_is_read_whole(tmp_path, make):
    """A pipe would never begin, /dev/zero never end."""
    make(tmp_path / "odd")
    with pytest.raises(OSError, match=r"no regular file|directory"):
        read_regular(tmp_path / "odd")


BROKEN: list[tuple[str, tuple[int | str, ...], object, str]] = [
    # unknown, missing
    ("plan", ("stagse",), [], "unknown key stagse"),
    ("plan", ("stages", 1, "device"), [0], "unknown key stages[1].device"),
    ("plan", ("stages", 2, "devices"), ..., "key stages[2].devices is missing"),
    ("profile", ("operators", 0, "forward_s"), ..., "key operators[0].forward_s is missing"),
    ("cluster", ("levels", 1, "size"), ..., "key levels[1].size is missing"),
    # wrong type: nothing is converted
    ("plan", ("batch_size",), "8", 'batch_size is "8"; it should be a whole number'),
    ("plan", ("batch_size",), 8.0, "batch_size is 8.0; it should be a whole number without point"),
    ("plan", ("batch_size",), True, "batch_size is true; it should be a whole number"),
    ("plan", ("stages", 0, "recompute"), 1, "stages[0].recompute is 1; it should be a valid bool"),
    ("plan", ("stages", 0, "tensor"), True, "stages[0].tensor is true; it should be a whole numb"),
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
    ("plan", ("shape",), "chain", "shape is 'chain', but the edges make it 'graph'"),
    ("plan", ("predicted", "device_peak_bytes"), [1], "devices; leave predicted out"),
    ("plan", ("predicted", "samples_per_s"), 17.0, "predicted.samples_per_s is 17"),
    ("plan", ("stages", 2, "devices"), [2, 2], "stages[2]: a stage"),
    (
        "plan",
        ("stages", 2, "tensor"),
        3,
        "stages[2].tensor is 3: every replica of the stage would share",
    ),
    ("plan", ("stages", 2, "tensor"), 0, "stages[2].tensor is 0"),
    ("cluster", ("levels", 0, "size"), 600_000, "levels multiply to 1200000 devices"),
]


@pytest.mark.parametrize(("kind", "path", "value", "message"), BROKEN)
def test_broken_entry(
    tmp_path: Path, kind: str, path: tuple[int | str, ...], value: object, message: str
) -> None:
    """One wrong entry in a good file: the message names file, key path and value."""
    document, load = KINDS[kind]
    assert message in refusal(tmp_path / "f.json", load, edited(document, path, value))


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


def test_save_refuses_what_it_could_not_load(tmp_path: Path) -> None:
    """A name with a line break is refused when it is saved, not when it is missed."""
    profile = Profile(
        OpGraph((Op("a\nb"),), ()), (1,), (OpCost((0.0,), (0.0,), 0),), "cpu", "measured"
    )
    with pytest.raises(FileFormatError, match=r"operators\[0\]\.name"):
        save_profile(profile, tmp_path / "p.json")
    assert list(tmp_path.iterdir()) == []
