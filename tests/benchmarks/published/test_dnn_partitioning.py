"""The JSON of msr-fiddle/dnn-partitioning: layers and operators, training and inference."""

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


def node(
    key: int, name: str, ms: float, size: float, color: int | None, backward: object = 0
) -> Any:
    """One node, ten times as slow on a CPU."""
    made = {
        "name": name,
        "id": key,
        "supportedOnFpga": 1,
        "cpuLatency": 10 * ms,
        "fpgaLatency": ms,
        "isBackwardNode": backward,
        "size": size,
    }
    return made if color is None else made | {"colorClass": color}


def edge(source: int, target: int, size: float) -> Any:
    """One edge."""
    return {"sourceId": source, "destId": target, "cost": size / 2**31, "size": size}


# node1 (data) -> node2 -> node3, and node2 -> node4 <- node3; gradients drawn along, as published.
LAYERS: dict[str, Any] = {
    "maxSizePerFPGA": 17185374208.0,
    "maxFPGAs": 6,
    "maxCPUs": 1,
    "nodes": [
        node(1, "node1", 18.0, 64.0, 1),
        node(5, "node1grad", 0.0, 64.0, 1, 1),
        node(2, "node2", 2.0, 700.0 + 32, 2),
        node(6, "node2grad", 3.0, 700.0 + 32, 2, True),
        node(3, "node3", 1.0, 32.0, 3),
        node(7, "node3grad", 1.5, 32.0, 3, True),
        node(4, "node4", 0.5, 90.0 + 8, 4),
        node(8, "node4grad", 1.0, 90.0 + 8, 4, 1),
    ],
    "edges": [
        edge(1, 2, 64),
        edge(2, 3, 32),
        edge(2, 4, 32),
        edge(3, 4, 32),
        edge(5, 6, 32),
        edge(6, 7, 32),
        edge(6, 8, 8),
        edge(7, 8, 8),
    ],
}

# w -> matmul -> add -> (loss), with the gradients, and a sum of gradients between them.
OPERATORS: dict[str, Any] = {
    "nodes": [
        node(0, "w", 0, 100.0, 1, False),
        node(1, "MatMul1", 4.0, 40.0, 1, False),
        node(2, "Add1", 1.0, 40.0, 2, False),
        node(3, "Mul1", 0.5, 40.0, None, False),
        node(4, "Loss", 0.25, 4.0, 3, True),
        node(5, "Loss_Grad/Identity_0", 0.25, 4.0, 3, True),
        node(6, "Mul1_Grad/Mul_0", 0.5, 40.0, None, True),
        node(7, "Add1_Grad/Identity_0", 1.0, 40.0, 2, True),
        node(8, "AccumulateGrad_x", 0.5, 40.0, None, True),
        node(9, "MatMul1_Grad/Gemm_0", 8.0, 100.0, 1, True),
        node(10, "AdamOptimizer_w", 0.1, 100.0, 1, True),
    ],
    "edges": [
        edge(0, 1, 100),
        edge(0, 10, 100),
        edge(1, 2, 40),
        edge(1, 3, 40),
        edge(2, 3, 41),
        edge(3, 4, 42),
        edge(4, 5, 4),
        edge(5, 6, 42),
        edge(2, 6, 41),
        edge(6, 7, 41),
        edge(6, 8, 40),
        edge(7, 8, 40),
        edge(8, 9, 40),
        edge(9, 10, 100),
    ],
}


def read(folder: Path, document: object, samples: int | None = None) -> Profile:
    """The document as a file, read."""
    path = folder / "model.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return read_profile(path, samples)


def test_layer_graph_by_eye(tmp_path: Path) -> None:
    """Forward and backward joined, size split into parameters and output, node1 is the batch."""
    found = read(tmp_path, LAYERS)
    assert found.graph.ops == (Op("node2", ("node2",)), Op("node3"), Op("node4", ("node4",)))
    assert found.graph.values == (
        Value(BATCH, (0,), 64, grad=False, name="node1"),
        Value(0, (1, 2), 32),
        Value(1, (2,), 32),
    )
    assert found.graph.parameters == (Parameter("node2", 700), Parameter("node4", 90))
    assert found.costs == (
        OpCost((0.002,), (0.003,), 32),
        OpCost((0.001,), (0.0015,), 32),
        OpCost((0.0005,), (0.001,), 8),
    )
    assert found.graph.granularity == "layer"
    assert "times read as milliseconds, a sample is the whole mini-batch" in found.device


