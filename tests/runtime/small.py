"""Small models with one trait each, plans for them, and the loop that pipelines agree with."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anabranch.graph.capture import Captured, capture
from anabranch.plans.plan import Plan, Prediction
from anabranch.plans.stages import Stage, StageGraph
from anabranch.plans.whole_batch import with_whole_batches
from anabranch.runtime.plan_parts import prepare
from anabranch.runtime.reference import reference
from anabranch.schedule import SCHEDULES
from anabranch.simulator.costs import StageTimes
from anabranch.simulator.run import step_seconds
from anabranch.workload import Workload

WIDTH = 8
Batch = dict[str, Tensor]


@cache
def load_compiler() -> None:
    """Import what ``torch.compile`` needs, which takes seconds: once here, not in every rank."""
    torch.compile(torch.tanh, backend="aot_eager")(torch.ones(1, requires_grad=True)).backward()


@cache
def load_simulator() -> None:
    """Load compiled loops, which takes half a second: once here, not in every rank that trains and
    says what the ideal step is.
    """
    alone = SCHEDULES["1f1b"]().warm_up(StageGraph((Stage(("a",), (0,), 1),), (), 1))
    order = SCHEDULES["1f1b"]().order(alone)
    step_seconds(alone, order, StageTimes([{1: 1.0}], [{1: 1.0}]))


def tower(depth: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)))


class TwoBranch(nn.Module):
    """Two towers, one behind an embedding, that meet in a classifier; accuracy is a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)
        self.left, self.right = tower(), tower()
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> dict[str, Tensor]:
        joined = torch.cat([self.left(x), self.right(self.words(word))], 1)
        scores = self.head(joined)
        accuracy = (scores.argmax(1) == label).to(scores.dtype).mean()
        return {"loss": F.cross_entropy(scores, label), "accuracy": accuracy}


class Chain(nn.Module):
    """One tower."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tower(4)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), label)


class Tied(nn.Module):
    """An embedding read three times: at the start, in the middle, and as the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)
        self.first, self.second = tower(1), tower(1)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        h = self.first(self.words(word) + x)
        h = self.second(h + self.words(label))
        return F.cross_entropy(F.linear(h, self.words.weight), word)


class Norm(nn.Module):
    """Batch normalisation, whose running means change with every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(self.body(x))), label)


class Shared(nn.Module):
    """A table that is made from parameters alone crosses the stages whole, a mask as booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("grid", torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))
        self.layers = nn.ModuleList(tower(1) for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        table = torch.tanh(self.seed(self.grid))
        h = self.layers[0](x)
        keep = h > 0
        for i, layer in enumerate(self.layers):
            h = layer(h + table[i]).masked_fill(keep, 0.25)
        return F.cross_entropy(self.head(h), label)


class Dropout(nn.Module):
    """Draws random numbers in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = tower(1), tower(1)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        h = self.drop(self.first(x))
        return F.cross_entropy(self.head(self.drop(self.second(h))), label)


class Unused(Chain):
    """A parameter that the loss depends on in the graph, and one that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3))
        self.cut = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        return super().forward(x + self.cut(x).detach(), word, label)


