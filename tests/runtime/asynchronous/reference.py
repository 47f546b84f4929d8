"""What a weight policy means, as plain loops: the oracle for everything that trains asynchronously.

Nothing of the package is used. A model is stages of plain modules between named values; a stage's
weights are deep copies of tensors, one list per version, and autograd runs anew for every pass of a
stage: the forward on the weights that it reads, the backward on the graph of that forward, into
which the weights that the backward reads are written by hand where they differ.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@dataclass
class RefStage:
    """A stage: a module from tensors of other stages, or of the batch, to one tensor.

    Attributes:
        module: called with the inputs in order.
        inputs: names of batch entries, or indices of stages.
    """

    module: nn.Module
    inputs: Sequence[str | int]
    optimizer: Optimizer | None = None
    scheduler: LRScheduler | None = None
    distance: int = 0
    versions: list[list[Tensor]] = field(default_factory=list)
    last: list[Tensor] | None = None
    kept: dict[int, Any] = field(default_factory=dict)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The trainable ones."""
        return [p for p in self.module.parameters() if p.requires_grad]


def distances(stages: Sequence[RefStage]) -> list[int]:
    """Longest distance to the last stage, by following the inputs."""
    result = [0] * len(stages)
    for y in reversed(range(len(stages))):
        for x in stages[y].inputs:
            if isinstance(x, int):
                result[x] = max(result[x], result[y] + 1)
    return result


def predicted(stage: RefStage, steps: int) -> list[Tensor]:
    """The stage's weights after so many more updates like the last one."""
    result = []
    optimizer = stage.optimizer
    if optimizer is None:
        return []
    kind = type(optimizer).__name__
    for i, p in enumerate(stage.weights):
        w, state = p.detach().clone(), optimizer.state.get(p, {})
        (group,) = [g for g in optimizer.param_groups if any(q is p for q in g["params"])]
        if kind == "SGD":
            if state.get("momentum_buffer") is not None:
                w = w.add(state["momentum_buffer"], alpha=-(group["lr"] * steps))
        elif kind in ("Adam", "AdamW"):
            if state:
                t, (b1, b2) = float(state["step"]), group["betas"]
                v = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
                denominator = v.sqrt() / (1 - b2**t) ** 0.5 + group["eps"]
                step_size = group["lr"] * steps / (1 - b1**t)
                w = w.addcdiv(state["exp_avg"], denominator, value=-step_size)
        elif stage.last is not None:
            w = w.add(w - stage.last[i], alpha=steps)
        result.append(w)
    return result


def weights_for(
    policy: str, stage: RefStage, n: int, full: int, depth: int
) -> tuple[list[Tensor], list[Tensor] | str]:
    """What the forward of unit n reads, and what its backward reads, or when to decide that."""
    d = stage.distance
    v = max(full, n - d)
    half = (depth - 1 - d) // 2
    if policy == "naive":
        return stage.versions[v], "current"
    if policy in ("stash", "asyncpp", "basis-rotation"):
        return stage.versions[v], stage.versions[v]
    if policy == "vertical-sync":
        old = stage.versions[max(full, n - (depth - 1))]
        return old, old
    if policy in ("2bw", "2bw-ef"):
        old = stage.versions[max(full, n - 1)]
        return old, old
    if policy == "spectrain":
        return predicted(stage, n - v + half), "predicted"
    if policy == "pipeoptim":
        return predicted(stage, n - v), "current"
    if policy == "predict-stash":
        ahead = predicted(stage, n - v)
        return ahead, ahead
    raise ValueError(policy)


def write(stage: RefStage, tensors: Sequence[Tensor]) -> None:
    """Overwrite the weights where they are, without telling autograd."""
    for p, tensor in zip(stage.weights, tensors, strict=True):
        p.data.copy_(tensor)


def fed_back(stage: RefStage, before: Sequence[Tensor]) -> None:
    """Error feedback: after update u_t, W -= u_t - u_(t-1)."""
    for i, (p, old) in enumerate(zip(stage.weights, before, strict=True)):
        update = old - p.detach()
        p.data -= update - stage.kept.get(i, update)
        stage.kept[i] = update


def rotated_step(stage: RefStage, updates: int, every: int = 10, memory: float = 0.95) -> None:
    """The optimizer's step with every matrix turned to the eigenvectors of G G', or of G' G."""
    turned: list[Any] = []
    for i, p in enumerate(stage.weights):
        if p.dim() != 2 or min(p.shape) == 1 or p.grad is None:
            continue
        wide, g, w = p.shape[0] <= p.shape[1], p.grad, p.detach().clone()
        square = g @ g.T if wide else g.T @ g
        into = (lambda x, q: q.T @ x) if wide else (lambda x, q: x @ q)
        out = (lambda x, q: q @ x) if wide else (lambda x, q: x @ q.T)
        if i not in stage.kept:
            moments, q = square, torch.linalg.eigh(square).eigenvectors.flip(-1)
        else:
            moments, q = stage.kept[i]
            moments = torch.lerp(moments, square, 1 - memory)
            if updates % every == 0:
                q = torch.linalg.qr(moments @ q).Q
        stage.kept[i] = moments, q
        start = into(w, q)
        p.grad = into(g, q)
        p.data.copy_(start)
        if stage.optimizer.state.get(p):
            stage.optimizer.state[p]["exp_avg"].copy_(into(stage.optimizer.state[p]["exp_avg"], q))
        turned.append((p, w, q, start, out))
    stage.optimizer.step()
    for p, w, q, start, out in turned:
        p.data.copy_(w + out(p.data - start, q))
        stage.optimizer.state[p]["exp_avg"].copy_(out(stage.optimizer.state[p]["exp_avg"], q))