def test_gradients_drawn_backwards_are_the_same_graph(tmp_path: Path) -> None:
    """Only the last node's output is told by the published, forward way of drawing them."""
    document = copy.deepcopy(LAYERS)
    for entry in document["edges"][4:]:
        entry["sourceId"], entry["destId"] = entry["destId"], entry["sourceId"]
    turned, drawn = read(tmp_path, document), read(tmp_path, LAYERS)
    assert turned.graph.ops == drawn.graph.ops
    assert turned.graph.values == drawn.graph.values
    assert turned.costs[:2] == drawn.costs[:2]
    assert turned.graph.parameter_bytes == {"node2": 700, "node4": 98}


def test_gradients_are_joined_by_name_without_colors(tmp_path: Path) -> None:
    """colorClass is optional; node2grad is of node2 all the same."""
    document = copy.deepcopy(LAYERS)
    for entry in document["nodes"]:
        del entry["colorClass"]
    assert read(tmp_path, document) == read(tmp_path, LAYERS)


def test_inference_gets_a_backward(tmp_path: Path) -> None:
    """Twice the forward, and the profile says so."""
    document = copy.deepcopy(LAYERS)
    document["nodes"] = [n for n in document["nodes"] if not n["isBackwardNode"]]
    document["edges"] = document["edges"][:4]
    found = read(tmp_path, document)
    assert [cost.backward_s for cost in found.costs] == [(0.004,), (0.002,), (0.001,)]
    assert "the backward taken as twice the forward" in found.origin
    assert [op.name for op in found.graph.ops] == ["node2", "node3", "node4"]


def test_images_tell_the_mini_batch(tmp_path: Path) -> None:
    """As in PipeDream's own format; the caller knows better."""
    document = copy.deepcopy(LAYERS)
    document["edges"][0]["size"] = document["nodes"][0]["size"] = 6 * 3 * 224 * 224 * 4
    found = read(tmp_path, document)
    assert found.samples == (6,)
    assert "mini-batch" not in found.device
    assert read(tmp_path, document, samples=3).samples == (3,)


def test_operator_graph_by_eye(tmp_path: Path) -> None:
    """The weight is a parameter; every backward node found its operator; all times are there."""
    found = read(tmp_path, OPERATORS)
    assert found.graph.ops == (
        Op("MatMul1", ("w",), "MatMul"),
        Op("Add1", (), "Add"),
        Op("Mul1", (), "Mul"),
    )
    assert found.graph.values == (Value(0, (1, 2), 40), Value(1, (2,), 41))
    assert found.graph.parameters == (Parameter("w", 100),)
    # matmul: its gradient, the sum of gradients and the update; mul: its gradient and the loss.
    assert [cost.forward_s for cost in found.costs] == [(0.004,), (0.001,), (0.0005,)]
    assert [cost.backward_s[0] for cost in found.costs] == pytest.approx([0.0086, 0.001, 0.001])
    # Backward nodes read the outputs of add (its other factor) and of mul (the loss).
    assert [cost.kept_bytes for cost in found.costs] == [0, 41, 42]
    assert found.graph.granularity == "operator"


def test_what_depends_in_a_circle_becomes_one_operator(tmp_path: Path) -> None:
    """Colour classes that cannot be told apart on devices are one operator, times and all."""
    document = copy.deepcopy(OPERATORS)
    document["nodes"][3]["colorClass"] = 1  # mul where matmul is, with add between them
    found = read(tmp_path, document)
    assert [op.name for op in found.graph.ops] == ["MatMul1"]
    assert found.costs[0].forward_s == pytest.approx([0.0055])
    assert found.costs[0].backward_s == pytest.approx([0.0106])


