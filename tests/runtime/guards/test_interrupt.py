"""Training that ends early ends at one step on all ranks, and goes on from there."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from anabranch import launch
from anabranch.errors import TrainingError
from anabranch.plans.plan import Plan
from anabranch.record import Run
from anabranch.runtime.guards import interrupt
from anabranch.runtime.guards.interrupt import INTERRUPT, listening
from anabranch.runtime.guards.timeouts import TIMEOUTS
from anabranch.training import JsonLines, train, train_async
from tests.runtime.small import (
    Batch,
    Built,
    batch,
    built,
    num_ranks,
    plan,
    with_options,
    with_programs,
)
from tests.runtime.training import begin_again

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def run_on(
    model: Built,
    chosen: Plan,
    steps: int,
    *,
    heard_at: int | None = None,
    by: int = 1,
    is_async: bool = False,
    **options: object,
) -> Callable[[], Run]:
    """A run on a rank; one rank alone hears of the interrupt, when it is given a certain batch."""

    def data(batch_size: int, epoch: int) -> Iterator[Batch]:
        for i in range(30):
            if i == heard_at and dist.get_rank() == by:
                INTERRUPT.hear()
            yield batch(batch_size, i)

    model = with_programs(model, 16, evaluation=True)
    workload = with_options(model, data=data, eval_data=lambda size: iter([batch(size, 99)]))

    def rank() -> Run:
        INTERRUPT.share(memoryview(bytearray(8)).cast("q"))  # not shared with the others
        function = train_async if is_async else train
        return function(
            workload,
            chosen,
            steps=steps,
            captured=model.captured,
            check_gradients=False,
            **options,
        )

    return rank


def trained(model: Built, chosen: Plan, steps: int, **options: object) -> list[Run]:
    """Runs by rank; see ``run_on``."""
    return launch.run(run_on(model, chosen, steps, **options), num_ranks(chosen), timeout=60.0)


def interrupted(
    model: Built, chosen: Plan, cases: Sequence[dict[str, int]], **options: object
) -> list[tuple[Run, ...]]:
    """Runs of 30 steps by case and rank, which all ranks have ended with the same losses."""
    runs = [run_on(model, chosen, 30, **case, **options) for case in cases]
    start = {name: value.clone() for name, value in model.module.state_dict().items()}

    def rank() -> list[Run]:
        results = []
        for each in runs:
            begin_again(model.module, start)
            results.append(each())
        return results

    found = list(zip(*launch.run(rank, num_ranks(chosen), timeout=60.0), strict=True))
    assert all(run.interrupted for runs in found for run in runs)
    assert all(run.losses == runs[0].losses for runs in found for run in runs)
    return found


@pytest.mark.dist
def test_all_ranks_end_behind_one_step() -> None:
    """Whichever of them has heard."""
    cases = [
        (2, 1, 3, 0),  # all ranks agree on it: behind the step under way
        (7, 1, 9, 1),  # what is known one step late ends one step late
        (7, 4, 12, 1),  # and never within an update
        (1, 4, 4, 0),
        (29, 1, 30, 1),  # in the last step, which is no different
    ]
    model = built("TwoBranch")
    options = [{"heard_at": at, "accumulate": count, "by": by} for at, count, _, by in cases]
    found = interrupted(model, plan(model, 2), options)
    assert [len(run.losses) for run, _ in found] == [done for _, _, done, _ in cases]


@pytest.mark.dist
def test_without_a_flush_all_ranks_end_behind_one_mini_batch() -> None:
    """Losses are known as late as the pipeline is deep, and nobody ends before that."""
    model = built("TwoBranch")
    chosen = plan(model, 3, microbatch_size=16)
    cases = [{"by": by, "heard_at": at} for by, at in ((0, 0), (2, 11))]
    found = interrupted(model, chosen, cases, is_async=True, policy="stash")
    for (run, *_), case in zip(found, cases, strict=True):
        at = case["heard_at"]
        assert at < len(run.losses) <= at + 2 * chosen.stage_graph.depth


@pytest.mark.dist
def test_replicas_in_turn_end_behind_one_mini_batch() -> None:
    """Also where the replica that hears is not the one that computes."""
    model = built("TwoBranch")
    chosen = plan(model, 2, microbatch_size=16, replicas=[2, 1])
    options = {"is_async": True, "policy": "stash", "round_robin": True}
    cases = [{"by": by, "heard_at": 8} for by in (0, 2)]
    found = interrupted(model, chosen, cases, **options)
    assert all(8 < len(run.losses) < 20 for run, *_ in found)


@pytest.mark.dist
@pytest.mark.parametrize("is_async", [False, True])
def test_a_run_that_ended_early_goes_on(is_async: bool, tmp_path: Path) -> None:
    """No batch is left out and none comes twice, nor any evaluation, also one that is due behind
    the last step of the first run.
    """
    model = built("TwoBranch")
    chosen = plan(model, 2, microbatch_size=16)
    log = tmp_path / "log"
    options = {"evaluate_every": 3, "callbacks": [JsonLines(log)]}
    options |= {"policy": "stash"} if is_async else {}
    saved = tmp_path / "saved"
    first = trained(model, chosen, 20, heard_at=7, is_async=is_async, save=saved, **options)[0]
    done = len(first.losses)
    second = trained(model, chosen, 20 - done, is_async=is_async, resume=saved, **options)[0]
    assert not second.interrupted
    assert is_async or done == 9  # where an evaluation is due
    events = [json.loads(line) for line in log.read_text().splitlines()]
    evaluated = [event["step"] for event in events if event["event"] == "evaluation"]
    assert evaluated == [3, 6, 9, 12, 15, 18, 20]
    whole = trained(model, chosen, 20, is_async=is_async, **options)[0]
    assert first.losses == whole.losses[:done]
    if not is_async:  # where the drain makes a difference
        assert first.losses + second.losses == whole.losses


@pytest.mark.dist
@pytest.mark.parametrize("is_async", [False, True])
def test_after_an_interrupt_nothing_begins(is_async: bool) -> None:
    """A script may train twice; what it is told is not that all epochs are done."""
    model = built("TwoBranch")
    chosen = plan(model, 1, microbatch_size=16, replicas=[2])
    options = {"policy": "stash"} if is_async else {}
    workload = with_options(model, data=lambda size, epoch: iter([batch(size, 0)] * 30))

    def rank() -> str:
        INTERRUPT.hear()
        function = train_async if is_async else train
        again = partial(function, workload, chosen, captured=model.captured, steps=30, **options)
        assert again().interrupted
        with pytest.raises(TrainingError) as caught:
            again()
        return str(caught.value)

    for text in launch.run(rank, 2, timeout=60.0):
        assert "before it began" in text


@pytest.fixture
def _python_handles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of its own, also where the tests run in the background."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    INTERRUPT.share(memoryview(bytearray(8)).cast("q"))


@pytest.mark.usefixtures("_python_handles")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_heard_and_its_echo_ignored(number: int) -> None:
    """torchrun passes on what the terminal has sent already; afterwards all is as before."""
    before = signal.getsignal(number)
    with listening():
        assert not INTERRUPT.heard
        os.kill(os.getpid(), number)
        assert INTERRUPT.heard
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("_python_handles")
@pytest.mark.parametrize("number", SIGNALS)
def test_forked_processes_do_not_listen(number: int) -> None:
    """What the user's data forks, as a pool does, ends by a signal as ever."""
    context = multiprocessing.get_context("fork")
    runs = context.Event()

    def work() -> None:
        runs.set()
        for _ in range(600):  # one long sleep could begin just after the signal, and not see it
            time.sleep(0.1)

    with listening():
        child = context.Process(target=work)
        child.start()
        assert runs.wait(20.0)
        assert child.pid is not None
        os.kill(child.pid, number)
        child.join(20.0)
        assert child.exitcode in (-number, 1)  # of the signal, or of its KeyboardInterrupt
        assert not INTERRUPT.heard


@pytest.mark.usefixtures("_python_handles")
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_who_insists_ends_at_once(
    number: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second signal that is no echo."""
    monkeypatch.setattr(interrupt, "TIMEOUTS", replace(TIMEOUTS, echo_s=-1.0))
    with listening():
        os.kill(os.getpid(), number)
        with pytest.raises(error):
            os.kill(os.getpid(), number)
