"""Optimizer state on one of the holders of a parameter, against state on all of them."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch.errors import TrainingError
from anabranch.plans.plan import Plan
from anabranch.runtime.data_parallel.gradients import Holders
from anabranch.runtime.data_parallel.shards import Shard
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import NamedParameters
from tests.runtime.data_parallel.test_updates import BATCHES
from tests.runtime.small import batch, built, on_devices, plan, with_options, with_programs
from tests.runtime.training import adam, begin_again, decay, equal, run, run_each, sgd, trained_each


def adagrad(parameters: NamedParameters) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


class Whole(torch.optim.Adam):
    """An optimizer of which nothing is known."""


def by_stage(parameters: NamedParameters) -> torch.optim.Optimizer:
    """Which the second stage has."""
    kind = Whole if all("first" not in name for name, _ in parameters) else torch.optim.Adam
    return kind(parameters, lr=1e-2)


def with_largest_norm(parameters: NamedParameters) -> torch.optim.Optimizer:
    """Each parameter has at most norm one after an update."""
    parameters = list(parameters)
    optimizer = adam(parameters)

    def limit(*_: object) -> None:
        with torch.no_grad():
            for _, parameter in parameters:
                parameter.div_(parameter.norm().clamp(min=1.0))

    optimizer.register_step_post_hook(limit)
    return optimizer


def test_the_largest_parameters_are_dealt_out_first() -> None:
    """Of 2 + 1 + 1 + 4 numbers rank 0 updates the 4; what one rank holds alone is not dealt out."""
    holders = Holders({"a": (0, 1), "b": (0, 1), "c": (0, 1), "d": (0, 1), "e": (2,)}, {}, {})
    sizes = {"a": 2, "b": 1, "c": 1, "d": 4, "e": 9}
    trainable = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    sharded = holders.sharded(trainable, cut=True)
    assert sharded.shards == {"d": (Shard(0),)} | dict.fromkeys("cba", (Shard(1),))
    assert [sharded.owner(name) for name in "abcde"] == [1, 1, 1, 0, 2]
    assert holders.owner("a") == 0


BOTH: list[dict[str, Any]] = [{"shard_optimizer": True}, {}]

FOLDED = [(0, 1), (2,), (1, 0), (2,)]
"""Two stages per device, which are otherwise updated one by one."""

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("Tied", {"num_stages": 2, "replicas": [2, 2]}, {"clip_norm": 0.05, "optimizer": sgd}),
    ("Unused", {"num_stages": 1, "replicas": [2]}, {"optimizer": adagrad}),
    ("TwoBranch", {"num_stages": 4, "replicas": [2, 1, 2, 1]}, {"devices": FOLDED}),
]


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:no gradient reaches")
@pytest.mark.parametrize(
    ("name", "shape", "options", "way"),
    [
        *((*case, "steps") for case in CASES),
        ("TwoBranch", {"num_stages": 2, "replicas": [2, 1]}, {}, "step"),
    ],
)
def test_training_is_bitwise_that_without(
    name: str, shape: dict[str, Any], options: dict[str, Any], way: str
) -> None:
    """Replicas, tied parameters, also cut ones, those without a gradient; short batches, a clipped
    norm, a learning rate that falls, two batches per update and one that is left.
    """
    model = with_programs(built(name), 1, 10, 16)
    options = {"optimizer": adam, "scheduler": decay} | options
    devices = options.pop("devices", None)
    workload, chosen = with_options(model, **options), plan(model, **shape)
    if devices:
        chosen = on_devices(chosen, devices)

    def work(pipeline: Pipeline) -> list[float]:
        one_by_one = [pipeline.step(each) for each in BATCHES] if way == "step" else []
        losses = one_by_one or list(pipeline.steps(BATCHES))
        pipeline.update()
        return losses

    ways = [(work, {"accumulate": 2} | way) for way in BOTH]
    assert equal(*trained_each(model, chosen, workload, *ways))


@pytest.mark.dist
def test_whoever_leaves_the_loop_has_all_parameters() -> None:
    """What is on its way to the next step's forwards arrives although there is no next step."""
    model = built("TwoBranch")
    workload = with_options(model, optimizer=adam)

    def work(pipeline: Pipeline) -> dict[str, Tensor]:
        for _ in pipeline.steps(BATCHES):
            break
        return {n: p.detach().clone() for n, p in pipeline._state.parameters.items()}

    chosen = plan(model, 2, replicas=[2, 1])
    ways = [(work, way) for way in BOTH]
    for mine, theirs in zip(*run_each(model, chosen, *ways, workload=workload), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


def state_bytes(pipeline: Pipeline) -> int:
    if pipeline.optimizer is None:
        return 0
    entries = pipeline.optimizer.state.values()
    tensors = [t for e in entries for t in e.values() if isinstance(t, Tensor) and t.ndim]
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.dist
def test_replicas_hold_the_state_once() -> None:
    """All together as much as one without; none has more than half and the largest parameter."""
    model = built("Chain")
    workload = with_options(model, optimizer=adam)
    chosen = plan(model, 1, replicas=[2])

    def work(pipeline: Pipeline) -> int:
        pipeline.step(BATCHES[0])
        return state_bytes(pipeline)

    ways = [(work, way) for way in BOTH]
    sharded, whole = run_each(model, chosen, *ways, workload=workload)
    assert sum(sharded) == whole[0] == whole[1]
    largest = max(p.numel() * p.element_size() for p in model.module.parameters())
    assert 0 < min(sharded) <= max(sharded) <= whole[0] / 2 + 2 * largest


@pytest.mark.dist
def test_a_parameter_is_cut_where_the_optimizer_takes_rows() -> None:
    """Of ten rows that the ranks of two stages hold each keeps the state of about five, whole
    vectors of the processor; an optimizer of one's own, or with a hook of one's own, has whole
    parameters. The recipe sees whole ones in any case. What is left of gradients are no others.
    """
    model = built("Tied")

    def recipe(optimizer: Any, parameters: NamedParameters) -> torch.optim.Optimizer:
        shapes = {name: parameter.shape for name, parameter in parameters}
        assert shapes.get("words.weight", (10, 8)) in [(10, 8), (1, 1)]
        made: torch.optim.Optimizer = optimizer(parameters)
        return made

    def work(pipeline: Pipeline) -> int:
        pipeline.step(BATCHES[0])
        words = pipeline._state.parameters["words.weight"]
        state = pipeline._state.optimizer.state if pipeline._state.optimizer else {}
        assert all(p.grad is None for p in state if p.untyped_storage() is words.untyped_storage())
        return sum(len(p) for p in state if p.untyped_storage() is words.untyped_storage())

    recipes = (adam, Whole, by_stage, with_largest_norm)
    workloads = [with_options(model, optimizer=partial(recipe, each)) for each in recipes]
    ways = [(work, {"workload": workload, "shard_optimizer": True}) for workload in workloads]
    found = run_each(model, plan(model, 2, replicas=[1, 1]), *ways)
    assert found == [[4, 6], [10, 0], [10, 0], [10, 0]]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "optimizer", "before"), [("TwoBranch", adam, False), ("Tied", adagrad, True)]
)
def test_checkpoints_know_nothing_of_it(
    name: str, optimizer: Any, before: bool, tmp_path: Path
) -> None:
    """What was saved with it goes on without, and the other way round, on other replicas too."""
    model = with_programs(built(name), 10, 16)
    workload = with_options(model, optimizer=optimizer, scheduler=decay)
    two, three = plan(model, 2, replicas=[2, 1]), plan(model, 1, replicas=[3])
    start = {name: value.clone() for name, value in model.module.state_dict().items()}

    def resumed(chosen: Plan, shard: bool) -> dict[str, Tensor]:
        begin_again(model.module, start)
        options = {"captured": model.captured, "check_gradients": False, "shard_optimizer": shard}
        pipeline = Pipeline.resume(tmp_path / "saved", workload, chosen, **options)
        for each in BATCHES[2:]:
            pipeline.step(each)
        return {n: p.detach() for n, p in pipeline._state.parameters.items()}

    def work(pipeline: Pipeline) -> list[dict[str, Tensor]]:
        for each in BATCHES[:2]:
            pipeline.step(each)
        pipeline.save(tmp_path / "saved")
        return [resumed(*way) for way in ((two, before), (two, not before), (three, not before))]

    ranks = run(model, two, work, workload=workload, shard_optimizer=before)
    for same, other, _ in ranks:
        assert all(torch.equal(same[key], other[key]) for key in same)
    for _, _, held in ranks:
        for key, value in ranks[0][0].items():
            torch.testing.assert_close(held[key], value, rtol=1e-3, atol=1e-5)


