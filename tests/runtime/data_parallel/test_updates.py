"""Updates without a barrier, per stage, and over several batches: against one process."""

import math
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from anabranch import launch
from anabranch.errors import NonFiniteError, TrainingError
from anabranch.graph.capture import capture
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import reference
from anabranch.verification import even_plan
from anabranch.workload import NamedParameters, Workload
from tests.runtime.host_waits import late_device
from tests.runtime.small import (
    Batch,
    batch,
    built,
    on_devices,
    plan,
    slices,
    train_alone,
    with_options,
    with_programs,
)
from tests.runtime.training import (
    LIMIT_S,
    Trained,
    adam,
    decay,
    equal,
    run,
    sgd,
    trained,
    trained_each,
)

__all__ = ["late_device"]  # a fixture

pytestmark = pytest.mark.dist

BATCHES = [batch(n, seed) for seed, n in enumerate((16, 16, 10, 16, 16))]

FOLDED = [(0,), (1,), (0,), (1,)]
"""Two stages per device."""


# Steps without a barrier


@pytest.mark.parametrize(
    ("name", "folded", "optimizer"),
    [("TwoBranch", True, sgd), ("Tied", True, adam), ("Detached", False, sgd)],
)
def test_steps_without_a_barrier_are_bitwise_those_of_one_process(
    name: str, folded: bool, optimizer: Callable[[NamedParameters], torch.optim.Optimizer]
) -> None:
    """Short batches, a schedule of the learning rate, two stages per device, and a copy of a
    weight that a later stage reads without a gradient.
    """
    model = with_programs(built(name), 10)
    chosen = on_devices(plan(model, 4), FOLDED) if folded else plan(model, 3)
    workload = with_options(model, optimizer=optimizer, scheduler=decay)
    ours = trained(model, chosen, workload, lambda p: list(p.steps(BATCHES)), exact=True)
    assert equal(ours, train_alone(workload, BATCHES))


@pytest.mark.parametrize(("name", "clip_norm"), [("TwoBranch", None), ("Tied", 0.05)])
def test_steps_without_a_barrier_are_bitwise_those_with_one(
    name: str, clip_norm: float | None
) -> None:
    """Replicas, tied parameters and stages that are updated one by one on their device; with a
    clipped norm ranks agree once per step, and it is that of all parameters.
    """
    model = with_programs(built(name), 1, 10, 16)
    chosen = on_devices(plan(model, 4, replicas=[2, 1, 2, 1]), [(0, 1), (2,), (1, 0), (2,)])
    workload = with_options(model, optimizer=adam, scheduler=decay, clip_norm=clip_norm)
    with_barrier, without = trained_each(
        model,
        chosen,
        workload,
        (lambda p: [p.step(b) for b in BATCHES], {}),
        (lambda p: list(p.steps(BATCHES)), {}),
    )
    assert equal(without, with_barrier)
    losses, state = train_alone(workload, BATCHES)
    assert without[0] == pytest.approx(losses, rel=1e-4)
    assert without[1].keys() == state.keys()


def test_nobody_waits_for_who_has_nothing_to_send() -> None:
    """Tower 1 is held up in its update of step 1 until tower 0 asks for step 2's batch, which it
    would never do if it waited.
    """
    model = built("TwoBranch")
    names = {op.name: op for op in model.captured.graph.ops}
    groups: list[list[str]] = [[], [], []]
    for name in names:
        groups[1 if "left" in name else 0 if "right" in name or "words" in name else 2].append(name)
    whole = plan(model, 3)
    stages = tuple(
        replace(stage, operators=tuple(group))
        for stage, group in zip(whole.stage_graph.stages, groups, strict=True)
    )
    graph = replace(whole.stage_graph, stages=stages, edges=((0, 2), (1, 2)))
    chosen = replace(whole, stage_graph=graph)
    asked = multiprocessing.get_context("fork").Event()

    def batches() -> Iterator[Batch]:
        for i, each in enumerate(BATCHES):
            if i == 2 and dist.get_rank() == 0:
                asked.set()
            yield each

    def work(pipeline: Pipeline) -> bool:
        waited = []
        finish = pipeline._updates.finish

        def held_up(*args: Any) -> None:
            if dist.get_rank() == 1 and pipeline.step_number == 1:
                waited.append(asked.wait(10.0))
            finish(*args)

        pipeline._updates.finish = held_up  # type: ignore[method-assign]
        list(pipeline.steps(batches()))
        return all(waited)

    assert run(model, chosen, work) == [True] * 3