def test_a_weight_that_two_operators_read_is_tied(tmp_path: Path) -> None:
    """Both name it; it is there once."""
    document = copy.deepcopy(OPERATORS)
    document["edges"].append(edge(0, 3, 100))
    found = read(tmp_path, document)
    assert [op.parameters for op in found.graph.ops] == [("w",), (), ("w",)]
    assert found.graph.parameters == (Parameter("w", 100),)


BROKEN: list[tuple[tuple[int | str, ...], object, str]] = [
    (("colour",), 1, "unknown key colour; misspelt"),
    (("maxFPGAs",), "6", 'maxFPGAs is "6"'),
    (("edges",), ..., "key edges is missing"),
    (("nodes", 1, "weight"), 1, "unknown key nodes[1].weight"),
    (("nodes", 1, "id"), 0, "nodes[1].id is 0, and so is nodes[0].id"),
    (("nodes", 1, "id"), 1.0, "nodes[1].id is 1.0"),
    (("nodes", 1, "size"), ..., "key nodes[1].size is missing"),
    (("nodes", 1, "fpgaLatency"), ..., "key nodes[1].fpgaLatency is missing"),
    (("nodes", 1, "fpgaLatency"), -4.0, "nodes[1].fpgaLatency is -4.0"),
    (("nodes", 1, "fpgaLatency"), float("nan"), "nodes[1].fpgaLatency is nan"),
    (("nodes", 1, "fpgaLatency"), float("inf"), "nodes[1].fpgaLatency is inf"),
    (("nodes", 1, "fpgaLatency"), 1e13, "nodes[1].fpgaLatency is 10000000000000.0"),
    (("nodes", 1, "size"), 2.0**61, "nodes[1].size is 2.3"),
    (("nodes", 1, "isBackwardNode"), 2, "nodes[1].isBackwardNode"),
    (("nodes", 1, "supportedOnFpga"), 0, "nodes[1].supportedOnFpga is false: node 1 can run on a"),
    (("edges", 2, "size"), ..., "key edges[2].size is missing"),
    (("edges", 2, "size"), -40, "edges[2].size is -40"),
    (("edges", 2, "destId"), 77, "edges[2] is an edge 1 -> 77, but there is no node 77"),
    (("edges", 2), edge(3, 1, 1), "part of a cycle of 2: 1 -> 3 -> 1"),
    (("nodes", 4), node(4, "Lost", 1, 1, None, True) | {"id": 99}, "there is no node 4"),
]


@pytest.mark.parametrize(("path", "value", "message"), BROKEN)
def test_broken_entry(
    tmp_path: Path, path: tuple[int | str, ...], value: object, message: str
) -> None:
    """One wrong entry in a good file: the message names file, key path and value."""
    with pytest.raises(FileFormatError) as caught:
        read(tmp_path, edited(OPERATORS, path, value))
    assert str(caught.value).startswith(str(tmp_path / "model.json"))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (node(99, "Lost_Grad/A", 1, 1, None, True), "nodes[11]: nothing connects backward node 99"),
        (node(99, "Relu9", 1, 1, None), "nodes[11]: node 99 (Relu9) is connected to nothing"),
        (node(99, "weight", 0, 8, None), "nodes[11]: weight 99 (weight) is read by nothing"),
    ],
    ids=["backward", "forward", "weight"],
)
def test_a_node_that_nothing_connects(tmp_path: Path, extra: Any, message: str) -> None:
    """Of each kind."""
    document = OPERATORS | {"nodes": [*OPERATORS["nodes"], extra]}
    with pytest.raises(FileFormatError) as caught:
        read(tmp_path, document)
    assert message in str(caught.value)


def test_a_forward_node_after_a_backward_one(tmp_path: Path) -> None:
    """No device could run all of the forward first."""
    document = copy.deepcopy(OPERATORS)
    document["nodes"].append(node(99, "Relu9", 1, 1, None))
    document["edges"].append(edge(10, 99, 1))
    with pytest.raises(FileFormatError, match=r"edges\[14\] leads from backward node 10 to forw"):
        read(tmp_path, document)