@pytest.mark.dist
def test_gradients_of_one_batch_are_everywhere() -> None:
    """They are for the caller, who may ask any holder."""
    model = with_programs(built("Tied"), 16)
    chosen = plan(model, 2, replicas=[2, 1])

    def work(pipeline: Pipeline) -> dict[str, Tensor]:
        return pipeline.gradients(batch(16))[1]

    ways = [(work, way) for way in BOTH]
    for mine, theirs in zip(*run_each(model, chosen, *ways), strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.dist
def test_a_step_of_the_optimizer_behind_gradients_is_refused() -> None:
    """It would update what this rank has the state of, and nobody would get that."""
    model = with_programs(built("Tied"), 16)

    def work(pipeline: Pipeline) -> float:
        loss, _ = pipeline.gradients(batch(16))
        if pipeline.optimizer is not None:
            with pytest.raises(TrainingError, match="would leave out parameters"):
                pipeline.optimizer.step()
        assert pipeline.step(batch(16)) == loss
        return pipeline.step(batch(16)) - loss

    changes = run(model, plan(model, 2, replicas=[2, 1]), work, shard_optimizer=True)
    assert changes[0] != 0


def test_exact_mode_is_refused() -> None:
    """One paragraph with the reason, before anything is made."""
    model = built("Chain")
    with pytest.raises(ValueError, match="tied parameters on all their holders"):
        Pipeline(
            model.workload,
            plan(model, 1),
            captured=model.captured,
            exact=True,
            shard_optimizer=True,
        )
