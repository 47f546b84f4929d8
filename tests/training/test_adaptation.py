"""Runs that look at what devices take, and go over to another plan."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from anabranch import launch
from anabranch.cluster import Cluster
from anabranch.errors import TrainingError
from anabranch.plans.plan import Plan
from anabranch.record import Run
from anabranch.solve.replanning import Change, Measured
from anabranch.timeline import Timeline
from anabranch.training import Event, LookEvent, Looks, PlanEvent, train
from anabranch.training.adaptation import Adaptation
from tests.runtime.small import built, on_devices, plan, train_alone, with_options, with_programs
from tests.runtime.training import sgd
from tests.solve.test_stragglers import EXPECTED, timeline
from tests.training.running import SIZES, data, runs, steps_of


class Fixed:
    """A replanner that knows a better plan, and has no prediction."""

    cluster = Cluster.preset("summit:1x2")

    def __init__(self, better: Plan) -> None:
        self.better, self.asked = better, 0

    def expected(self, plan: Plan) -> Timeline:
        return Timeline((), plan.stage_graph.devices, "predicted", 1.0, {})

    def most_gain_s(self, plan: Plan, measured: Measured) -> float:
        return 1e9

    def change(self, plan: Plan, measured: Measured) -> Change:
        self.asked += 1
        return Change(self.better, 1.0, 0.5)


@pytest.mark.dist
def test_a_better_plan_is_gone_over_to_in_the_middle() -> None:
    """With another cut, and the stages on other ranks: losses are those of the plain loop, every
    batch is trained on once, and the run is one of the new plan. Checkpoints go on as well.
    """
    model = with_programs(built("TwoBranch"), 2)
    workload = with_options(model, data=data, optimizer=sgd)
    before = plan(model, 2)
    better = on_devices(plan(model, 2, microbatch_size=8), [(1,), (0,)])
    looks = Looks(every=3, replans=True, replanner=Fixed(better))
    others = {"looks": replace(looks, replanner=None)}
    (run, seen), (other, _) = runs(model, before, workload, others, steps=30, looks=looks)
    batches = [each for epoch in range(6) for each in data(16, epoch)]
    expected, _ = train_alone(workload, batches)
    assert run.losses == pytest.approx(expected, rel=1e-4)
    steps = steps_of(seen)
    assert [event.done for event in steps] == list(range(1, 31))
    assert [event.samples for event in steps] == SIZES * 6
    changes = [event for event in seen if isinstance(event, PlanEvent)]
    assert [event.step for event in changes][:1] == [5]
    assert any(isinstance(event, LookEvent) for event in seen)
    assert run.plan_changes[0].startswith(
        "step 5: a plan with a step of 500 ms in place of 1000 ms"
    )
    # Whether steps became shorter is the machine's to say.
    assert run.plan in (before, better)
    assert other.plan == run.plan


@pytest.mark.dist
def test_after_the_plan_before_has_come_back_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All ranks know that there is no other change, or some would wait for the others."""
    model = with_programs(built("TwoBranch"), 2)
    workload = with_options(model, data=data, optimizer=sgd)
    before, better = plan(model, 2), plan(model, 2, microbatch_size=8)
    decide = Adaptation._decide

    def longer(run: Adaptation, replanner: Fixed, measured: Measured) -> tuple[Plan | None, str]:
        (first, *_), changes = measured.timelines, len(run.changes)
        step = replace(first, step_s=1.0 + changes)
        return decide(run, replanner, replace(measured, timelines=(step,)))

    monkeypatch.setattr(Adaptation, "_decide", longer)
    looks = Looks(every=3, replans=True, replanner=Fixed(better))
    for run, _ in runs(model, before, workload, steps=40, looks=looks):
        assert [text.split(":")[0] for text in run.plan_changes] == ["step 5", "step 15"]
        assert "back to the plan before" in run.plan_changes[1]
        assert run.plan == before
        assert len(run.losses) == 40


@pytest.mark.dist
def test_a_better_plan_that_does_not_fit_is_left() -> None:
    """Its prediction exceeds the memory that there is: training goes on as it was, with a warning,
    and looks for no other.
    """
    model = with_programs(built("TwoBranch"), 2)
    workload = with_options(model, data=data, optimizer=sgd)
    before, better = plan(model, 2), plan(model, 2, microbatch_size=8)
    peaks = replace(better.predicted, device_peak_bytes=(2**60, 2**60))
    replanner = Fixed(replace(better, predicted=peaks))

    def rank() -> tuple[Run, int]:
        first = dist.get_rank() == 0
        refusal = "a better one is left: ranks 0-1 together would take"
        with pytest.warns(UserWarning, match=refusal) if first else nullcontext():
            run = train(
                workload,
                before,
                steps=20,
                captured=model.captured,
                check_gradients=False,
                looks=Looks(every=3, replans=True, replanner=replanner if first else None),
            )
        return run, replanner.asked

    (run, asked), (other, _) = launch.run(rank, 2, timeout=60.0)
    assert asked == 1
    assert run.plan == other.plan == before
    assert run.plan_changes == ()
    assert len(run.losses) == 20