def test_two_models_in_one_file(tmp_path: Path) -> None:
    """They share nothing, not even a loss."""
    document = copy.deepcopy(OPERATORS)
    for entry in OPERATORS["nodes"]:
        color = entry.get("colorClass")
        moved = entry | {"id": entry["id"] + 20, "name": "x" + entry["name"]}
        document["nodes"].append(moved | ({} if color is None else {"colorClass": color + 20}))
    for entry in OPERATORS["edges"]:
        moved = {"sourceId": entry["sourceId"] + 20, "destId": entry["destId"] + 20}
        document["edges"].append(entry | moved)
    with pytest.raises(FileFormatError, match=r"falls apart: nothing but the batch connects 1, 2"):
        read(tmp_path, document)


LAYER_FILES = {
    "bert24": (32, 55),
    "gnmt": (96, 122),
    "inceptionv3": (326, 363),
    "resnet50": (177, 193),
}


@needs_shared
@pytest.mark.parametrize("kind", ["inference", "training"])
@pytest.mark.parametrize("name", LAYER_FILES)
def test_published_layer_graphs(name: str, kind: str) -> None:
    """Counts of the inference file, for training too: forward and backward are one operator."""
    path = SHARED / "dnn-partitioning" / "LayerGraphs" / f"{name}_{kind}.json"
    found, raw = read_profile(path), json.loads(path.read_text())
    batch = [value for value in found.graph.values if value.producer == BATCH]
    nodes, edges = LAYER_FILES[name]
    assert len(found.graph) + len(batch) == nodes
    assert len(found.graph.edges) + sum(len(value.consumers) for value in batch) == edges
    loaded = {value.name for value in batch}
    forward = [n for n in raw["nodes"] if not n["isBackwardNode"] and n["name"] not in loaded]
    expected = sum(n["fpgaLatency"] for n in forward) / 1000
    assert sum(cost.forward_s[0] for cost in found.costs) == pytest.approx(expected, rel=1e-12)
    backward = sum(n["fpgaLatency"] for n in raw["nodes"] if n["isBackwardNode"]) / 1000
    expected = backward if kind == "training" else 2 * expected
    assert sum(cost.backward_s[0] for cost in found.costs) == pytest.approx(expected, rel=1e-12)


@needs_shared
def test_gnmt_is_the_same_in_two_formats() -> None:
    """Piper's and this file were made from one profile: 520.453 ms, 1,110.9 MB of parameters."""
    ours = read_profile(SHARED / "dnn-partitioning" / "LayerGraphs" / "gnmt_training.json")
    piper = read_profile(SHARED / "piper" / "gnmt.json")
    seconds = sum(cost.forward_s[0] + cost.backward_s[0] for cost in ours.costs)
    assert seconds == pytest.approx(0.520453, abs=1e-9)
    assert sum(ours.graph.parameter_bytes.values()) == sum(piper.graph.parameter_bytes.values())


@needs_shared
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "operators"),
    [
        ("bert_l-3", 600, 817, 128),
        ("bert_l-6", 1071, 1462, 227),
        ("bert_L-12", 2012, 2751, 424),
        ("resnet50", 1243, 1806, 176),
    ],
)
def test_published_operator_graphs(name: str, nodes: int, edges: int, operators: int) -> None:
    """Times and weights add up; ``operators`` are the colour classes with forward nodes, and the
    forward nodes without a class.
    """
    path = SHARED / "dnn-partitioning" / "OperatorGraphs" / f"{name}_training.json"
    found, raw = read_profile(path), json.loads(path.read_text())
    assert (len(raw["nodes"]), len(raw["edges"])) == (nodes, edges)
    assert len(found.graph) == operators
    for backward, seconds in (
        (False, sum(cost.forward_s[0] for cost in found.costs)),
        (True, sum(cost.backward_s[0] for cost in found.costs)),
    ):
        ms = sum(n["fpgaLatency"] for n in raw["nodes"] if n["isBackwardNode"] is backward)
        assert seconds == pytest.approx(ms / 1000, rel=1e-12)
    targets = {entry["destId"] for entry in raw["edges"]}
    weights = [
        n["size"]
        for n in raw["nodes"]
        if n["fpgaLatency"] == 0 and not n["isBackwardNode"] and n["id"] not in targets
    ]
    assert sum(found.graph.parameter_bytes.values()) == sum(weights)
    assert len(found.graph.parameters) == len(weights)
