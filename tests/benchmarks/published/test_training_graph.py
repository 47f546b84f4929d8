"""Forward and backward nodes into operators, on graphs small enough to draw."""

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import FileFormatError
from anabranch.files.imported_graph import Edge, topological_order
from benchmarks.planners.published.training_graph import TrainingNode, group


def pieces(text: str) -> dict[str, TrainingNode]:
    """Nodes such as ``a:1 b' w*``: key and name a of colour 1, backward b', weight w."""
    made = {}
    for word in text.split():
        key, _, color = word.partition(":")
        made[key] = TrainingNode(
            key,
            key.rstrip("'*"),
            "here",
            int(color) if color else None,
            backward=key.endswith("'"),
            weight=key.endswith("*"),
        )
    return made


def edges(text: str) -> list[Edge]:
    """Edges such as ``a>b``, one byte each."""
    return [Edge(*word.split(">"), 1.0, word) for word in text.split()]


def grouped(nodes: str, between: str) -> tuple[set[frozenset[str]], set[str]]:
    """The operators as sets of nodes, and the edges between them."""
    owner, found = group("file", pieces(nodes), edges(between))
    members: dict[str, set[str]] = {}
    for key, op in owner.items():
        members.setdefault(op, set()).add(key)
    return set(map(frozenset, members.values())), {f"{e.producer}>{e.consumer}" for e in found}


def sets(*words: str) -> set[frozenset[str]]:
    """``"a a'"`` is the operator of these two nodes."""
    return {frozenset(word.split()) for word in words}


def test_colours_join_forward_and_backward() -> None:
    """a > b and b' > a'."""
    assert grouped("a:1 b:2 a':1 b':2", "a>b b>b' b'>a'") == (sets("a a'", "b b'"), {"a>b"})


def test_an_update_follows_its_weight() -> None:
    """The weight has a class of its own with its update: both go to the reader."""
    found = grouped("w*:7 a:1 b:2 a':1 b':2 u':7", "w*>a a>b b>b' b'>a' a'>u' w*>u'")
    assert found == (sets("a a' u'", "b b'"), {"a>b"})


def test_what_hangs_on_a_weight_alone() -> None:
    """The shape of a weight, taken in the backward: it goes to the reader of the weight."""
    assert grouped("w* a b s' t'", "w*>a a>b w*>s' t'>s'") == (sets("a s' t'", "b"), {"a>b"})


def test_a_backward_that_reads_a_later_forward_joins_it() -> None:
    """a' needs what b made after a, and b needs a: they cannot be apart."""
    assert grouped("a:1 b a':1", "a>b b>a'") == (sets("a b a'"), set())


def test_a_sum_of_gradients_goes_where_the_sum_is_needed() -> None:
    """x is read by a and b; s' adds their gradients for x. At b it would close a circle."""
    found = grouped("x:1 a:2 b:3 x':1 a':2 b':3 s'", "x>a a>b x>b b>b' b'>a' a'>s' b'>s' s'>x'")
    assert found == (sets("x x' s'", "a a'", "b b'"), {"x>a", "a>b", "x>b"})


def test_a_loss_goes_to_the_last_operator() -> None:
    """Counted as backward and read by nothing: where its inputs come from."""
    assert grouped("a:1 b:2 l' m'", "a>b b>l' l'>m'") == (sets("a", "b l' m'"), {"a>b"})


def test_a_name_places_a_class() -> None:
    """a_grad is of a, and with it what shares its colour."""
    found = grouped("a b:1 b':1 a_grad':7 s':7", "a>b b>b' b'>a_grad' b'>s'")
    assert found == (sets("a a_grad' s'", "b b'"), {"a>b"})


def test_a_loss_of_one_colour_stays_together() -> None:
    """Two heads a and b, whose losses share a class with their sum: one of the heads gets it."""
    operators, between = grouped("x a b l':9 m':9 a':1 b':2", "x>a x>b a>l' b>m' l'>a' m'>b'")
    assert any({"l'", "m'"} <= members for members in operators)
    assert len(between) >= 2