def train(
    stages: Sequence[RefStage],
    policy: str,
    batches: Sequence[Mapping[str, Tensor]],
    *,
    fills: Sequence[int] = (0,),
    microbatches: int = 1,
    on_update: Callable[[int, int], None] | None = None,
) -> list[float]:
    """Train over a stream of mini-batches, stage by stage in the order of asynchronous 1F1B.

    Args:
        stages: in topological order, the last one makes the loss; their modules are trained.
        policy: key of ``anabranch.weights.POLICIES``.
        batches: named tensors with samples in dimension 0.
        fills: mini-batches before which the pipeline is drained, the first one included.
        microbatches: per mini-batch.
        on_update: told of (stage, version) after every update.

    Returns:
        The loss of every mini-batch.
    """
    for stage, distance in zip(stages, distances(stages), strict=True):
        stage.distance = distance
        stage.versions = [[w.detach().clone() for w in stage.weights]]
    losses: list[float] = []
    for full, end in zip(fills, [*fills[1:], len(batches)], strict=True):
        run = Run(stages, policy, batches, full, end, microbatches, on_update)
        losses += run.execute()
    return losses


class Run:
    """From one fill to its drain."""

    def __init__(
        self,
        stages: Sequence[RefStage],
        policy: str,
        batches: Sequence[Mapping[str, Tensor]],
        full: int,
        end: int,
        microbatches: int,
        on_update: Callable[[int, int], None] | None,
    ) -> None:
        self.stages, self.policy, self.batches = stages, policy, batches
        self.full, self.end, self.m, self.on_update = full, end, microbatches, on_update
        self.depth = max(stage.distance for stage in stages) + 1
        # SpecTrain: half of the updates that a stage makes while the deepest source catches up.
        self.halves = [(self.depth - 1 - stage.distance) // 2 for stage in stages]
        self.made: dict[tuple[int, int], Tensor] = {}
        self.leaves: dict[tuple[int, int], list[Tensor]] = {}
        self.reads: dict[tuple[int, int], list[Tensor] | str] = {}
        self.grads: dict[tuple[int, int], list[Tensor]] = {}
        self.losses = [0.0] * (end - full)

    def execute(self) -> list[float]:
        total = (self.end - self.full) * self.m
        forwards, backwards = [0] * len(self.stages), [0] * len(self.stages)
        while min(backwards) < total:
            for s, stage in enumerate(self.stages):
                i, j = forwards[s], backwards[s]
                sources = [x for x in stage.inputs if isinstance(x, int)]
                users = [y for y, other in enumerate(self.stages) if s in other.inputs]
                if i < total and i - j <= stage.distance:
                    if all(forwards[x] > i for x in sources):
                        self.forward(s, i)
                        forwards[s] += 1
                elif j < total and all(backwards[y] > j for y in users):
                    self.backward(s, j)
                    backwards[s] += 1
        return self.losses

    def part(self, name: str, i: int) -> Tensor:
        whole = self.batches[self.full + i // self.m][name]
        return whole.chunk(self.m)[i % self.m]

    def weights_for(self, s: int, i: int) -> tuple[list[Tensor], list[Tensor] | str]:
        n = self.full + i // self.m
        return weights_for(self.policy, self.stages[s], n, self.full, self.depth)

    def forward(self, s: int, i: int) -> None:
        stage = self.stages[s]
        current = [w.detach().clone() for w in stage.weights]
        reads, self.reads[s, i] = self.weights_for(s, i)
        inputs = []
        for source in stage.inputs:
            if isinstance(source, int):
                value = self.made[source, i].detach()
                inputs.append(value.requires_grad_(value.is_floating_point()))
            else:
                inputs.append(self.part(source, i))
        write(stage, reads)
        self.leaves[s, i] = inputs
        self.made[s, i] = stage.module(*inputs)
        write(stage, current)
        if s == len(self.stages) - 1:
            self.losses[i // self.m] += self.made[s, i].item() / self.m

    def backward(self, s: int, i: int) -> None:
        stage = self.stages[s]
        current = [w.detach().clone() for w in stage.weights]
        reads = self.reads.pop((s, i))
        if reads == "predicted":
            write(stage, predicted(stage, self.halves[s]))
        elif not isinstance(reads, str):
            write(stage, reads)
        out = self.made.pop((s, i))
        if s == len(self.stages) - 1:
            seed = torch.full_like(out, 1 / self.m)
        else:
            first, *others = self.grads.pop((s, i))
            seed = sum(others, first)
        if out.requires_grad:
            torch.autograd.backward(out, seed)
        for source, leaf in zip(stage.inputs, self.leaves.pop((s, i)), strict=True):
            if isinstance(source, int):
                grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                self.grads.setdefault((source, i), []).append(grad)
        write(stage, current)
        self.end_pass(s, i)

    def end_pass(self, s: int, i: int) -> None:
        if (i + 1) % self.m == 0:
            self.update(s)

    def update(self, s: int, minibatches: int = 1) -> None:
        stage = self.stages[s]
        stage.last = [w.detach().clone() for w in stage.weights]
        if stage.optimizer is not None:
            versions = [p._version for p in stage.weights]
            if self.policy == "basis-rotation":
                rotated_step(stage, len(stage.versions) - 1)
            else:
                stage.optimizer.step()
            if self.policy == "2bw-ef":
                fed_back(stage, stage.last)
            if stage.weights:
                torch._C._autograd._unsafe_set_version_counter(tuple(stage.weights), versions)
            stage.optimizer.zero_grad()
        if stage.scheduler is not None:
            for _ in range(minibatches):
                stage.scheduler.step()
        stage.versions.append([w.detach().clone() for w in stage.weights])
        if self.on_update is not None:
            self.on_update(s, len(stage.versions) - 1)