class Detached(nn.Module):
    """The last layer reads the weight of the first one, but gives it no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body = nn.Linear(WIDTH, WIDTH), tower()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        h = self.body(torch.tanh(self.first(x)))
        return F.cross_entropy(self.head(F.linear(h, self.first.weight.detach())), label)


MODELS: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each
    for each in (TwoBranch, Chain, Tied, Norm, Shared, Dropout, Unused, Detached)
}


def batch(samples: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(samples, WIDTH, generator=generator, dtype=dtype),
        "word": torch.randint(0, 10, (samples,), generator=generator),
        "label": torch.randint(0, 3, (samples,), generator=generator),
    }


@dataclass(frozen=True)
class Built:
    """A model with its captured form; both are inherited by the ranks, which cannot change them
    here.
    """

    captured: Captured
    workload: Workload

    @property
    def module(self) -> nn.Module:
        return self.workload.module


@cache
def built(name: str, dtype: torch.dtype = torch.float32) -> Built:
    """Capture takes a second, so once per model; whoever trains in this process must copy the
    module.
    """
    torch.manual_seed(0)
    module = MODELS[name]().to(dtype)
    example = batch(4, dtype=dtype)
    return Built(capture(module, example), Workload(module, example))


def with_programs(model: Built, *samples: int, evaluation: bool = False) -> Built:
    """Make programs of other sizes than planned ones, and those of evaluation, here: once, rather
    than by every rank.
    """
    for captured in (model.captured, *([model.captured.evaluation()] if evaluation else [])):
        for count in samples:
            captured.programs.at(count)
    return model


def plan(
    model: Built,
    num_stages: int,
    *,
    batch_size: int = 16,
    microbatch_size: int | Sequence[int] = 4,
    replicas: Sequence[int] | None = None,
    schedule: str = "1f1b",
    recompute: bool = False,
) -> Plan:
    """Cut the topological order into stages of about equally many operators; those that compute
    across samples have the whole batch. Its programs are made here, once for all ranks.
    """
    load_simulator()
    graph = model.captured.graph
    counts = replicas or [1] * num_stages
    sizes = [microbatch_size] * num_stages if isinstance(microbatch_size, int) else microbatch_size
    cuts = [len(graph) * i // num_stages for i in range(num_stages + 1)]
    stages, device = [], 0
    for s in range(num_stages):
        names = tuple(op.name for op in graph.ops[cuts[s] : cuts[s + 1]])
        devices = tuple(range(device, device + counts[s]))
        device += counts[s]
        stages.append(Stage(names, devices, sizes[s], recompute=recompute))
    return plan_of(model, stages, batch_size, schedule)


def plan_of(model: Built, stages: Sequence[Stage], batch_size: int, schedule: str) -> Plan:
    """Return the plan of these stages, as ``plan`` does."""
    graph = model.captured.graph
    stage_of = {name: s for s, stage in enumerate(stages) for name in stage.operators}
    pairs = {(stage_of[graph.ops[a].name], stage_of[graph.ops[b].name]) for a, b in graph.edges}
    edges = tuple(sorted((x, y) for x, y in pairs if x != y))
    cut = with_whole_batches(StageGraph(tuple(stages), edges, batch_size), graph)
    stage_graph = SCHEDULES[schedule]().warm_up(cut)
    prepare(model.captured, stage_graph)
    nothing = Prediction(1.0, 1.0, 0.0, (0,) * len(stage_graph.devices))
    return Plan(stage_graph, schedule, "by hand", "", "", "", 0.0, 0.0, nothing)


def on_devices(chosen: Plan, devices: Sequence[tuple[int, ...]]) -> Plan:
    """The same stages on other devices, of which some may have several stages."""
    graph = chosen.stage_graph
    stages = tuple(replace(s, devices=d) for s, d in zip(graph.stages, devices, strict=True))
    moved = SCHEDULES[chosen.schedule]().warm_up(replace(graph, stages=stages))
    return replace(chosen, stage_graph=moved)


def num_ranks(plan: Plan) -> int:
    return len(plan.stage_graph.devices)


def slices(samples: int, microbatch_size: int) -> list[tuple[int, int]]:
    return [(i, min(i + microbatch_size, samples)) for i in range(0, samples, microbatch_size)]


def train_alone(
    workload: Workload, batches: Sequence[Batch], microbatch_size: int = 4
) -> tuple[list[float], dict[str, Tensor]]:
    """The plain loop on a copy of the module: accumulate over micro-batches, clip, step. Losses and
    final state.
    """
    module = deepcopy(workload.module)
    parameters = dict(module.named_parameters())
    optimizer = workload.optimizer(list(parameters.items()))
    scheduler = workload.scheduler(optimizer) if workload.scheduler else None
    losses = []
    for each in batches:
        result = reference(module, each, slices(len(each["x"]), microbatch_size))
        for name, parameter in parameters.items():
            parameter.grad = result.gradients.get(name)
        if workload.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), workload.clip_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(result.loss)
    return losses, {name: p.detach() for name, p in parameters.items()}


def with_options(model: Built, **options: object) -> Workload:
    return replace(model.workload, **options)