@pytest.mark.dist
def test_a_callback_that_raises_at_a_look_ends_the_run() -> None:
    """On one rank too, where no other would stop."""
    model = with_programs(built("TwoBranch"), 2)
    workload = with_options(model, data=data, optimizer=sgd)

    def careless(event: Event) -> None:
        if isinstance(event, LookEvent):
            raise KeyError("colour")

    for num_ranks in (1, 2):
        chosen = plan(model, num_ranks)

        def rank(chosen: Plan = chosen) -> None:
            train(
                workload,
                chosen,
                steps=8,
                captured=model.captured,
                check_gradients=False,
                callbacks=[careless],
                looks=Looks(replanner=Fixed(chosen)),
            )

        with pytest.raises(TrainingError, match="careless raised at the look event of step 5"):
            launch.run(rank, num_ranks, timeout=60.0)


def test_looks_come_after_an_update() -> None:
    """Five steps of updates of three are no whole number, and neither are the three of a look."""
    looks = Looks(every=4)
    assert [looks.steps_until(done, 3) for done in (5, 12, 18)] == [4, 6, 6]
    assert looks.steps_until(5, 1) == 4
    assert Looks(every=None).steps_until(5, 3) is None


def test_where_ranks_share_cores_nobody_is_called_slow() -> None:
    """Device 1 waits for a core there; with a core for each it is the slow one."""
    slow = timeline(0.040, 0.082, 0.042)
    for cluster, names in (("summit:1x3", ("device 1",)), ("local:64", ())):
        run = adaptation(plan(built("Chain"), 2), 1, 2)
        run._loop.recorded = [slow]
        replanner = SimpleNamespace(cluster=Cluster.preset(cluster), expected=lambda _: EXPECTED)
        run._compare(replanner)
        assert tuple(text.split(" takes")[0] for text in run.slow) == names


def decided(adaptation: Adaptation, replanner: Fixed, step_s: float) -> tuple[Plan | None, str]:
    """After steps that took so long."""
    timeline = Timeline((), (0, 1), "measured", step_s, {})
    return adaptation._decide(replanner, Measured((timeline,), (1.0, 1.0)))


def adaptation(now: Plan, done: int, total: int | None) -> Adaptation:
    pipe = SimpleNamespace(plan=now)
    reporter = SimpleNamespace(losses=[0.0] * done, total=total)
    return Adaptation(
        SimpleNamespace(pipe=pipe, reporter=reporter), Looks(replans=True), start_s=10.0
    )


def test_the_plan_before_comes_back_if_steps_became_longer() -> None:
    """And there is no other change afterwards."""
    model = built("Chain")
    before, better = plan(model, 2), plan(model, 2, microbatch_size=8)
    run, replanner = adaptation(before, 100, 1000), Fixed(better)
    assert decided(run, replanner, 0.20)[0] is better
    chosen, why = decided(run, replanner, 0.25)
    assert chosen is before
    assert why == "back to the plan before, for a step took 250 ms, and 200 ms before"
    assert run._is_over


def test_a_change_has_to_repay_in_the_steps_that_are_left() -> None:
    """Half a second a step: twenty steps do not gain more than the ten seconds it costs. What was
    looked for in vain is looked for again only when steps take another time.
    """
    model = built("Chain")
    before, better = plan(model, 2), plan(model, 2, microbatch_size=8)
    run, replanner = adaptation(before, 80, 100), Fixed(better)
    assert decided(run, replanner, 0.2) == (None, "")
    assert decided(run, replanner, 0.201) == (None, "")
    assert replanner.asked == 1
    assert decided(run, replanner, 0.3) == (None, "")
    assert replanner.asked == 2
    assert decided(adaptation(before, 80, None), replanner, 0.2)[0] is better


def test_nothing_is_looked_for_where_there_is_nothing_to_gain() -> None:
    """Devices that are always busy."""
    model = built("Chain")
    replanner = Fixed(plan(model, 2))
    replanner.most_gain_s = lambda *_: 0.001
    assert decided(adaptation(plan(model, 2), 100, 1000), replanner, 0.2) == (None, "")
    assert replanner.asked == 0
