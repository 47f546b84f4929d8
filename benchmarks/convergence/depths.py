"""What asynchronous methods cost at 2 to 32 stages, with all seeds in one tensor program.

Which weights a pass reads is decided by the policy and by the lag of its stage. So a mini-batch is
computed in one go, while the pipeline is full: the forward with what each stage read then, the
backward with what it reads now. The weights of all seeds are stacked, and one call trains them.

The models are transformers of eight blocks with four linear layers each; at 32 stages every linear
layer is a stage. Synchronous training and 2bw are the same at any depth.

python -m benchmarks.convergence.depths --into FILE [--tasks NAME] [--depths 8] [--seeds 0-9]
                                        [--methods NAME] [--updates N] [--picture PAGE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import Adam, NAdam, Optimizer

from anabranch.runtime.asynchronous.corrections import CORRECTIONS, Step
from anabranch.runtime.asynchronous.prediction import WeightPrediction
from anabranch.weights import Naive, Reading, Unit, WeightPolicy, policy_named
from benchmarks.convergence.curves import draw_depths
from benchmarks.convergence.tables import difference
from benchmarks.convergence.tasks import LAYERS, TASKS, Block, Characters, Task, charlm
from benchmarks.datasets.digits import load_small_digits
from benchmarks.planners.common import Row, table

LINEAR = ("qkv", "out", "up", "down")
"""Linear layers of a block; a norm is part of the one behind it."""

DEPTHS = (8, 4, 16, 32)
ASKED = 3
"""How often the held-out samples are asked, at the end; their mean counts."""

BETWEEN = 25
"""Updates between these times."""

ROWS = 512
"""Held-out samples that are asked at most."""


class Rows(nn.Module):
    """A transformer that reads a small picture row by row and names its digit; and the loss."""

    causal = False

    def __init__(self, side: int, width: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(side, width)
        self.place = nn.Parameter(torch.zeros(side, width))
        self.layers = nn.ModuleList(Block(width, heads, causal=False) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def scores(self, x: Tensor) -> Tensor:
        """Of every class: [samples, classes]."""
        x = self.embedding(x) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(-2))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.scores(x), label)

    reset = Characters.reset


@dataclass(frozen=True)
class Trial:
    """A task with its sizes.

    Attributes:
        updates: of a run.
        lr: of Adam, NAdam and Muon, whose steps are scaled to the size of Adam's.
    """

    task: Callable[[], Task]
    updates: int
    lr: float


def _rows() -> Task:
    digits = load_small_digits()

    def gather(rows: Tensor) -> dict[str, Tensor]:
        return {"x": digits.images[rows], "label": digits.digit[rows]}

    return replace(TASKS["digits"](), name="rows", module=Rows(8, 16, 4), gather=gather)


TRIALS: Mapping[str, Trial] = {
    "charlm": Trial(cache(lambda: charlm(width=16, batch_size=8)), 300, 0.003),
    "rows": Trial(cache(_rows), 200, 0.003),
    "charlm-32": Trial(TASKS["charlm"], 800, 0.003),
}
"""Name -> trial; the last one is that of ``charlm-8-adam``."""


class Muon(Optimizer):
    """Muon for the linear layers of blocks, Adam for everything else, of stacked models."""

    def __init__(self, parameters: Mapping[str, Tensor], lr: float) -> None:
        self._matrices = [p for n, p in parameters.items() if _is_hidden(n, p)]
        super().__init__([*parameters.values()], {"lr": lr})
        self._adam = Adam([p for n, p in parameters.items() if not _is_hidden(n, p)], lr=lr)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """As ``torch.optim.Muon`` with ``match_rms_adamw``, in single precision."""
        self._adam.step()
        for p in self._matrices:
            assert p.grad is not None
            momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            momentum.lerp_(p.grad, 1 - 0.95)
            update = orthogonal(p.grad.lerp(momentum, 0.95))
            p.sub_(update, alpha=self.param_groups[0]["lr"] * 0.2 * max(p.shape[-2:]) ** 0.5)


def _is_hidden(name: str, parameter: Tensor) -> bool:
    return name.startswith("layers") and parameter.dim() == 3


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with singular values of about 1, by five steps of Newton and Schulz."""
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / x.flatten(-2).norm(dim=-1)[..., None, None].clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