def test_no_checkpoint_is_made_of_a_bad_step(tmp_path: Path) -> None:
    """The loss of the last step has not been asked for; saving looks at it."""
    model = built("TwoBranch")
    bad = batch(16)
    bad["x"][0] = float("nan")

    def work(pipeline: Pipeline) -> bool:
        for _ in pipeline.steps([BATCHES[0], BATCHES[1], bad, BATCHES[3]]):
            if pipeline.step_number == 3:
                with pytest.raises(NonFiniteError, match="step 2"):
                    pipeline.save(tmp_path / "bad")
                return True
        return False

    assert run(model, plan(model, 2), work) == [True] * 2
    assert not (tmp_path / "bad").exists()


def test_a_loop_may_be_left_and_steps_mixed(tmp_path: Path) -> None:
    """Leaving early, single steps, saving in the loop: training is the same."""
    model = built("TwoBranch")
    workload = with_options(model, optimizer=adam)

    def work(pipeline: Pipeline) -> list[float]:
        losses = [pipeline.step(BATCHES[0])]
        for loss in pipeline.steps(BATCHES[1:]):
            losses.append(loss)
            if pipeline.step_number == 3:
                pipeline.save(tmp_path / "saved")
                break
        losses += [pipeline.metrics["accuracy"] * 0]
        losses += [pipeline.step(each) for each in BATCHES[3:]]
        return losses

    losses, parameters = trained(model, plan(model, 2), workload, work, exact=True)
    expected, state = train_alone(workload, BATCHES)
    assert losses == [*expected[:2], 0.0, *expected[3:]]
    assert all(torch.equal(parameters[name], value) for name, value in state.items())

    def resumed() -> list[float]:
        pipeline = Pipeline.resume(
            tmp_path / "saved",
            workload,
            plan(model, 2),
            captured=model.captured,
            exact=True,
            check_gradients=False,
        )
        return list(pipeline.steps(BATCHES[3:]))

    assert launch.run(resumed, 2, timeout=LIMIT_S) == [expected[3:]] * 2


def test_metrics_and_epochs_go_with_the_steps() -> None:
    """Metrics belong to the loss that comes with them; batches that were trained on count."""
    model = built("TwoBranch")
    workload = with_options(
        model, data=lambda size, epoch: [batch(size, epoch + i) for i in (0, 5)]
    )

    def single(pipeline: Pipeline) -> list[float]:
        return [
            x
            for each in pipeline.batches(epochs=2)
            for x in (pipeline.step(each), pipeline.metrics["accuracy"])
        ]

    def many(pipeline: Pipeline) -> list[float]:
        batches = pipeline.batches(epochs=2)
        found = [
            x for loss in pipeline.steps(batches) for x in (loss, pipeline.metrics["accuracy"])
        ]
        assert (pipeline.epoch, pipeline.position, pipeline.step_number) == (2, 0, 4)
        return found

    one, other = trained_each(model, plan(model, 2), workload, (many, {}), (single, {}))
    assert one[0] == other[0]


# Several batches per update


def accumulate_alone(
    workload: Workload, batches: Sequence[Batch], groups: Sequence[int]
) -> Trained:
    """The plain loop on a copy of the module: gradients grow over the micro-batches of a group, are
    divided by the number of its batches, clipped, and used.
    """
    module = deepcopy(workload.module)
    parameters = dict(module.named_parameters())
    optimizer = workload.optimizer(list(parameters.items()))
    scheduler = workload.scheduler(optimizer) if workload.scheduler else None
    losses, rest = [], list(batches)
    for count in groups:
        optimizer.zero_grad()
        for _ in range(count):
            each = rest.pop(0)
            size, loss = len(each["x"]), 0.0
            for start, stop in slices(size, 4):
                out = module(**{key: value[start:stop] for key, value in each.items()})
                out = out["loss"] if isinstance(out, dict) else out
                out.backward(torch.full_like(out, (stop - start) / size))
                loss += out.item() * ((stop - start) / size)
            losses.append(loss)
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad.div_(count)
        if workload.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), workload.clip_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return losses, {name: p.detach() for name, p in parameters.items()}


