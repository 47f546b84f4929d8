"""Piper's JSON."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import FileFormatError
from anabranch.graph.opgraph import BATCH, Op, Parameter, Value
from anabranch.profile.profile import OpCost, Profile
from benchmarks.planners.published import read_profile
from tests.files.documents import edited
from tests.shared_profiles import SHARED, needs_shared


def variant(name: str, time: float, parameters: float, held: float) -> dict[str, Any]:
    """One way to run a node."""
    return {
        "id": name,
        "timePerSample": time,
        "parameterSize": parameters,
        "memoryUsageA": held,
        "memoryUsageB": 2 * parameters,
        "syncTimeFw": {},
        "syncTimeBw": {},
    }


def both(time: float, recompute: float, parameters: float, held: float, kept: float) -> list[Any]:
    """A node without and with recomputation."""
    return [
        variant("vanilla", time, parameters, held),
        variant("activation recomp", recompute, parameters, kept),
    ]


# ids and mask are data; embed -> layer <- mask; recomputation keeps exactly what enters.
BERT: dict[str, Any] = {
    "maxDevices": 10,
    "maxMemoryPerDevice": 80000000000.0,
    "bandwidth": 25000000000.0,
    "mbsInBatch": 1920,
    "nodes": [
        {
            "id": 0,
            "name": "tensor",
            "TMPCs": {"1": both(0.0, 0.0, 0.0, 8, 8), "2": both(0.0, 0.0, 0.0, 8, 8)},
        },
        {
            "id": 1,
            "name": "Embedding",
            "TMPCs": {
                "1": both(0.3, 0.4, 1000.0, 30, 8),
                "2": both(0.2, 0.2, 500.0, 28, 8),
                "4": both(0.1, 0.1, 250.0, 28, 8),
            },
        },
        {
            "id": 2,
            "name": "tensor",
            "TMPCs": {"1": both(0.0, 0.0, 0.0, 16, 16), "2": both(0.0, 0.0, 0.0, 16, 16)},
        },
        {
            "id": 3,
            "name": "Layer",
            "TMPCs": {"1": both(0.6, 0.8, 400.0, 580, 80), "2": both(0.4, 0.5, 200.0, 330, 80)},
        },
    ],
    "edges": [
        {"sourceId": 0, "destId": 1, "communicationCost": 8.0},
        {"sourceId": 1, "destId": 3, "communicationCost": 64.0},
        {"sourceId": 2, "destId": 3, "communicationCost": 16.0},
    ],
}

# From PipeDream's profiles, in milliseconds: node1 loads data, memory is the output.
GNMT: dict[str, Any] = {
    "maxBatchSize": 256,
    "nodes": [
        {"id": 7, "name": "node2", "TMPCs": {"1": both(9.0, 12.0, 100.0, 640, 58)}},
        {"id": 8, "name": "node1", "TMPCs": {"1": both(19.0, 38.0, 0.0, 320, 29)}},
        {"id": 9, "name": "node3", "TMPCs": {"1": [variant("vanilla", 6.0, 50.0, 100)]}},
    ],
    "edges": [
        {"sourceId": 8, "destId": 7, "communicationCost": 320.0},
        {"sourceId": 7, "destId": 9, "communicationCost": 640.0},
    ],
}


def read(folder: Path, document: object, samples: int | None = None) -> Profile:
    """The document as a file, read."""
    path = folder / "model.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return read_profile(path, samples)


def test_by_eye(tmp_path: Path) -> None:
    """Costs on one device; times are seconds."""
    found = read(tmp_path, BERT)
    assert found.graph.ops == (Op("1.Embedding", ("1.Embedding",)), Op("3.Layer", ("3.Layer",)))
    assert found.graph.values == (
        Value(BATCH, (0,), 8, grad=False, name="0.tensor"),
        Value(BATCH, (1,), 16, grad=False, name="2.tensor"),
        Value(0, (1,), 64),
    )
    assert found.graph.parameters == (Parameter("1.Embedding", 1000), Parameter("3.Layer", 400))
    assert found.samples == (1,)
    # The embedding holds 30 bytes, of which 8 enter; 64 leave. Nothing leaves the layer.
    assert [cost.kept_bytes for cost in found.costs] == [30 - 8 + 64, 580 - 80]
    assert found.costs[0].forward_s == pytest.approx([0.1])
    assert found.costs[0].backward_s == pytest.approx([0.2])
    assert found.costs[1].forward_s == pytest.approx([0.2])
    assert found.costs[1].backward_s == pytest.approx([0.4])
    assert "times read as seconds, a sample is a micro-batch" in found.device


def test_files_made_from_pipedream(tmp_path: Path) -> None:
    """Milliseconds, memory that is the output, and data loading that is no operator."""
    found = read(tmp_path, GNMT)
    assert [op.name for op in found.graph.ops] == ["node2", "node3"]
    assert found.graph.values == (
        Value(BATCH, (0,), 320, grad=False, name="node1"),
        Value(0, (1,), 640),
    )
    assert found.costs == (OpCost((0.003,), (0.006,), 640), OpCost((0.002,), (0.004,), 100))
    assert "times read as milliseconds" in found.device


def test_seconds_or_milliseconds(tmp_path: Path) -> None:
    """Ten seconds for one micro-batch is the line."""
    document = copy.deepcopy(GNMT)
    for node in document["nodes"]:
        for variant in node["TMPCs"]["1"]:
            variant["timePerSample"] /= 4  # 34 -> 8.5
    assert read(tmp_path, document).costs[0].forward_s == (0.75,)
    assert read(tmp_path, GNMT).costs[0].forward_s == (0.003,)


def test_sizes_are_divided_by_the_samples(tmp_path: Path) -> None:
    """Who knows how many samples a micro-batch has can say so; parameters stay whole."""
    found = read(tmp_path, BERT, samples=4)
    assert found.samples == (4,)
    assert [value.nbytes for value in found.graph.values] == [2, 4, 16]
    assert [parameter.nbytes for parameter in found.graph.parameters] == [1000, 400]
    assert "micro-batch" not in found.device


def test_edges_of_different_size_are_different_values(tmp_path: Path) -> None:
    """The same bytes from one node are one value, whoever reads it."""
    document = copy.deepcopy(BERT)
    document["nodes"].append({"id": 4, "name": "Head", "TMPCs": document["nodes"][3]["TMPCs"]})
    document["edges"] += [
        {"sourceId": 1, "destId": 4, "communicationCost": 64.0},
        {"sourceId": 3, "destId": 4, "communicationCost": 5.0},
        {"sourceId": 2, "destId": 4, "communicationCost": 17.0},
    ]
    made = [(v.producer, v.consumers, v.nbytes) for v in read(tmp_path, document).graph.values]
    assert made == [(-1, (0,), 8), (-1, (1,), 16), (-1, (2,), 17), (0, (1, 2), 64), (1, (2,), 5)]


WHOLE = ("nodes", 1, "TMPCs", "1", 0)
BROKEN: list[tuple[tuple[int | str, ...], object, str]] = [
    (("colour",), 1, "unknown key colour; misspelt, or written by another version of Piper"),
    (("bandwidth",), 0, "bandwidth is 0; it should be greater than 0"),
    (("nodes",), ..., "is JSON, but neither"),
    (("edges",), ..., "key edges is missing"),
    (("nodes", 1, "weight"), 1, "unknown key nodes[1].weight"),
    (("nodes", 1, "id"), 0, "nodes[1] describes node 0, and so does nodes[0]"),
    (("nodes", 1, "id"), "1", 'nodes[1].id is "1"; it should be a whole number'),
    (("nodes", 1, "TMPCs"), ..., "key nodes[1].TMPCs is missing"),
    (("nodes", 1, "TMPCs", "1"), ..., "key nodes[1].TMPCs.1 is missing"),
    (("nodes", 1, "TMPCs", "1"), [], 'nodes[1].TMPCs.1 has the variants -; "vanilla" is needed'),
    (("nodes", 1, "TMPCs", "two"), [], "nodes[1].TMPCs.two"),
    (("nodes", 1, "TMPCs", "1", 1, "id"), "vanilla", "has the variants vanilla, vanilla"),
    ((*WHOLE, "id"), "other", 'nodes[1].TMPCs.1[0].id is "other"'),
    ((*WHOLE, "timePerSample"), ..., "key nodes[1].TMPCs.1[0].timePerSample is missing"),
    ((*WHOLE, "timePerSample"), -0.5, "nodes[1].TMPCs.1[0].timePerSample is -0.5"),
    ((*WHOLE, "timePerSample"), float("nan"), "nodes[1].TMPCs.1[0].timePerSample is nan"),
    ((*WHOLE, "timePerSample"), float("inf"), "nodes[1].TMPCs.1[0].timePerSample is inf"),
    ((*WHOLE, "memoryUsageA"), 2.0**61, "nodes[1].TMPCs.1[0].memoryUsageA is 2.3"),
    ((*WHOLE, "syncTimeFw"), {"0": -1}, "nodes[1].TMPCs.1[0].syncTimeFw.0 is -1"),
    (("edges", 1, "communicationCost"), "64", 'edges[1].communicationCost is "64"'),
    (("edges", 1, "destId"), 9, "edges[1] is an edge 1 -> 9, but there is no node 9"),
    (("edges", 0), {"sourceId": 3, "destId": 1, "communicationCost": 8.0}, "part of a cycle of 2"),
    (("edges", 2), {"sourceId": 1, "destId": 3, "communicationCost": 8.0}, "node 2 (tensor) is"),
    (("edges", 1), {"sourceId": 0, "destId": 3, "communicationCost": 8.0}, "falls apart: nothing"),
]


@pytest.mark.parametrize(("path", "value", "message"), BROKEN)
def test_broken_entry(
    tmp_path: Path, path: tuple[int | str, ...], value: object, message: str
) -> None:
    """One wrong entry in a good file: the message names file, key path and value."""
    with pytest.raises(FileFormatError) as caught:
        read(tmp_path, edited(BERT, path, value))
    assert str(caught.value).startswith(str(tmp_path / "model.json"))
    assert message in str(caught.value)


@needs_shared
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "loading_s", "total_s", "parameters"),
    [
        ("bert32a100", 37, 67, 0.0, 0.973, 5879.5),
        ("gnmt", 78, 104, 0.0, 0.520453, 1110.9),
        ("resnet", 177, 193, 0.018962, 0.462381, 102.2),
    ],
)
def test_published_profiles(
    name: str, nodes: int, edges: int, loading_s: float, total_s: float, parameters: float
) -> None:
    """Counts, times (without the loading of data) and parameters, added up apart."""
    found = read_profile(SHARED / "piper" / f"{name}.json")
    batch = [value for value in found.graph.values if value.producer == BATCH]
    assert len(found.graph) + len({value.name for value in batch}) == nodes
    assert len(found.graph.edges) + sum(len(value.consumers) for value in batch) == edges
    seconds = sum(cost.forward_s[0] + cost.backward_s[0] for cost in found.costs)
    assert seconds == pytest.approx(total_s - loading_s, abs=5e-4 if name[0] == "b" else 1e-9)
    assert sum(found.graph.parameter_bytes.values()) / 1e6 == pytest.approx(parameters, abs=0.06)
