"""From nodes and edges to a profile: what holds for any graph that a reader may find."""

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import FileFormatError
from anabranch.files.imported_graph import Edge, ImportedGraph, ImportedNode, unique_names
from anabranch.graph.opgraph import BATCH, Parameter, Value


def draft(nodes: list[ImportedNode], edges: list[Edge], samples: int = 1) -> ImportedGraph:
    """A draft of these nodes and edges."""
    return ImportedGraph("file", "model", nodes, edges, samples, "a device")


def plain(key: str, **fields: object) -> ImportedNode:
    """A node that is trained."""
    return ImportedNode(key, key, "here", **({"backward_s": 1.0} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["Conv2d(3, 64)", "Linear(in_features=2)"], ["Conv2d", "Linear"]),
        (["Linear(2, 2)", "Linear(2, 3)"], ["0.Linear", "1.Linear"]),
        (["Linear", ""], ["0.Linear", "1"]),
        (["cell_3/1x1", "gpu_0/w"], ["cell_3/1x1", "gpu_0/w"]),
        (["../../etc/passwd", "/etc/passwd"], ["etc/passwd", "etc/passwd"]),
        (["~root", "C:\\windows"], ["_root", "C_windows"]),
        (["a\x1b[31m", "b\nc"], ["a_31m", "b_c"]),
        (["x" * 100, "y"], ["x" * 40, "y"]),
        (["x" * 100, "x" * 50], ["0." + "x" * 40, "1." + "x" * 40]),
    ],
)
def test_names(labels: list[str], names: list[str]) -> None:
    """Short, readable, and harmless; with the key in front where labels alone would not do."""
    if names[0] == names[1]:
        names = [f"{i}.{name}" for i, name in enumerate(names)]
    keys = map(str, range(len(labels)))
    assert list(unique_names(dict(zip(keys, labels, strict=True))).values()) == names


def test_outputs_of_one_size_are_told_apart() -> None:
    """Two tensors of 8 bytes are two values, if the reader knows that they are two."""
    edges = [Edge("a", "b", 8.0, "", "first"), Edge("a", "c", 8.0, "", "second")]
    found = draft([plain("a"), plain("b"), plain("c")], edges).profile()
    assert found.graph.values == (Value(0, (1,), 8), Value(0, (2,), 8))


def test_shared_parameters_are_there_once() -> None:
    """Two operators that name one weight, and one with parameters of its own."""
    nodes = [plain("a", parameters=(("w", 10.0),)), plain("b", parameters=(("", 4.0), ("w", 10.0)))]
    found = draft(nodes, [Edge("a", "b", 1.0, "")]).profile()
    assert [op.parameters for op in found.graph.ops] == [("w",), ("b", "w")]
    assert found.graph.parameters == (Parameter("w", 10), Parameter("b", 4))


def test_sums_that_no_device_could_hold() -> None:
    """Each number may be in range, and their sum not."""
    with pytest.raises(FileFormatError, match="a mistake"):
        draft([plain("a", kept_bytes=2.0**61)], []).profile()
    with pytest.raises(FileFormatError, match="a mistake"):
        draft([plain("a", forward_s=2e9)], []).profile()


@st.composite
def drafts(draw: st.DrawFn) -> ImportedGraph:
    """Any graph at all: cycles, parts, data, edges twice."""
    keys = [f"n{i}" for i in range(draw(st.integers(1, 7)))]
    pairs = draw(st.lists(st.tuples(st.sampled_from(keys), st.sampled_from(keys)), max_size=14))
    if draw(st.booleans()):  # a tree under it, so that many are connected
        pairs += [(keys[(i - 1) // 2], keys[i]) for i in range(1, len(keys))]
    edges = [Edge(a, b, float(draw(st.integers(0, 2))), "edge") for a, b in pairs]
    fed = {b for _, b in pairs}
    nodes = [
        ImportedNode(
            key,
            draw(st.sampled_from(["A", "B(1)", key])),
            "node",
            forward_s=draw(st.integers(0, 3)) * 1.0,
            backward_s=draw(st.integers(0, 1)) * 1.0,
            parameters=draw(st.sampled_from([(), (("", 5.0),), (("w", 6.0),)])),
            data=key not in fed and draw(st.booleans()),
        )
        for key in keys
    ]
    return draft(nodes, edges, samples=draw(st.sampled_from([1, 3])))


@given(drafts())
def test_any_draft(drawn: ImportedGraph) -> None:
    """What networkx calls a connected graph without cycles is a profile with every edge in it."""
    whole = nx.DiGraph()
    whole.add_nodes_from(node.key for node in drawn.nodes)
    whole.add_edges_from((edge.producer, edge.consumer) for edge in drawn.edges)
    ops = [node for node in drawn.nodes if not node.data]
    inner = whole.subgraph([op.key for op in ops])
    lonely = len(whole) > 1 and any(whole.degree(key) == 0 for key in whole)
    if (
        not ops
        or not nx.is_directed_acyclic_graph(whole)
        or lonely
        or not nx.is_weakly_connected(inner)
    ):
        with pytest.raises(FileFormatError):
            drawn.profile()
        return
    found = drawn.profile()
    names = unique_names({node.key: node.label for node in drawn.nodes})
    of = {names[op.key]: op for op in ops}
    assert {op.name for op in found.graph.ops} == of.keys()
    assert set(found.graph.edges) == {
        (found.graph.index[names[a]], found.graph.index[names[b]]) for a, b in inner.edges
    }
    fed = {(names[a], names[b]) for a, b in whole.edges if a not in inner}
    batch = [value for value in found.graph.values if value.producer == BATCH]
    assert fed == {(v.name, found.graph.ops[c].name) for v in batch for c in v.consumers}
    assert not any(value.grad for value in batch)
    for op, cost in zip(found.graph.ops, found.costs, strict=True):
        assert (*cost.forward_s, *cost.backward_s) == (
            of[op.name].forward_s,
            of[op.name].backward_s,
        )
    for value in found.graph.values:
        if value.producer != BATCH:
            key = of[found.graph.ops[value.producer].name].key
            before = {key, *nx.ancestors(inner, key)}
            assert value.grad == any(
                op.parameters or op.backward_s for op in ops if op.key in before
            )