def by_step(pipeline: Pipeline) -> list[float]:
    return [pipeline.step(each) for each in BATCHES]


def by_steps(pipeline: Pipeline) -> list[float]:
    return list(pipeline.steps(BATCHES))


def and_update(work: Callable[[Pipeline], list[float]]) -> Callable[[Pipeline], list[float]]:
    def both(pipeline: Pipeline) -> list[float]:
        losses, metrics = work(pipeline), pipeline.metrics
        pipeline.update()
        pipeline.update()  # nothing is left
        assert pipeline.metrics == metrics
        return losses

    return both


@pytest.mark.parametrize(("name", "work"), [("TwoBranch", by_step), ("Tied", by_steps)])
def test_accumulated_batches_are_bitwise_those_of_one_process(
    name: str, work: Callable[[Pipeline], list[float]]
) -> None:
    """Three batches, then the two that are left; the learning rate goes by updates."""
    model = built(name)
    workload = with_options(model, optimizer=sgd, scheduler=decay)
    ours = trained(model, plan(model, 2), workload, and_update(work), exact=True, accumulate=3)
    theirs = accumulate_alone(workload, BATCHES, [3, 2])
    assert equal(ours, theirs)


def test_replicas_accumulate_alike() -> None:
    """Summed over the holders with the last batch of a group only; tied parameters and a clipped
    norm.
    """
    model = built("Tied", torch.float64)
    batches = [{k: v.double() if k == "x" else v for k, v in each.items()} for each in BATCHES]
    workload = with_options(model, optimizer=sgd, scheduler=decay, clip_norm=0.05)

    def ours(pipeline: Pipeline) -> list[float]:
        return list(pipeline.steps(batches))

    chosen = plan(model, 2, replicas=[2, 1])
    losses, parameters = trained(model, chosen, workload, and_update(ours), accumulate=2)
    expected, state = accumulate_alone(workload, batches, [2, 2, 1])
    assert losses == pytest.approx(expected, rel=1e-12)
    for key, value in state.items():
        torch.testing.assert_close(parameters[key], value, rtol=1e-9, atol=1e-12)


def test_between_two_updates_nothing_is_saved(tmp_path: Path) -> None:
    """A checkpoint holds no half-made gradients; the message says when there can be one."""
    model = built("Chain")

    def work(pipeline: Pipeline) -> tuple[str, str]:
        pipeline.step(BATCHES[0])
        with pytest.raises(TrainingError) as caught:
            pipeline.save(tmp_path / "early")
        with pytest.raises(TrainingError) as other:
            pipeline.gradients(BATCHES[0])
        return str(caught.value), str(other.value)

    text, other = run(model, plan(model, 1), work, accumulate=3)[0]
    assert "1 of 3 batches" in text
    assert "wait for step 3, or call update()" in text
    assert "gradients of one batch" in other

    def whole(pipeline: Pipeline) -> None:
        for each in BATCHES[:3]:
            pipeline.step(each)
        pipeline.save(tmp_path / "whole")

    run(model, plan(model, 2), whole, accumulate=3)
    assert (tmp_path / "whole").is_dir()


