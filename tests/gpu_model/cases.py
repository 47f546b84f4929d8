"""Runs whose calls are recorded: every way in which ranks use their devices together."""

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from anabranch import launch
from anabranch.plans.plan import Plan
from anabranch.runtime.pipeline import Pipeline
from tests.gpu_model.recording import Event, Recorder, programs
from tests.gpu_model.replay import Programs
from tests.runtime.asynchronous.plans import async_plan, built_pipeline
from tests.runtime.small import Built, batch, built, num_ranks, on_devices, plan, with_programs
from tests.runtime.training import LIMIT_S

Work = Callable[[Recorder], None]


def _synchronous(
    model: Built, chosen: Plan, other: Plan, folder: str, recorder: Recorder, **options: Any
) -> None:
    """Steps of all kinds, a short batch, an evaluation, a checkpoint, another plan."""
    options = {"check_gradients": True, "timeout": 20.0} | options
    pipeline = Pipeline(model.workload, chosen, captured=model.captured, **options)
    recorder.begin("first step")
    pipeline.step(batch(8))
    recorder.begin("step")
    pipeline.step(batch(8, 1))
    pipeline.step(batch(6, 2))
    recorder.begin("steps")
    list(pipeline.steps(batch(8, seed) for seed in range(3)))
    recorder.begin("evaluate")
    pipeline.evaluate([batch(8), batch(6)])
    recorder.begin("save")
    for number, loss in enumerate(pipeline.steps(batch(8, seed) for seed in range(2))):
        assert loss > 0
        pipeline.save(Path(folder) / str(number), wait=False)
    pipeline.finish_saving()
    recorder.begin("change plan")
    pipeline.change_plan(other)
    recorder.begin("another plan")
    pipeline.step(batch(8, 3))


def _asynchronous(model: Built, chosen: Plan, recorder: Recorder, **options: Any) -> None:
    """Mini-batches without a flush, with one that is short."""
    pipeline = built_pipeline(model, chosen, **options)
    recorder.begin("asynchronous")
    list(pipeline.steps(batch(8, seed) for seed in range(6)))
    recorder.begin("asynchronous, a short one")
    list(pipeline.steps([batch(8), batch(5), batch(8)]))
    recorder.begin("asynchronous, evaluate")
    pipeline.step(batch(8))
    pipeline.evaluate([batch(8)])


def _recorded(work: Work) -> list[Event]:
    recorder = Recorder()
    recorder.install()
    work(recorder)
    return recorder.events


def record() -> Mapping[str, Programs]:
    """Return the programs of all ranks, by case and part of it."""
    two = with_programs(built("TwoBranch"), 2, 8, evaluation=True)
    with_programs(two, 1, 3, 5, 6)
    tied = with_programs(built("Tied"), 2, 8, evaluation=True)
    with_programs(tied, 1, 6)
    small = partial(plan, batch_size=8, microbatch_size=2)
    folder = tempfile.mkdtemp()

    def synchronous(model: Built, chosen: Plan, other: Plan, **options: Any) -> tuple[Plan, Work]:
        kept = tempfile.mkdtemp(dir=folder)
        return chosen, partial(_synchronous, model, chosen, other, kept, **options)

    def asynchronous(chosen: Plan, **options: Any) -> tuple[Plan, Work]:
        return chosen, partial(_asynchronous, two, chosen, **options)

    replicated = partial(small, tied, 2, replicas=[2, 1])
    cases = {
        "two stages": synchronous(two, small(two, 2), small(two, 2, schedule="gpipe")),
        "four stages": synchronous(two, small(two, 4), small(two, 2, replicas=[2, 2])),
        "tied and replicated": synchronous(tied, replicated(), small(tied, 3)),
        "shared state": synchronous(tied, replicated(), small(tied, 3), shard_optimizer=True),
        "stages on one device": synchronous(
            two, on_devices(small(two, 4), [(0,), (1,), (0,), (1,)]), small(two, 2)
        ),
        "asynchronous": asynchronous(async_plan(two, 3)),
        "in turn": asynchronous(async_plan(two, 2, replicas=[2, 1]), round_robin=True),
        "asynchronous replicas": asynchronous(async_plan(two, 3, replicas=[1, 2, 1])),
    }
    recorded: dict[str, Programs] = {}
    for name, (chosen, work) in cases.items():
        events = launch.run(_recorded, num_ranks(chosen), work, timeout=LIMIT_S)
        parts = [programs(of_rank) for of_rank in events]
        for part in parts[0]:
            recorded[f"{name}: {part}"] = [by_part[part] for by_part in parts]
    return recorded
