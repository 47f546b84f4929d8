"""Runs that outlive their ranks: whatever dies, and when, nothing is other than without."""

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from anabranch import launch
from anabranch.checkpoint import saving
from anabranch.checkpoint.series import checkpoints
from anabranch.errors import AnabranchError, StageFailedError
from anabranch.plans.plan import Plan
from anabranch.record import Run
from anabranch.runtime.guards.timeouts import TIMEOUTS
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.ranks import local_rank
from anabranch.runtime.state.spare_copies import Moment, SpareCopies, Survival
from anabranch.training import Event, SaveEvery, train
from tests.runtime.small import (
    Batch,
    Built,
    batch,
    built,
    load_simulator,
    num_ranks,
    plan,
    with_options,
    with_programs,
)

pytestmark = pytest.mark.dist

STEPS, EVERY = 14, 3
SIZES = [16, 16, 16, 16, 10]


class Marks:
    """Integers that all processes of a test share: what happens once, happens once in all."""

    def __init__(self) -> None:
        self._ints = memoryview(mmap.mmap(-1, 8 * 64)).cast("q")

    def once(self, index: int) -> bool:
        """True for who asks first."""
        self._ints[index] += 1
        return self._ints[index] == 1

    def is_set(self, index: int) -> bool:
        return self._ints[index] > 0

    def kill_once(self, index: int) -> None:
        if self.once(index):
            os.kill(os.getpid(), signal.SIGKILL)


class Case:
    """A model in two stages with dropout, momentum, a schedule and updates of two batches each.

    Attributes:
        kills: (rank, step) of batches before which a rank is killed, once each.
        told: events that each process of the first rank was told of, in a file.
        begun: what the parent was told: ranks, moment.
    """

    def __init__(self, folder: Path, name: str = "Dropout", **options: Any) -> None:
        load_simulator()
        self.model: Built = with_programs(built(name), 2, 4, 10, evaluation=True)
        self.plan, self.folder, self.options = plan(self.model, 2), folder, options
        self.kills: tuple[tuple[int, int], ...] = ()
        self.marks, self.begun = Marks(), list[tuple[int, Moment | None]]()
        self.copies: SpareCopies | None = None
        self.fewer: Callable[[int], Plan] = lambda ranks: self.plan

    def data(self, batch_size: int, epoch: int) -> Iterator[Batch]:
        """Ranks are killed on the way."""
        for i, samples in enumerate(SIZES):
            for index, (rank, step) in enumerate(self.kills):
                if dist.get_rank() == rank and step == len(SIZES) * epoch + i:
                    self.marks.kill_once(index)
            yield batch(samples, 10 * epoch + i)

    def held_out(self, batch_size: int) -> list[Batch]:
        return [batch(8, 99)]

    def rank(self, plan: Plan) -> tuple[Run, int]:
        workload = with_options(
            self.model,
            data=self.data,
            eval_data=self.held_out,
            optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
            scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, gamma=0.5),
        )

        def tell(event: Event) -> None:
            with (self.folder / "told").open("a") as file:
                file.write(f"{event.name} {event.step}\n")

        options = {"check_gradients": False, "steps": STEPS} | self.options
        run = train(
            workload,
            plan,
            copies=self.copies,
            callbacks=[tell],
            captured=self.model.captured,
            **options,
        )
        return run, os.getpid()

    def go(self, *, replaces: bool = True, **options: Any) -> list[tuple[Run, int]]:
        """The results of all ranks of a run that survives."""
        torch.manual_seed(0)
        self.copies = copies = SpareCopies(num_ranks(self.plan), EVERY)

        def begin(ranks: int, failure: str, moment: Moment | None) -> tuple[Any, ...]:
            self.begun.append((ranks, moment))
            return (self.fewer(ranks),)

        survival = Survival(copies, begin, replaces=replaces)
        size = num_ranks(self.plan)
        options |= {"timeout": 60.0, "survival": survival}
        results = launch.run(self.rank, size, self.plan, **options)
        self.copies = None
        copies.close()
        return results

    def undisturbed(self) -> Run:
        """The run without kills and copies, in a folder of its own."""
        torch.manual_seed(0)
        return launch.run(self.rank, num_ranks(self.plan), self.plan, timeout=60.0)[0][0]

    def told(self) -> list[str]:
        return (self.folder / "told").read_text().splitlines()


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path, accumulate=2)


