"""States of optimizers and schedulers on their way through JSON."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from anabranch.checkpoint import Checkpoint, Progress, RankPart
from anabranch.checkpoint.manifest import sealed
from anabranch.checkpoint.optimizer import optimizer_part, restore_optimizer, restore_scheduler
from anabranch.checkpoint.saving import Saving
from anabranch.checkpoint.writing import Target
from anabranch.errors import FileFormatError, TrainingError

rates = torch.optim.lr_scheduler


class Trained:
    """One parameter, Adam, and a scheduler that lowers its rate after two steps and after four."""

    def __init__(self, milestones: tuple[int, ...] = (2, 4), rate: Any = 0.5) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.Adam([self.weight], lr=rate, betas=(0.5, 0.75), foreach=False)
        self.scheduler = rates.MultiStepLR(self.optimizer, milestones)
        self.names = {id(self.weight): "w"}

    def step(self, count: int) -> None:
        for _ in range(count):
            self.weight.grad = torch.ones(3)
            self.optimizer.step()
            self.scheduler.step()

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def save(self, folder: Path) -> Path:
        tensors, state = optimizer_part(self.optimizer, self.names, {*self.names.values()})
        part = RankPart(tensors, optimizer=state, scheduler=self.scheduler.state_dict())
        saving = Saving(
            Target(folder, "0" * 16, 1, Progress(step=3)), 0, part, keep=None,
            timeout=5.0,
        )  # fmt: skip
        saving.confirm()
        saving.wait()
        return folder

    def load(self, folder: Path) -> None:
        saved = Checkpoint(folder)
        restore_optimizer(self.optimizer, self.names, saved)
        restore_scheduler(self.scheduler, self.optimizer, saved)


@pytest.mark.parametrize("make", [float, torch.tensor])
def test_milestones_are_met_after_a_resume(make: Callable[[float], Any], tmp_path: Path):
    """MultiStepLR counts them by number, and JSON has texts for keys: the rate stayed as it was. It
    may be a tensor, of which the scheduler keeps some.
    """
    first, second = Trained(rate=make(0.5)), Trained(rate=make(0.5))
    first.step(3)
    second.load(first.save(tmp_path / "c"))
    assert second.rate == pytest.approx(0.05)
    for each in (first, second):
        each.step(2)
    assert first.rate == second.rate == pytest.approx(0.005)
    assert second.optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    assert type(second.optimizer.param_groups[0]["lr"]) is type(make(0.5))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("optimizer", "groups", 0, "options", "lr"), "x", 'option lr is "x"'),
        (("optimizer", "groups", 0, "options", "betas"), [0.5], r"option betas is \[0.5\]"),
        (("optimizer", "groups", 0, "options", "betas"), 0.5, "option betas is 0.5"),
        (("optimizer", "groups", 0, "options", "amsgrad"), 3, "option amsgrad is 3"),
        (("optimizer", "groups", 0, "options", "lr"), None, "option lr is null"),
        (("optimizer", "groups", 0, "options", "spell"), 1.0, "Adam has no option spell here"),
        (("position",), 2**61, "position is 2305843009213693952"),
        (("step",), 2**61, "step is 2305843009213693952"),
        (("epoch",), 2**61, "epoch is 2305843009213693952"),
        (("batch_size",), 2**61, "batch_size is 2305843009213693952"),
        (("scheduler", "last_epoch"), None, "scheduler.last_epoch is null"),
        (("scheduler", "last_epoch"), "3", 'scheduler.last_epoch is "3"'),
        (("scheduler", "get_lr"), 1.0, "scheduler.get_lr is unknown here"),
        (("scheduler", "milestones"), {"soon": 1}, "keys that are no numbers"),
    ],
)
def test_values_of_another_kind_are_refused(
    path: tuple[Any, ...], value: Any, said: str, tmp_path: Path
):
    """Also where the checksum is right. A method that is overwritten would fail at some step."""
    first, second = Trained(), Trained()
    first.step(3)
    file = first.save(tmp_path / "c") / "manifest.json"
    manifest = json.loads(file.read_text())
    *inner, last = path
    holder = manifest
    for key in inner:
        holder = holder[key]
    holder[last] = value
    file.write_text(json.dumps(sealed(manifest)))
    with pytest.raises(FileFormatError, match=said):
        second.load(tmp_path / "c")


def test_an_optimizer_of_ones_own_need_not_be_made_again(tmp_path: Path):
    """Its constructor may take what no checkpoint has; its options are compared by type alone, and
    what it adds to them when it steps comes back.
    """

    class Own(torch.optim.SGD):
        def __init__(self, parameters: Any, secret: object) -> None:
            super().__init__(parameters, lr=0.5 if secret else 0.25)

        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["steps"] = 1 + self.param_groups[0].get("steps", 0)
            super().step(closure)

    first, second = Trained(), Trained()
    for each in (first, second):
        each.optimizer = Own([each.weight], secret=each is first)
        each.scheduler = rates.MultiStepLR(each.optimizer, (2, 4))
    first.step(1)
    second.load(first.save(tmp_path / "c"))
    assert second.rate == 0.5
    assert second.optimizer.param_groups[0]["steps"] == 1


class Halved:
    """A factor on the rate, of which a scheduler saves the attributes."""

    def __init__(self) -> None:
        self.share = 0.5

    def __call__(self, step: int) -> float:
        return self.share**step


@pytest.mark.parametrize(
    "make",
    [
        lambda o: rates.CyclicLR(o, 0.1, [2 * group["lr"] for group in o.param_groups], 2),
        lambda o: rates.LambdaLR(o, [Halved() for _ in o.param_groups]),
        lambda o: rates.ChainedScheduler([rates.CyclicLR(o, 0.1, 0.4, 2), rates.ConstantLR(o)]),
        lambda o: rates.SequentialLR(
            o, [rates.ConstantLR(o, 0.5, 2), rates.CyclicLR(o, 0.1, 0.4, 2)], [2]
        ),
    ],
    ids=["cyclic", "functions", "chained", "in turn"],
)
def test_a_rank_with_fewer_groups_goes_on_with_its_own(tmp_path: Path, make: Any):
    """Of the scheduler that another rank saved, which has an entry for each of its groups. Rates
    are tensors, and the bounds of ``CyclicLR`` numbers.
    """
    first, second, other = Trained(), Trained(), torch.nn.Parameter(torch.ones(2))
    first.names[id(other)] = "other"

    def sgd(*groups: torch.nn.Parameter) -> Any:
        described = [
            {"params": [p], "lr": torch.tensor(0.5 if p is other else 0.25)} for p in groups
        ]
        return torch.optim.SGD(described, momentum=0.5)

    second.optimizer = sgd(second.weight)
    first.optimizer = sgd(other, first.weight)
    for trained in (first, second):
        trained.scheduler = make(trained.optimizer)
    first.step(3)
    second.load(first.save(tmp_path / "c"))
    for trained in (first, second):
        trained.step(2)
    of_first, of_second = first.optimizer.param_groups[1], second.optimizer.param_groups[0]
    assert [of_second[k] for k in ("lr", "momentum")] == [of_first[k] for k in ("lr", "momentum")]


def test_a_field_that_is_missing_is_refused(tmp_path: Path):
    """A scheduler without it would go on from its beginning."""
    first = Trained()
    file = first.save(tmp_path / "c") / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["scheduler"]["last_epoch"]
    file.write_text(json.dumps(sealed(manifest)))
    with pytest.raises(FileFormatError, match=r"scheduler.last_epoch is missing"):
        Trained().load(tmp_path / "c")


def test_a_tuple_may_lack_a_number(tmp_path: Path):
    """As the epsilons of Adafactor do by default."""
    first, second = Trained(), Trained()
    first.optimizer.param_groups[0]["eps"] = (None, 1e-3)
    second.optimizer.param_groups[0]["eps"] = (1e-8, 0.5)
    first.save(tmp_path / "c")
    second.load(tmp_path / "c")
    assert second.optimizer.param_groups[0]["eps"] == (None, 1e-3)


def test_an_option_that_json_lacks_is_refused_when_saving(tmp_path: Path):
    trained = Trained()
    trained.optimizer.param_groups[0]["hook"] = print
    with pytest.raises(TrainingError, match="as option 'hook'"):
        trained.save(tmp_path / "c")


@pytest.mark.parametrize("name", ["manifest.json", "rank-0.safetensors"])
def test_a_pipe_in_a_checkpoint_is_refused(tmp_path: Path, name: str):
    """Reading it would wait for ever."""
    folder = Trained().save(tmp_path / "c")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(FileFormatError, match=f"{name} (is missing|does not exist)"):
        Checkpoint(folder)