def test_backward_edges_are_dependences_too() -> None:
    """Nothing flows from b to a in the forward, but b' needs the gradient of a."""
    found = grouped("x:0 a:1 b:2 x':0 a':1 b':2", "x>a x>b a>a' b>b' a'>b' b'>x' a'>x'")
    assert found == (sets("x x'", "a a'", "b b'"), {"x>a", "x>b", "b>a"})


def test_backward_edges_drawn_along_the_forward_say_nothing_new() -> None:
    """As in the published layer graphs."""
    found = grouped("a:1 b:2 c:3 a':1 b':2 c':3", "a>b b>c a'>b' b'>c'")
    assert found == (sets("a a'", "b b'", "c c'"), {"a>b", "b>c"})


def test_circles_become_one() -> None:
    """a and c are of one colour, and b is between them."""
    assert grouped("a:1 b c:1 d", "a>b b>c c>d")[0] == sets("a b c", "d")


@pytest.mark.parametrize(
    ("nodes", "between", "message"),
    [
        ("a b", "a>b b>a", "cycle of 2"),
        ("a", "a>b", "there is no node b"),
        ("a b' c", "a>b' b'>c", "b'>c leads from backward node b' to forward node c"),
        ("a b' c'", "b'>c'", "nothing connects backward node b'"),
    ],
)
def test_refusals(nodes: str, between: str, message: str) -> None:
    """Each names what is wrong."""
    with pytest.raises(FileFormatError, match=message):
        grouped(nodes, between)


@st.composite
def training_graphs(draw: st.DrawFn) -> tuple[dict[str, TrainingNode], list[Edge]]:
    """A forward graph on the first nodes, anything acyclic after it, colours at will."""
    forward, backward = draw(st.integers(1, 6)), draw(st.integers(0, 6))
    keys = [f"n{i}" for i in range(forward)] + [f"n{i}'" for i in range(backward)]
    colors = st.none() | st.integers(0, 3)
    made = {k: TrainingNode(k, k, k, draw(colors), k.endswith("'"), weight=False) for k in keys}
    pairs = [(a, b) for j, b in enumerate(keys) for a in keys[:j]]
    drawn = draw(st.sets(st.sampled_from(pairs), max_size=16)) if pairs else set()
    return made, [Edge(a, b, 1.0, f"{a}>{b}") for a, b in sorted(drawn)]


def alone(made: dict[str, TrainingNode], given_edges: list[Edge]) -> bool:
    """Whether edges and colours lead from some backward node to no forward node at all."""
    graph = nx.Graph([(e.producer, e.consumer) for e in given_edges])
    graph.add_nodes_from(made)
    graph.add_edges_from((key, p.color) for key, p in made.items() if p.color is not None)
    forward = {key for key, piece in made.items() if not piece.backward}
    return any(
        part.isdisjoint(forward) and not part.isdisjoint(made)
        for part in nx.connected_components(graph)
    )


@given(training_graphs())
def test_any_training_graph(drawn: tuple[dict[str, TrainingNode], list[Edge]]) -> None:
    """Every node has one operator, every dependence holds, and nothing depends in a circle."""
    made, given_edges = drawn
    if alone(made, given_edges):
        with pytest.raises(FileFormatError, match="nothing connects backward node"):
            group("file", made, given_edges)
        return
    owner, between = group("file", made, given_edges)
    assert owner.keys() == made.keys()
    assert all(not made[op].backward for op in owner.values())
    topological_order("file", set(owner.values()), between)
    known = {(e.producer, e.consumer) for e in between}
    of_class = {p.color: owner[k] for k, p in made.items() if p.color is not None}
    assert all(owner[k] == of_class[p.color] for k, p in made.items() if p.color is not None)
    pairs = [(owner[e.producer], owner[e.consumer], made[e.producer].backward) for e in given_edges]
    assert all((a, b) in known for a, b, backward in pairs if not backward and a != b)
    gradients = [(a, b) for a, b, backward in pairs if backward and a != b]
    turned = all((b, a) in known for a, b in gradients)
    assert turned or all(pair in known for pair in gradients)
