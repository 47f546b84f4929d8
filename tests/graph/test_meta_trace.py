"""Traces on the meta device against exports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anabranch import models
from anabranch.graph import meta_trace
from anabranch.graph.batch_layout import BatchLayout
from anabranch.graph.capture import _Exporter, capture
from anabranch.graph.flat_program import FlatProgram
from anabranch.graph.meta_trace import NotPlainError

META = torch.device("meta")


def exporter(module: nn.Module, example: Any, training: bool = True) -> _Exporter:
    return _Exporter(module, BatchLayout.of(example), training, META)


def contents(program: FlatProgram) -> list[Any]:
    """Calls with their modules and names, and every value's shape, strides and gradient."""

    def shown(value: Any) -> Any:
        if isinstance(value, Tensor):
            return [*value.shape, *value.stride(), value.dtype, value.requires_grad]
        return [shown(v) for v in value] if isinstance(value, list | tuple) else None

    values = [(node.name, shown(node.meta["val"])) for node in program.calls]
    return [program.signature(), values, sorted(map(str, program.sources.values()))]


class Conv(nn.Module):
    """Statistics that are updated in place, a buffer that is assigned, dropout, a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("steps", torch.zeros(()))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.steps = self.steps + 1
        h = F.dropout(self.norm(self.conv(x)).relu_(), 0.1, self.training)
        scores = self.head(h[..., 1:].mean((2, 3)))
        first, second = scores.split(1, -1)
        return {"loss": F.cross_entropy(scores, y), "margin": (first - second).mean()}


class Tied(nn.Module):
    """One table, read twice, and a recurrent layer of several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn = nn.Embedding(10, 8), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(self.table(x))
        return F.cross_entropy((h @ self.table.weight.T).flatten(0, 1), x.flatten())


def conv() -> tuple[nn.Module, Any]:
    with META:
        return Conv(), (torch.empty(2, 3, 8, 8), torch.empty(2, dtype=torch.long))


def tied() -> tuple[nn.Module, Any]:
    with META:
        return Tied(), {"x": torch.empty(2, 5, dtype=torch.long)}


def builtin(name: str) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        workload = models.build(name, preset="small", options={"layers": "1"}, meta=True)
        return workload.module, workload.example

    return make


@pytest.mark.parametrize(
    ("make", "training"),
    [
        (conv, True),
        (conv, False),
        (tied, True),
        (builtin("two-branch"), False),
        (builtin("dlrm"), True),
    ],
    ids=range(5),
)
def test_a_trace_is_what_an_export_gives(
    make: Callable[[], tuple[nn.Module, Any]], training: bool
) -> None:
    """Calls, modules, names, shapes, strides and gradients, so that a plan cuts what ranks run."""
    found = exporter(*make(), training)
    for samples in (2, 4):
        assert contents(found.traced(samples)) == contents(found.at(samples))


def outer(scale: Tensor = torch.ones(4)) -> Callable[[nn.Module, Tensor], Tensor]:  # noqa: B008
    return lambda net, x: net(x) * scale


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * grad


def without_gradients(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.sum()
    return net(x) * scale


def under_autocast(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net(x)


@pytest.mark.parametrize(
    "forward",
    [
        lambda net, x: checkpoint(net, x, use_reentrant=False),
        lambda net, x: _Double.apply(net(x)),
        lambda net, x: net(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]),
        lambda net, x: net(x) * float(x.sum()),
        lambda net, x: net(x)[:, 0],
        outer(),
        without_gradients,
        under_autocast,
    ],
    ids=["checkpoint", "function", "literal", "value", "slice", "foreign", "no grad", "autocast"],
)
def test_what_a_trace_would_lose_is_exported(
    forward: Callable[[nn.Module, Tensor], Tensor],
) -> None:
    """Nothing of it passes for plain code."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return forward(self.linear, x).mean()

    with META:
        found = exporter(Net(), {"x": torch.empty(2, 4)})
    with pytest.raises(NotPlainError):
        found.traced(2)


class Again(nn.Module):
    """A part that runs under two names, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        part = nn.Linear(4, 4)
        self.part, self.parts = part, nn.ModuleList([part, nn.Linear(4, 4), part])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x.mean()


class Growing(nn.Module):
    """Does in each forward something else than in the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.ran = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.ran += 1
        for _ in range(self.ran):
            x = self.part(x)
        return x.mean()


@pytest.mark.parametrize("make", [Again, Growing])
def test_a_capture_on_meta_is_that_of_ranks(make: Callable[[], nn.Module]) -> None:
    """A plan that is made without values names the operators of the module that is trained."""
    with META:
        bare = make()
    for granularity in ("operator", "layer", "block"):
        found = capture(bare, torch.empty(2, 4), granularity=granularity)
        assert found.graph == capture(make(), torch.empty(2, 4), granularity=granularity).graph


def test_another_pytorch_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace stands on private parts; where one of them is not there, captures are the same."""
    module, example = conv()
    expected = capture(module, example).graph

    def without_proxies(*arguments: object) -> None:
        raise AttributeError("_TorchDispatchModeKey has no attribute 'PROXY'")

    monkeypatch.setattr(meta_trace._Recorder, "__init__", without_proxies)
    with pytest.raises(NotPlainError, match="no attribute 'PROXY'"):
        exporter(module, example).traced(2)
    assert capture(module, example).graph == expected


def test_a_module_with_values_is_exported() -> None:
    """Ranks run what they capture, on their devices."""
    found = _Exporter(
        nn.Linear(4, 4), BatchLayout.of((torch.randn(2, 4),)), True, torch.device("cpu")
    )
    with pytest.raises(NotPlainError, match="has values"):
        found.traced(2)


def test_a_capture_on_meta_exports_nothing() -> None:
    """Nor do further sample counts, or evaluation."""
    captured = capture(*conv())
    assert captured.metrics == ("margin",)
    assert captured.at(6).calls
    evaluation = captured.evaluation()
    assert not captured._exporter.is_exported
    assert not evaluation._exporter.is_exported


def test_the_module_and_its_hooks_are_left_as_they_were() -> None:
    """Also after a forward that fails half-way."""
    module, example = conv()
    module.norm.eval()
    before = dict(nn.modules.module._global_forward_hooks)
    found = exporter(module, example)
    found.traced(2)
    module.head = nn.Linear(3, 2, device="meta")
    with pytest.raises(NotPlainError):
        exporter(module, example).traced(2)
    assert not module.norm.training
    assert module.steps.is_meta
    assert dict(nn.modules.module._global_forward_hooks) == before
