"""A transformer of 7 million parameters on two ranks: real compute, real gradients.

One thread per rank. PyTorch's ZBV has four stages, its data parallelism (DDP) half the batch per
rank in one piece. Ours runs a row of two stages, data parallelism as a plan of one stage, and what
the planner picks from a profile that is measured first. A step is one update by SGD.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import anabranch
from anabranch.graph.capture import Captured
from anabranch.models import build
from anabranch.plans.plan import Plan
from benchmarks.planners.common import Row, table
from benchmarks.runtime import ours, theirs
from benchmarks.runtime.race import Side, Step, medians, race

SIZES = {
    "layers": "8",
    "sequence": "64",
    "hidden": "256",
    "heads": "4",
    "feedforward": "1024",
    "vocabulary": "1024",
}
BATCH, MICROBATCHES = 32, 8
REFERENCE = "torch 1f1b"


class LossOnly(nn.Module):
    """The loss alone; PyTorch's stages compute no metrics either."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        """[samples, sequence] each -> scalar."""
        return self.model(tokens, target)["loss"]


class Part(nn.Module):
    """Layers ``start`` to ``stop``, with the embedding before the first and the head after the
    last.
    """

    def __init__(self, model: nn.Module, start: int, stop: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(model.layers[start:stop])
        self.is_first, self.is_last = start == 0, stop == len(model.layers)
        if self.is_first:
            self.embedding, self.position = model.embedding, model.position
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """[samples, sequence] or [samples, sequence, hidden] -> hidden states or logits."""
        if self.is_first:
            x = self.embedding(x) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if self.is_last else x


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """The same cross-entropy as the model's own."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def rows() -> list[Row]:
    """One row per side."""
    workload = build("transformer", preset="small", options=SIZES)
    assert workload.data is not None
    batch = next(iter(workload.data(BATCH, 0)))
    model = LossOnly(workload.module)
    captured = ours.captured_model(model, workload.example)
    cluster = anabranch.Cluster.preset("local:2")
    profile = anabranch.measure(captured, (1, 2, 4, 8, 16), repeats=5)
    plans = plans_by_hand(captured)
    plans["ours planned"] = anabranch.plan(profile, cluster, BATCH, optimizer_factor=0.0)
    sides = {
        # Each has a model of its own, because a rank gives up what its plan has elsewhere.
        name: ours.our_side(
            ours.captured_model(copy.deepcopy(model), workload.example),
            workload.example,
            plan,
            batch,
        )
        for name, plan in plans.items()
    }
    sides |= torch_sides(workload.module, batch["tokens"], batch["target"])
    found = medians(race(sides, 2, turns=4, steps=2))
    result = []
    for side, seconds in found.items():
        row: Row = {"side": side, "step_s": seconds, "throughput": found[REFERENCE] / seconds}
        if side in plans:
            row["predicted_s"] = anabranch.simulate(
                plans[side], profile, cluster, optimizer_factor=0.0
            ).step_s
            row["replicas"] = [stage.replicas for stage in plans[side].stage_graph.stages]
        result.append(row)
    return result


def plans_by_hand(captured: Captured) -> dict[str, Plan]:
    """A row of two stages under two schedules, and data parallelism."""
    size = BATCH // MICROBATCHES
    layers = len(captured.module.model.layers)
    in_a_row = ours.plan_of(
        captured,
        lambda name: half(name, layers),
        [[0], [1]],
        microbatches=MICROBATCHES,
        microbatch_size=size,
    )
    alike = ours.plan_of(captured, lambda _: 0, [[0, 1]], microbatches=1, microbatch_size=BATCH)
    return {
        "ours 1f1b": in_a_row,
        "ours 1f1b-deep": ours.under(in_a_row, "1f1b-deep"),
        "ours data parallel": alike,
    }


def half(name: str, layers: int) -> int:
    """The stage of an operator, where the first of two has half of the layers."""
    words = name.split(".")
    if "layers" in words:
        return int(int(words[words.index("layers") + 1]) >= layers // 2)
    return int("embedding" not in name and "position" not in name and words[-1] != "add")


def torch_sides(model: nn.Module, tokens: Tensor, target: Tensor) -> dict[str, Side]:
    """PyTorch's pipelines and its data parallelism, where model and batch are."""

    def parts(count: int) -> Callable[[], list[nn.Module]]:
        def make() -> list[nn.Module]:
            own, size = copy.deepcopy(model), len(model.layers) // count
            return [Part(own, i * size, (i + 1) * size) for i in range(count)]

        return make

    sides = {
        f"torch {name}": theirs.their_side(
            name, 2, parts(count), loss_of, tokens, target, microbatches=MICROBATCHES
        )
        for name, count in (("gpipe", 2), ("1f1b", 2), ("zbv", 4))
    }

    def data_parallel() -> Step:
        own = DistributedDataParallel(Part(copy.deepcopy(model), 0, len(model.layers)))
        optimizer = ours.sgd(own.parameters())
        mine = slice(dist.get_rank() * BATCH // 2, (dist.get_rank() + 1) * BATCH // 2)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(own(tokens[mine]), target[mine]).backward()
            optimizer.step()

        return step

    return sides | {"torch ddp": data_parallel}


def show(found: list[Row]) -> str:
    """Throughput over PyTorch's 1F1B."""
    lines = [
        [
            row["side"],
            f"{row['step_s'] * 1e3:.0f}",
            f"{row['throughput']:.2f}",
            f"{row['predicted_s'] * 1e3:.0f}" if "predicted_s" in row else "-",
        ]
        for row in found
    ]
    return table(["side", "step ms", f"throughput over {REFERENCE}", "predicted ms"], lines)