Whole = tuple[Run, list[str]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """What ``case`` gives if nobody disturbs it, and what it tells."""
    case = Case(tmp_path_factory.mktemp("whole"), accumulate=2)
    return case.undisturbed(), case.told()


def require_same(run: Run, other: Run) -> None:
    """Bit for bit, what is not a time."""
    assert run.losses == other.losses
    assert run.samples == other.samples
    assert run.metrics == other.metrics
    assert (run.first_step, len(run.losses)) == (0, STEPS)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_costs_a_few_steps(case: Case, whole: Whole, killed: int):
    """A new one takes its place, the other keeps its process; nothing else is other than without,
    and what was told before is not told again.
    """
    case.kills, rank, starts = ((killed, 9),), case.rank, case.folder / "starts"

    def noted(plan: Plan) -> Any:
        with starts.open("a") as file:
            file.write(f"{dist.get_rank()} {os.getpid()}\n")
        return rank(plan)

    case.rank = noted  # type: ignore[method-assign]
    (first, _), (second, _) = case.go()
    require_same(first, whole[0])
    require_same(second, whole[0])
    assert case.told() == whole[1]
    ((ranks, moment),) = case.begun
    assert ranks == 2
    assert moment is not None
    assert 9 - 2 * EVERY <= moment.step <= 9
    begun = starts.read_text().splitlines()
    assert len(begun) == 4
    assert [sum(line[0] == str(r) for line in {*begun}) for r in (killed, 1 - killed)] == [2, 1]


@pytest.mark.parametrize(
    "kills",
    [((0, 8), (1, 8)), ((1, 3), (1, 7), (0, 12)), ((0, 0), (1, STEPS - 1))],
    ids=["two at once", "again and again", "before the first step and in the last"],
)
def test_any_number_of_ranks_may_die(case: Case, whole: Whole, kills: tuple[tuple[int, int], ...]):
    case.kills = kills
    require_same(case.go()[0][0], whole[0])


def test_a_kill_at_any_other_place(case: Case, whole: Whole, monkeypatch: pytest.MonkeyPatch):
    """In the update, in a copy that is half written, when a new rank connects, when it reads its
    state, and in the last evaluation; each rank twice or less without a newer copy, since a device
    whose ranks die three times is left out.
    """
    step, keep, read = torch.optim.AdamW.step, SpareCopies.keep, SpareCopies.read
    connect, evaluate = local_rank._connect, Pipeline.evaluate
    updates = [0]

    def killed_step(self: Any, *args: Any) -> Any:
        updates[0] += 1
        if updates[0] == 2 and dist.get_rank() == 1:
            case.marks.kill_once(20)
        return step(self, *args)

    def killed_keep(self: SpareCopies, rank: int, *args: Any) -> Any:
        if rank == 0 and args[2].step >= 8:
            self._table[1] = 0
            case.marks.kill_once(21)
        return keep(self, rank, *args)

    def killed_connect(order: Any, store: Path) -> None:
        if order.attempt == 1 and order.rank == 0:
            case.marks.kill_once(22)
        connect(order, store)

    def killed_read(self: SpareCopies) -> Any:
        if self.attempt.value == 3 and dist.get_rank() == 1:
            case.marks.kill_once(23)
        return read(self)

    def killed_evaluate(self: Pipeline) -> Any:
        case.marks.kill_once(24)
        return evaluate(self)

    monkeypatch.setattr(torch.optim.AdamW, "step", killed_step)
    monkeypatch.setattr(SpareCopies, "keep", killed_keep)
    monkeypatch.setattr(SpareCopies, "read", killed_read)
    monkeypatch.setattr(local_rank, "_connect", killed_connect)
    monkeypatch.setattr(Pipeline, "evaluate", killed_evaluate)
    require_same(case.go()[0][0], whole[0])
    assert len(case.begun) == 5


def test_who_does_not_leave_the_step_is_ended(
    case: Case, whole: Whole, monkeypatch: pytest.MonkeyPatch
):
    """A rank hangs in its data when the other one dies: it is replaced as well."""
    monkeypatch.setattr(launch, "TIMEOUTS", replace(TIMEOUTS, regroup_s=0.5))
    data = case.data

    def hanging(batch_size: int, epoch: int) -> Iterator[Batch]:
        for i, read in enumerate(data(batch_size, epoch)):
            if dist.get_rank() == 0 and (epoch, i) == (1, 4) and case.marks.once(30):
                time.sleep(3600)
            yield read

    case.data, case.kills = hanging, ((1, 9),)  # type: ignore[method-assign]
    require_same(case.go()[0][0], whole[0])


def test_who_does_not_go_on_is_replaced(case: Case, whole: Whole):
    """It is stopped, as by a debugger, and named; the others have waited for it."""
    data = case.data

    def stopping(batch_size: int, epoch: int) -> Iterator[Batch]:
        for i, read in enumerate(data(batch_size, epoch)):
            if dist.get_rank() == 1 and (epoch, i) == (1, 4) and case.marks.once(31):
                os.kill(os.getpid(), signal.SIGSTOP)
            yield read

    case.data = stopping  # type: ignore[method-assign]
    require_same(case.go(stall_timeout=2.0)[0][0], whole[0])
    ((_, moment),) = case.begun
    assert moment is not None


def test_checkpoints_and_evaluations_are_those_of_a_run_without(tmp_path: Path):
    """Ranks die behind a checkpoint, which is not written again, and behind the last one."""
    made = {}
    for kills in ((), ((0, 8), (1, 11))):
        folder = tmp_path / str(len(kills))
        folder.mkdir()
        case = Case(folder, save=folder / "run", save_every=SaveEvery(2, keep=9), evaluate_every=4)
        case.kills = kills
        run = case.go()[0][0] if kills else case.undisturbed()
        told = [line for line in case.told() if "checkpoint" not in line]
        made[len(kills)] = run, [step for step, _ in checkpoints(folder / "run")], told
    require_same(made[2][0], made[0][0])
    assert made[2][1:] == made[0][1:]


def test_gradients_are_compared_although_a_rank_dies_at_first(case: Case):
    """A rank dies before the comparison, and behind it before a copy knows its result."""
    case.options["check_gradients"] = True
    whole = case.undisturbed()
    case.kills = ((1, 0), (1, 2))
    run = case.go()[0][0]
    require_same(run, whole)
    assert whole.gradients.startswith("right: ")
    assert run.gradients == whole.gradients
    assert len(case.begun) == 2


def test_evaluations_and_the_end_are_told_once(tmp_path: Path):
    """A rank dies when the evaluation of step 4 was told, and no later step, and at the end."""
    case = Case(tmp_path, evaluate_every=4)
    evaluations = case.undisturbed().evaluations
    expected = case.told()
    (tmp_path / "told").unlink()
    case.kills, rank = ((1, 4),), case.rank

    def killed(plan: Plan) -> Any:
        result = rank(plan)
        if dist.get_rank() == 1:
            case.marks.kill_once(40)
        return result

    case.rank = killed  # type: ignore[method-assign]
    assert case.go()[0][0].evaluations == evaluations
    assert case.told() == expected
    assert len(case.begun) == 2


def test_the_best_checkpoint_is_written_although_a_rank_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of step 4 there is a copy, and its checkpoint, of the best evaluation, is not finished."""
    best = SaveEvery(100, keep=9, best="loss")
    case = Case(tmp_path, save=tmp_path / "run", save_every=best, evaluate_every=4)
    case.kills, finish = ((0, 6),), saving.finish

    def late(*args: Any) -> None:
        if not case.marks.is_set(0):  # nobody has died yet
            time.sleep(3600)
        finish(*args)

    monkeypatch.setattr(saving, "finish", late)
    case.go()
    assert case.begun
    assert (tmp_path / "run" / "step-4").exists()


def test_with_a_device_fewer_training_goes_on_under_another_plan(case: Case):
    """Nobody takes the place of the dead rank: what follows is what would follow from a checkpoint
    of that step, resumed under the other plan.
    """
    case.options = {}
    other = plan(case.model, 1)
    case.fewer = lambda ranks: {1: other, 2: case.plan}[ranks]
    case.kills = ((0, 9),)
    results = case.go(replaces=False)
    assert len(results) == 1
    ((ranks, moment),) = case.begun
    assert ranks == 1
    assert moment is not None
    run = results[0][0]
    assert run.plan == other
    case.kills, folder = (), case.folder / "saved"
    case.options = {"save": folder, "steps": moment.step}
    before = case.undisturbed()
    case.plan, case.options = other, {"resume": folder, "steps": STEPS - moment.step}
    after = case.undisturbed()
    assert run.losses == before.losses + after.losses


def test_a_rank_that_dies_again_and_again_ends_the_run(case: Case):
    """Its device is left out after three times; without one the failure is the end."""
    case.kills = ()
    data = case.data

    def deadly(batch_size: int, epoch: int) -> Iterator[Batch]:
        for i, read in enumerate(data(batch_size, epoch)):
            if dist.get_rank() == 0 and (epoch, i) == (1, 2):
                os.kill(os.getpid(), signal.SIGKILL)
            yield read

    case.data, case.options = deadly, {}  # type: ignore[method-assign]
    case.fewer = lambda ranks: plan(case.model, ranks)
    with pytest.raises(StageFailedError, match="rank 0 was killed by signal 9"):
        case.go()
    assert [ranks for ranks, _ in case.begun] == [2, 2, 1, 1, 1]


def test_an_error_is_an_end_as_before(case: Case):
    """It would come again."""
    data = case.data

    def wrong(batch_size: int, epoch: int) -> Iterator[Batch]:
        yield from list(data(batch_size, epoch))[:2]
        if dist.get_rank() == 1:
            raise KeyError("no such file")
        yield from list(data(batch_size, epoch))[2:]

    case.data = wrong  # type: ignore[method-assign]
    with pytest.raises(AnabranchError, match="no such file"):
        case.go()
    assert case.begun == []