def _adam(parameters: Mapping[str, Tensor], lr: float) -> Optimizer:
    return Adam([*parameters.values()], lr=lr)


def _nadam(parameters: Mapping[str, Tensor], lr: float) -> Optimizer:
    return NAdam([*parameters.values()], lr=lr, betas=(0.99, 0.999), foreach=True)


@dataclass(frozen=True)
class Method:
    """A policy with its optimizer.

    Attributes:
        depths: whether it differs from depth to depth.
        flush: whether all stages read the newest version.
        together: mini-batches of an update.
    """

    policy: WeightPolicy
    optimizer: Callable[[Mapping[str, Tensor], float], Optimizer] = _adam
    depths: bool = True
    flush: bool = False
    together: int = 1


METHODS: Mapping[str, Method] = {
    "synchronous": Method(Naive(), depths=False, flush=True),
    "2bw-ef": Method(policy_named("2bw-ef"), depths=False),
    "2bw-ef, Muon": Method(policy_named("2bw-ef"), Muon, depths=False),
    "asyncpp": Method(policy_named("asyncpp"), _nadam),
    "basis-rotation": Method(policy_named("basis-rotation")),
    "stash": Method(policy_named("stash")),
    "pipeoptim": Method(policy_named("pipeoptim")),
    "predict-stash": Method(policy_named("predict-stash")),
    "2bw": Method(policy_named("2bw"), depths=False),
    "2bw, Muon": Method(policy_named("2bw"), Muon, depths=False),
    "a third of the updates": Method(Naive(), depths=False, flush=True, together=3),
    "synchronous, NAdam": Method(Naive(), _nadam, depths=False, flush=True),
    "synchronous, Muon": Method(Naive(), Muon, depths=False, flush=True),
    "synchronous, rotation": Method(policy_named("basis-rotation"), depths=False, flush=True),
}
"""Name -> method, in the order in which they are run."""


def stage_of(name: str, depth: int) -> int:
    """The stage that has a parameter, at a depth of up to 32."""
    if not name.startswith("layers"):
        return depth - 1 if name.startswith(("norm", "head")) else 0
    _, block, part, *_ = name.split(".")
    linear = {"before": 0, "between": 2}.get(part)
    place = len(LINEAR) * int(block) + (LINEAR.index(part) if linear is None else linear)
    return place * depth // (len(LINEAR) * LAYERS)


class Stacked:
    """Models of several seeds in a pipeline that is always full.

    Attributes:
        weights: by name, [seeds, ...]: the newest version of every stage.
    """

    def __init__(self, task: Task, seeds: Sequence[int], method: Method, lr: float, depth: int):
        starts = []
        for seed in seeds:
            task.module.reset(seed)
            starts.append([p.detach().clone() for p in task.module.parameters()])
        names = [name for name, _ in task.module.named_parameters()]
        stacked = zip(names, zip(*starts, strict=True), strict=True)
        self.weights = {name: nn.Parameter(torch.stack(parts)) for name, parts in stacked}
        self._task, self._policy, self._depth = task, method.policy, depth
        self._optimizer = method.optimizer(self.weights, lr)
        self._kept: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
        stages: dict[int, list[str]] = {}
        for name in names:
            stages.setdefault(0 if method.flush else stage_of(name, depth), []).append(name)
        self._stages = [
            _Stage(self, names, 1 if method.flush else depth - s, 1 if method.flush else depth)
            for s, names in stages.items()
        ]
        self._model = torch.vmap(lambda p, *x: functional_call(task.module, p, x))
        self.updates = 0

    def train(self, x: Tensor, label: Tensor) -> Tensor:
        """Make an update from a mini-batch per seed, [seeds, samples, ...]; their losses."""
        for stage in self._stages:
            stage.look_ahead()
        newest = {name: p.data.clone() for name, p in self.weights.items()}
        for stage in self._stages:
            stage.write(self._policy.forward)
        losses = self._model(self.weights, x, label)
        for stage in self._stages:
            stage.restore(newest)
            stage.write(self._policy.backward)
        losses.sum().backward()
        for stage in self._stages:
            stage.restore(newest)
        step = Step(tuple(self.weights.values()), self._optimizer, self.updates, 0, dims=3)
        with torch.no_grad(), ExitStack() as corrections:
            for correction, kept in map(CORRECTIONS.__getitem__, self._policy.corrections):
                rows = (self._kept[what] for what in kept)
                corrections.enter_context(correction(self._policy, step, *rows))
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.updates += 1
        return losses.detach()

    @torch.no_grad()
    def accuracy(self) -> list[float]:
        """Share of the held-out answers that are right, per seed, in percent."""
        batch = self._task.gather(self._task.held_out[:ROWS])
        scores = torch.vmap(lambda p: functional_call(_Scores(self._task.module), p, batch["x"]))
        found = scores({f"module.{name}": p for name, p in self.weights.items()}).argmax(-1)
        right = (found == batch["label"].flatten()).double().mean(1)
        return (100 * right).tolist()