def test_a_checkpoint_knows_how_many_batches_made_an_update(tmp_path: Path) -> None:
    """Whoever resumes with another number is told what goes on as before."""
    model = built("Chain")
    chosen, saved = plan(model, 1), tmp_path / "saved"

    def resumed(accumulate: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            options = {"captured": model.captured, "check_gradients": False}
            Pipeline.resume(saved, model.workload, chosen, accumulate=accumulate, **options)
        return [str(warning.message) for warning in caught]

    def work(pipeline: Pipeline) -> list[list[str]]:
        for each in BATCHES[:2]:
            pipeline.step(each)
        pipeline.save(saved)
        return [resumed(1), resumed(2)]

    (others, as_before), *_ = run(model, chosen, work, accumulate=2)
    assert as_before == []
    assert others == [
        "the checkpoint was trained with 2 batches to an update, this run has 1 batch; "
        "accumulate=2 (in a run file accumulate = 2) goes on as before"
    ]


def test_a_bad_loss_drops_the_batches_of_its_update() -> None:
    """What was accumulated with it is forgotten; the next group is as if it were the first."""
    model = built("TwoBranch")
    workload = with_options(model, optimizer=sgd)
    bad = batch(16)
    bad["x"][0] = float("nan")

    def work(pipeline: Pipeline) -> list[float]:
        pipeline.step(BATCHES[0])
        with pytest.raises(NonFiniteError, match="step 1"):
            pipeline.step(bad)
        return [pipeline.step(each) for each in BATCHES[:4]]

    ours = trained(model, plan(model, 2), workload, work, exact=True, accumulate=2)
    theirs = accumulate_alone(workload, BATCHES[:4], [2, 2])
    assert equal(ours, theirs)


def test_an_update_takes_at_least_one_batch() -> None:
    model = built("Chain")
    with pytest.raises(ValueError, match="accumulate is 0"):
        Pipeline(model.workload, plan(model, 1), captured=model.captured, accumulate=0)


def test_gradients_of_one_batch_update_nothing() -> None:
    """They equal those of one process, whatever ``accumulate`` is."""
    model = built("TwoBranch")
    expected = reference(model.module, BATCHES[0], slices(16, 4)).gradients

    def work(pipeline: Pipeline) -> bool:
        found = pipeline.gradients(BATCHES[0])[1]
        return all(torch.equal(value, expected[name]) for name, value in found.items())

    assert run(model, plan(model, 2), work, exact=True, accumulate=2) == [True] * 2


@pytest.mark.parametrize("is_late", [False, True])
def test_a_fused_optimizer_does_nothing_with_bad_gradients(
    is_late: bool, request: pytest.FixtureRequest
) -> None:
    """On a device that runs beside the host it has them, in ``steps``, before the host knows;
    parameters, moments, the count of updates and the learning rate are those of the step before.
    """
    if is_late:
        request.getfixturevalue("late_device")
    model = built("TwoBranch")
    workload = with_options(model, scheduler=halving)
    pipeline = Pipeline(workload, plan(model, 1), check_gradients=False)
    pipeline.step(BATCHES[0])
    assert pipeline.optimizer is not None
    assert pipeline.optimizer.defaults["fused"]
    bad = batch(16)
    bad["x"][0] = float("nan")

    def held() -> list[Tensor]:
        assert pipeline.optimizer is not None
        moments = [t for state in pipeline.optimizer.state.values() for t in state.values()]
        rates = [torch.tensor(group["lr"]) for group in pipeline.optimizer.param_groups]
        return [t.clone() for t in (*pipeline._state.parameters.values(), *moments, *rates)]

    before = held()
    with pytest.raises(NonFiniteError, match="step 1"):
        list(pipeline.steps([bad]))
    assert all(map(torch.equal, before, held()))
    list(pipeline.steps([BATCHES[1]]))
    assert not any(map(torch.equal, before, held()))


class Steep(nn.Module):
    """Gradients that are finite, though their norm is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * 1e36


def test_a_fused_optimizer_learns_from_large_gradients() -> None:
    """They look bad at first, from their norm."""
    torch.manual_seed(0)
    module, leaves = Steep(), {"x": torch.rand(4, 8)}
    tiny = partial(torch.optim.SGD, lr=1e-36, fused=True)
    workload = Workload(module, leaves, optimizer=tiny)
    captured = capture(module, leaves)
    chosen = even_plan(captured.graph, 1, 4)
    pipeline = Pipeline(workload, chosen, captured=captured, check_gradients=False)
    pipeline.step(leaves)
    before = module.linear.weight.detach().clone()
    (loss,) = pipeline.steps([leaves])
    gradient = module.linear.weight.grad
    assert gradient is not None
    assert math.isfinite(loss)
    assert gradient.norm().isinf()
    torch.testing.assert_close(module.linear.weight.detach(), before - 1e-36 * gradient)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
