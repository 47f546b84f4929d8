"""Models cut into stages twice: by operators for what is tested, by hand for the reference."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler, StepLR

from anabranch.graph.capture import Captured, capture
from anabranch.runtime.state.muon import MuonAdam
from anabranch.workload import Batch, Workload
from tests.runtime.asynchronous.reference import RefStage

WIDTH = 6


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))


class Head(nn.Module):
    """Classifier and loss on what all branches have made."""

    def __init__(self, branches: int = 1) -> None:
        super().__init__()
        self.scores = nn.Linear(branches * WIDTH, 3)

    def forward(self, *args: Tensor) -> Tensor:
        *values, label = args
        return F.cross_entropy(self.scores(torch.cat(values, 1)), label)


class Chain(nn.Module):
    """Blocks one after another, one per stage, the head with the last."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(block() for _ in range(depth - 1))
        self.head = Head()

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.head(x, label)

    def by_hand(self) -> list[RefStage]:
        stages = [RefStage(part, [i - 1 if i else "x"]) for i, part in enumerate(self.parts)]
        return [*stages, RefStage(self.head, [len(stages) - 1, "label"])]


class TwoBranch(nn.Module):
    """A stem that two branches read, one of two stages and one of one, and a head: depth 4."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.long, self.longer, self.short = block(), block(), block(), block()
        self.head = Head(2)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        stem = self.stem(x)
        return self.head(self.longer(self.long(stem)), self.short(stem), label)

    def by_hand(self) -> list[RefStage]:
        return [
            RefStage(self.stem, ["x"]),
            RefStage(self.long, [0]),
            RefStage(self.longer, [1]),
            RefStage(self.short, [0]),
            RefStage(self.head, [2, 3, "label"]),
        ]


class TwoSources(nn.Module):
    """Two branches that enter at different depths, the shallow one by an embedding: depth 3."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.deeper = block(), block()
        self.right = nn.Embedding(10, WIDTH)
        self.head = Head(2)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        return self.head(self.deeper(self.left(x)), self.right(word), label)

    def by_hand(self) -> list[RefStage]:
        return [
            RefStage(self.left, ["x"]),
            RefStage(self.deeper, [0]),
            RefStage(self.right, ["word"]),
            RefStage(self.head, [1, 2, "label"]),
        ]


class Statistics(Chain):
    """Three stages, whose blocks keep statistics of what they have seen."""

    def __init__(self) -> None:
        super().__init__(3)
        for part in self.parts:
            part[2] = nn.BatchNorm1d(WIDTH)


class Shared(nn.Module):
    """Two stages with one weight; no reference trains it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.first(x).tanh()), label)


MODELS: dict[str, Callable[[], Chain | TwoBranch | TwoSources]] = {
    "chain 2": partial(Chain, 2),
    "chain 3": partial(Chain, 3),
    "chain 4": partial(Chain, 4),
    "two branches": TwoBranch,
    "two sources": TwoSources,
}

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
    "nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=0.02, weight_decay=0.01),
    "amsgrad": partial(Adam, lr=0.02, amsgrad=True),
    "adamw": partial(AdamW, lr=0.02, weight_decay=0.1),
    "nadam": partial(NAdam, lr=0.02),
    "long nadam": partial(NAdam, lr=0.02, betas=(0.99, 0.999)),
    "muon": partial(MuonAdam, lr=0.02, weight_decay=0.1, adam=()),
    "rmsprop": partial(RMSprop, lr=0.01, momentum=0.5),
}
"""Name -> class with its options."""


def suited(policy: str) -> str:
    """An optimizer that a policy takes."""
    return {"asyncpp": "long nadam", "basis-rotation": "adam"}.get(policy, "momentum")


def halving(optimizer: Optimizer) -> LRScheduler:
    """A schedule that changes the rate in mid-run."""
    return StepLR(optimizer, 3, gamma=0.5)


def batches(count: int, samples: int = 4, dtype: torch.dtype = torch.float32) -> list[Batch]:
    """The same for every test."""
    generator = torch.Generator().manual_seed(7)
    return [
        {
            "x": torch.randn(samples, WIDTH, generator=generator).to(dtype),
            "word": torch.randint(0, 10, (samples,), generator=generator),
            "label": torch.randint(0, 3, (samples,), generator=generator),
        }
        for _ in range(count)
    ]


@dataclass(frozen=True)
class Cut:
    """A model in stages, both ways, from the same weights.

    Attributes:
        captured: of ``workload.module``.
        workload: to be trained by what is tested.
        operators: per stage.
        twin: a copy of the module.
        by_hand: its stages, for the reference.
    """

    captured: Captured
    workload: Workload
    operators: list[list[str]]
    twin: nn.Module
    by_hand: list[RefStage]

    def same(self) -> bool:
        """Whether both have the same weights and buffers, bit for bit."""
        mine, theirs = self.workload.module.state_dict(), self.twin.state_dict()
        return all(torch.equal(mine[name], theirs[name]) for name in mine | theirs)


@cache
def _captured(name: str, dtype: torch.dtype, frozen: tuple[str, ...]) -> Captured:
    """Capture takes a second, so once per model; its weights are reset for every test."""
    torch.manual_seed(0)
    module = (Statistics if name == "statistics" else MODELS[name])().to(dtype)
    for parameter in frozen:
        module.get_parameter(parameter).requires_grad_(False)
    return capture(module, batches(1, dtype=dtype)[0])


def cut(
    name: str,
    optimizer: str = "momentum",
    *,
    dtype: torch.dtype = torch.float32,
    scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    frozen: Sequence[str] = (),
) -> Cut:
    """A fresh model.

    Args:
        name: key of ``MODELS``, or "statistics".
        optimizer: key of ``OPTIMIZERS``.
        dtype: of its weights.
        scheduler: of the learning rate.
        frozen: parameters that are not trained.
    """
    captured = _captured(name, dtype, tuple(frozen))
    module = captured.module
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for each in module.modules():
            if isinstance(each, nn.BatchNorm1d):
                each.reset_running_stats()
        for parameter in module.parameters():
            parameter.grad = None
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator).to(dtype))
    twin = copy.deepcopy(module)
    by_hand = twin.by_hand()  # type: ignore[operator]
    owner = {id(p): s for s, stage in enumerate(by_hand) for p in stage.module.parameters()}
    of = {n: owner[id(p)] for n, p in twin.named_parameters()}
    make = OPTIMIZERS[optimizer]
    for stage in by_hand:
        if stage.weights:
            stage.optimizer = make(stage.weights)
            stage.scheduler = scheduler(stage.optimizer) if scheduler else None
    workload = Workload(module, batches(1, dtype=dtype)[0], optimizer=make, scheduler=scheduler)
    return Cut(captured, workload, _operators(captured, of, len(by_hand)), twin, by_hand)


def _operators(captured: Captured, of: dict[str, int], count: int) -> list[list[str]]:
    """Operators by the parameters they read; one without any goes where its consumers are, or, at
    the end of a stage, where its producers are.
    """
    graph = captured.graph
    stage_of: dict[int, int] = {}
    for i, op in enumerate(graph.ops):
        before = [stage_of[a] for a, b in graph.edges if b == i]
        stage_of[i] = max([of[name] for name in op.parameters] or before)
    return [[op.name for i, op in enumerate(graph.ops) if stage_of[i] == s] for s in range(count)]