class _Scores(nn.Module):
    """Scores of a model, for ``functional_call``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module.scores(x)


class _Stage:
    """Versions and predictions of the weights of one stage."""

    def __init__(self, models: Stacked, names: list[str], in_flight: int, deepest: int) -> None:
        self._models, self._names = models, names
        self._in_flight, self._deepest = in_flight, deepest
        self._parameters = [models.weights[name] for name in names]
        self._prediction = WeightPrediction(models._optimizer, self._parameters)
        self._versions: dict[int, list[Tensor]] = {}
        self._ahead: dict[int, list[Tensor]] = {}

    def _unit(self, number: int) -> Unit:
        return Unit(number, 0, self._in_flight, self._deepest)

    @torch.no_grad()
    def look_ahead(self) -> None:
        """Keep the newest version, and what it predicts for units whose forward sees it."""
        version, policy = self._models.updates, self._models._policy
        self._versions[version] = [p.data.clone() for p in self._parameters]
        for number in range(version, version + self._in_flight):
            unit = self._unit(number)
            if unit.seen == version and (ahead := policy.forward(unit).ahead):
                predicted = self._ahead[number] = [p.data.clone() for p in self._parameters]
                self._prediction.move(predicted, ahead)
        for old in [v for v in self._versions if v < version - self._deepest]:
            del self._versions[old]

    @torch.no_grad()
    def write(self, reading: Callable[[Unit], Reading]) -> None:
        """Write what a pass of the unit to be learned next reads, without telling autograd."""
        number, policy = self._models.updates, self._models._policy
        forward = policy.forward(self._unit(number))
        wanted = reading(self._unit(number))
        if wanted == forward:
            source = self._ahead.get(number) or self._versions[forward.version]
        else:
            source = self._versions[number]
            assert not wanted.ahead, "no policy here predicts for the backward alone"
        for parameter, tensor in zip(self._parameters, source, strict=True):
            parameter.data.copy_(tensor)

    def restore(self, newest: Mapping[str, Tensor]) -> None:
        """Put the newest weights back."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            parameter.data.copy_(newest[name])


def run(trial: Trial, method: Method, depth: int, seeds: Sequence[int]) -> list[float]:
    """Held-out accuracy per seed."""
    task = trial.task()
    models = Stacked(task, seeds, method, trial.lr, depth)
    batches: list[deque[Tensor]] = [deque() for _ in seeds]
    epoch, asked = 0, []
    for update in range(method.together, trial.updates + 1, method.together):
        while len(batches[0]) < method.together:
            for rows, seed in zip(batches, seeds, strict=True):
                order = task.epoch(seed, epoch)
                whole = len(order) // task.batch_size * task.batch_size
                rows.extend(order[:whole].split(task.batch_size))
            epoch += 1
        rows_of = [rows.popleft() for rows in batches for _ in range(method.together)]
        batch = task.gather(torch.cat(rows_of))
        shape = len(seeds), task.batch_size * method.together
        models.train(*(batch[k].unflatten(0, shape) for k in ("x", "label")))
        left = trial.updates - update
        if left // BETWEEN != (left - method.together) // BETWEEN and left // BETWEEN < ASKED:
            asked.append(models.accuracy())
    return [statistics.fmean(found) for found in zip(*asked, strict=True)]


