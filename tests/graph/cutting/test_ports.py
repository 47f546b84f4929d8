"""Ports: which use of a value or of a tied parameter goes through which."""

import torch
from torch import nn

from anabranch.graph.capture import capture
from anabranch.graph.cutting.split import Port, TiedUse, split
from tests.graph.chain import check_split
from tests.graph.nets import fan


def test_plain_mode_has_one_port_per_value_and_stage() -> None:
    """The three uses of a on stage 1 share a port, the use on stage 2 has its own."""
    captured = fan()
    parts = split(captured, [["a"], ["b", "c"], ["d", "e"]])
    a = next(i for i, v in enumerate(captured.graph.values) if v.name == "linear")
    assert {(p.source, p.target) for p in parts.ports if p.value == a} == {(0, 1), (0, 2)}
    assert len([p for p in parts.ports if p.value == a]) == 2
    assert parts.tied == {"a.weight": (0, 2)}
    assert parts.program(2, 4).tied == ()


def test_exact_mode_has_one_port_per_summand() -> None:
    """Added first is the latest use, on stage 2; those on stage 1 are added one by one after it."""
    captured = fan()
    parts = split(captured, [["a"], ["b", "c"], ["d", "e"]], exact=True)
    a = next(i for i, v in enumerate(captured.graph.values) if v.name == "linear")
    assert [p for p in parts.ports if p.value == a] == [
        Port(a, 0, 2, order=0),
        Port(a, 0, 1, order=1),
        Port(a, 0, 1, order=2),
        Port(a, 0, 1, order=3),
    ]
    assert parts.program(2, 4).tied == (TiedUse("a.weight", 0),)
    assert parts.program(0, 4).tied == (TiedUse("a.weight", 1),)


def test_exact_mode_sums_where_it_may() -> None:
    """The uses that are added first are on one stage, which adds them itself."""
    captured = fan()
    parts = split(captured, [["a", "b"], ["c", "d", "e"]], exact=True)
    a = next(i for i, v in enumerate(captured.graph.values) if v.name == "linear")
    assert [p for p in parts.ports if p.value == a] == [Port(a, 0, 1, order=0)]


def test_value_without_gradient_has_a_port_without() -> None:
    """What is only counted or detached on the other side sends nothing back."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            a = self.a(x)
            product = self.b(a.detach() + (a > 0)) * self.c(a)
            return {"loss": product.mean(), "positive": (a > 0).float().mean()}

    captured = capture(Counted(), torch.randn(4, 5), granularity="operator")
    stages = [[op.name] for op in captured.graph.ops]
    for exact in (False, True):
        assert check_split(captured, torch.randn(4, 5), stages, exact=exact) == 0.0
    b = captured.graph.index["b"]
    assert [p.grad for p in split(captured, stages).ports if p.target == b] == [False]
