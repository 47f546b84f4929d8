"""Kept captures as files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.errors import FileFormatError
from anabranch.files import captures
from anabranch.files.captures import KeptCapture, load_capture, save_capture
from anabranch.graph.opgraph import BATCH, Op, OpGraph, Parameter, Value
from anabranch.profile.kernel_trace import Kernel, KernelTrace, TracedModel

GRAPH = OpGraph(
    (Op("a", ("w",), "Linear"), Op("b")),
    (Value(BATCH, (0,), 4, grad=False, name="x"), Value(0, (1,), 8)),
    (Parameter("w", 64),),
    "Net",
    "block",
    "sum",
    ("b.norm",),
)


def traced(n: float = 1.0) -> TracedModel:
    kernels = (
        Kernel("mm", 8.0 * n, ((n, 2.0, 3.0, 1.0),), "float32"),
        Kernel("add", n, (), "x", 2),
    )
    few = KernelTrace(kernels, (0, 1), (0, 1), (16, 0), (8, 24))
    return TracedModel(GRAPH, few, few)


def test_a_capture_comes_back(tmp_path: Path) -> None:
    """Operators, values, kernels with sizes, and the names that comparisons leave out."""
    path = tmp_path / "kept.json"
    kept = KeptCapture(traced(), {"/home/me/net.py": "0f"})
    save_capture(kept, "key", path)
    assert load_capture(path, "key") == kept
    graph = load_capture(path, "key").traced.graph
    assert (graph.name, graph.granularity) == ("Net", "block")
    assert (graph.loss_kind, graph.normalised) == ("sum", ("b.norm",))


def test_a_capture_of_another_key_is_none(tmp_path: Path) -> None:
    """A file that was renamed or copied is not taken for what its name says."""
    save_capture(KeptCapture(traced(), {}), "key", tmp_path / "kept.json")
    with pytest.raises(FileFormatError, match="key is key, not other"):
        load_capture(tmp_path / "kept.json", "other")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"nbytes": [1.0]}, "argument 2 is shorter"),
        ({"operators": [0, 7]}, "belongs to none of 2 operators"),
        ({"kept_bytes": [1]}, "belongs to none of 1 operators"),
        ({"working_bytes": [1]}, "that 2 operators keep, that 1 work with"),
        ({"kept_bytes": [1, 2, 3], "working_bytes": [1, 2, 3]}, "2 operators, the trace 3"),
        ({"nbytes": [1.0, -1.0]}, "greater than or equal to 0"),
        ({"products": [[], [[1.0]]]}, "at least 4"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: dict, says: str) -> None:
    """A damaged file never becomes a plan."""
    path = tmp_path / "kept.json"
    save_capture(KeptCapture(traced(), {}), "key", path)
    document = json.loads(path.read_text())
    document["few"].update(change)
    del document["checksum"]
    path.write_text(json.dumps(document | {"checksum": captures._checksum(document)}))
    with pytest.raises(FileFormatError, match=says):
        load_capture(path, "key")