def seeds_of(text: str) -> range:
    """The seeds that ``0-9`` or ``7`` mean."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def show(rows: Sequence[Row]) -> str:
    """Per task and depth, points above or below synchronous training with Adam, and p."""
    lines = []
    base = {_case(row): row["accuracy"] for row in rows if row["method"] == "synchronous"}
    for row in sorted(rows, key=lambda row: (*_case(row), row["depth"])):
        if _case(row) not in base:
            continue
        far = difference(row["accuracy"], base[_case(row)])
        lines.append(
            (
                row["task"],
                str(row["updates"]),
                f"{row['seeds'][0]}-{row['seeds'][-1]}",
                row["method"],
                str(row["depth"] or "any"),
                f"{statistics.fmean(row['accuracy']):.2f}",
                f"{far.mean:+.2f} +- {far.margin:.2f}",
                f"{far.p:.4f}",
            )
        )
    heads = ("task", "updates", "seeds", "method", "stages", "accuracy", "to synchronous", "p")
    return table(heads, lines)


def _case(row: Row) -> tuple[str, int, tuple[int, ...]]:
    return row["task"], row["updates"], tuple(row["seeds"])


def main() -> None:
    """Run what the file lacks, then print the table of all that it has."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, required=True, help="keep runs, and go on from them")
    parser.add_argument("--tasks", nargs="*", default=["charlm", "rows"], choices=TRIALS)
    parser.add_argument("--depths", nargs="*", type=int, default=DEPTHS, choices=(2, 3, *DEPTHS))
    parser.add_argument("--methods", nargs="*", default=[*METHODS], choices=METHODS)
    parser.add_argument("--seeds", type=seeds_of, default=range(10))
    parser.add_argument("--updates", type=int, help="of a run, in place of the task's own number")
    parser.add_argument("--picture", type=Path, help="write accuracy over depth, .png or .svg")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "There is a performance drop")
    rows: list[Row] = []
    if arguments.into.exists():
        rows = [json.loads(line) for line in arguments.into.read_text().splitlines()]
    for depth in arguments.depths:
        for task in arguments.tasks:
            for name in arguments.methods:
                method, trial = METHODS[name], TRIALS[task]
                trial = replace(trial, updates=arguments.updates or trial.updates)
                key = {
                    "task": task,
                    "updates": trial.updates,
                    "method": name,
                    "depth": depth if method.depths else 0,
                    "seeds": [*arguments.seeds],
                }
                if any(key.items() <= row.items() for row in rows):
                    continue
                started = time.process_time()
                found = run(trial, method, depth, arguments.seeds)
                rows.append(key | {"accuracy": found, "cpu_s": time.process_time() - started})
                with arguments.into.open("a") as stream:
                    stream.write(json.dumps(rows[-1]) + "\n")
                sys.stderr.write(f"{task} {name} {depth} {statistics.fmean(found):.2f}\n")
    sys.stdout.write(show(rows) + "\n")
    if arguments.picture:
        draw_depths(curves_of(rows, arguments.tasks, [*arguments.seeds]), arguments.picture)


def curves_of(
    rows: Sequence[Row], tasks: Sequence[str], seeds: Sequence[int]
) -> dict[str, list[Row]]:
    """Rows of each task with its own number of updates, of these seeds."""
    return {
        f"{task}, {TRIALS[task].updates} updates": [
            row
            for row in rows
            if (row["task"], row["updates"]) == (task, TRIALS[task].updates)
            and row["seeds"] == seeds
        ]
        for task in tasks
    }


if __name__ == "__main__":
    main()
