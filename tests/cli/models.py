"""Workloads that the command line tests name as package.module:function."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from anabranch import Workload
from anabranch.runtime.guards.interrupt import INTERRUPT


class Towers(nn.Module):
    """Two towers and a head, small enough to train in a test."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width))
        self.right = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width))
        self.head = nn.Linear(2 * width, 1)

    def forward(
        self, left: torch.Tensor, right: torch.Tensor, target: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """[samples, 8] twice and [samples] -> loss and error."""
        joined = torch.cat([self.left(left), self.right(right)], -1)
        off = self.head(joined).squeeze(-1) - target
        return {"loss": (off**2).mean(), "error": off.abs().mean()}


class Noisy(Towers):
    """Adds noise to what one tower reads."""

    def forward(
        self, left: torch.Tensor, right: torch.Tensor, target: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Draws random numbers."""
        return super().forward(left + 0.1 * torch.randn_like(left), right, target)


class Branching(Towers):
    """Asks a tensor for its value, which has no graph."""

    def forward(
        self, left: torch.Tensor, right: torch.Tensor, target: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Cannot be captured."""
        if left.sum() > 0:
            left = -left
        return super().forward(left, right, target)


def batches(batch_size: int, epoch: int) -> Iterator[dict[str, torch.Tensor]]:
    """Ten batches of random numbers, of which a sum is to be learnt."""
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(10):
        left, right = torch.randn(2, batch_size, 8, generator=generator)
        yield {"left": left, "right": right, "target": left[:, 0] + right[:, 0]}


def failing(batch_size: int, epoch: int) -> Iterator[dict[str, torch.Tensor]]:
    """Raises in the middle, where losses are known already, however late a rank is."""
    for i, batch in enumerate(batches(batch_size, epoch)):
        if i == 5:
            raise OSError("the disk is on fire")
        yield batch


def towers(width: str = "16") -> Workload:
    """The workload."""
    torch.manual_seed(0)
    return Workload(
        Towers(int(width)),
        next(batches(4, 0)),
        data=batches,
        eval_data=lambda batch_size: batches(batch_size, 1),
        chance={"error": 1.1},
    )


def shuffled() -> Workload:
    """One whose samples come in an order that the run draws."""
    samples = [{key: batch[key][i] for key in batch} for batch in batches(4, 0) for i in range(4)]
    return replace(towers(), data=samples, eval_data=None)


def noisy() -> Workload:
    """One whose forward draws random numbers."""
    return replace(towers(), module=Noisy(16))


def branching() -> Workload:
    """One that cannot be captured."""
    return Workload(Branching(4), next(batches(4, 0)))


def with_failing_data() -> Workload:
    """One whose data raises."""
    return Workload(Towers(4), next(batches(4, 0)), data=failing)


def with_failing_evaluation() -> Workload:
    """One whose held-out data raises."""
    return replace(towers(), eval_data=lambda batch_size: failing(batch_size, 1))


def clipped() -> Workload:
    """One that clips the norm over all stages."""
    return replace(towers(), clip_norm=1.0)


def without_momentum() -> Workload:
    """One whose optimizer has nothing to predict with."""
    return replace(towers(), optimizer=partial(torch.optim.SGD, lr=0.01))


def common_norm() -> Workload:
    """The same, clipped by the norm over all stages."""
    return replace(without_momentum(), clip_norm=1.0)


def on_a_plateau() -> Workload:
    """One whose scheduler waits for a metric."""
    return replace(towers(), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)


def with_failing_scheduler() -> Workload:
    """One whose scheduler cannot be made."""
    return replace(towers(), scheduler=partial(torch.optim.lr_scheduler.StepLR, 1))


class OwnSGD(torch.optim.SGD):
    """Of nobody's, so that it may compute over whole parameters."""


def with_own_optimizer() -> Workload:
    """An optimizer that is not known to treat each element alone."""
    return replace(towers(), optimizer=partial(OwnSGD, lr=0.1))


def without_data() -> Workload:
    """One that can be planned, not trained."""
    return replace(towers(), data=None)


def loaded() -> Workload:
    """One whose loader makes batches of its own size."""
    samples = [{n: t[i] for n, t in batch.items()} for batch in batches(8, 0) for i in range(8)]
    return replace(towers(), data=DataLoader(samples, batch_size=8))


def with_other_labels() -> Workload:
    """One whose samples have labels of another type than the example."""
    samples = [{"left": torch.zeros(8), "right": torch.zeros(8), "target": 1} for _ in range(8)]
    return replace(towers(), data=samples)


class Unreadable(list[object]):
    """Samples that cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        raise OSError("a sample is torn")


def with_unreadable_samples() -> Workload:
    """One whose data set raises."""
    return replace(towers(), data=Unreadable(range(8)))


def without_a_whole_batch() -> Workload:
    """One whose loader drops the only batch, which is a short one."""
    samples = [{n: t[0] for n, t in next(batches(1, 0)).items()}]
    return replace(towers(), data=DataLoader(samples, batch_size=8, drop_last=True))


def with_wide_batches() -> Workload:
    """One whose loader yields other sizes than the example, from the third batch on."""

    def wide(batch_size: int, epoch: int) -> Iterator[dict[str, torch.Tensor]]:
        for i, batch in enumerate(batches(batch_size, epoch)):
            yield batch if i < 2 else batch | {"left": torch.zeros(batch_size, 9)}

    return replace(towers(), data=wide)


def _on_rank(number: int) -> bool:
    """Whether this is that rank of a training; what measures the data beforehand is none."""
    return dist.is_initialized() and dist.get_rank() == number


def at_the_eighth(act: Callable[[], None], rank: int = 0) -> Workload:
    """Towers of which a rank does something before it has its eighth batch."""

    def data(batch_size: int, epoch: int) -> Iterator[dict[str, torch.Tensor]]:
        for i, batch in enumerate(batches(batch_size, epoch)):
            if (epoch, i) == (0, 7) and _on_rank(rank):
                act()
            yield batch

    return replace(towers(), data=data)


def interrupt() -> None:
    """Press Ctrl-C, and wait until it is heard."""
    os.kill(os.getppid(), signal.SIGINT)
    wait_until_heard()


def interrupting() -> Workload:
    """Its eighth batch comes with a Ctrl-C."""
    return at_the_eighth(interrupt)


def stuck() -> Workload:
    """Its eighth batch comes with a Ctrl-C, and never."""

    def act() -> None:
        interrupt()
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(3600)

    return at_the_eighth(act)


def wait_until_heard() -> None:
    """Until the parent has told this rank, or is gone."""
    end = time.monotonic() + 30
    while not INTERRUPT.heard and time.monotonic() < end:
        time.sleep(0.001)


def raising() -> Workload:
    """One whose function has a mistake: the module is a class."""
    return Workload(Towers, next(batches(4, 0)), data=batches)  # type: ignore[arg-type]


class Normed(nn.Module):
    """Towers of which one has batch statistics, which one sample does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(16, 1)

    forward = Towers.forward


def normed() -> Workload:
    """One that cannot be trained on one sample at a time."""
    return replace(towers(), module=Normed())


def killed_once() -> Workload:
    """Its eighth batch ends the last rank, the first time, when a checkpoint of step 6 is there if
    one of step 3 is.
    """
    marker = Path("killed")

    def act() -> None:
        if not marker.exists():
            marker.touch()
            while any(Path.cwd().glob("*/step-3")) and not any(Path.cwd().glob("*/step-6")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    return at_the_eighth(act, 1)
