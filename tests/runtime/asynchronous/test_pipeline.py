"""AsyncPipeline on local ranks: what surrounds the stream of mini-batches."""

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from anabranch import launch
from anabranch.errors import DataError, NonFiniteError, StageFailedError, TrainingError
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.asynchronous.requirements import asynchronous_stages
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.pipeline import Pipeline
from anabranch.schedule import SCHEDULES
from anabranch.weights import PipeOptim
from anabranch.workload import Batch
from benchmarks.replay import Replay
from tests.runtime import small
from tests.runtime.asynchronous.models import batches, cut, halving
from tests.runtime.asynchronous.plans import async_plan, built_pipeline
from tests.runtime.asynchronous.reference import train
from tests.runtime.asynchronous.running import (
    assert_near,
    assert_same,
    assert_trained,
    by_hand,
    fresh,
    held,
    on_ranks,
    pipeline,
    plan_of,
    start_of,
    trained,
    until_not_finite,
    whole,
)
from tests.runtime.small import batch, built, load_compiler, num_ranks, plan, with_options

pytestmark = pytest.mark.dist


# Losses and draining


def test_losses_come_in_order_as_late_as_the_pipeline_is_deep() -> None:
    """On every rank alike, so that all ranks are at the same mini-batch in the user's loop."""
    model = cut("chain 3")
    data = batches(6)
    expected = train(cut("chain 3").by_hand, "stash", data)

    def work() -> tuple[list[float], list[int]]:
        pipe = pipeline(model, plan_of(model))
        losses, given = [], []
        for loss in pipe.steps(data):
            losses.append(loss)
            given.append(pipe.step_number)
        return losses, given

    for losses, given in on_ranks(plan_of(model), work):
        assert losses == expected
        assert given == [4, 5, 6, 6, 6, 6]


@pytest.mark.parametrize("counts", [(5, 8), (8, 5)])
def test_ranks_with_unequal_data_end_at_once(counts: tuple[int, int]) -> None:
    """Either rank may be the one that has less, and would else wait for the other until the
    timeout.
    """
    model = cut("chain 2")

    def work() -> None:
        pipe = pipeline(model, plan_of(model))
        list(pipe.steps(islice(batches(8), counts[dist.get_rank()])))

    few = counts.index(5)
    with pytest.raises(DataError, match=rf"rank {few} has 5, and rank {1 - few} is at number"):
        on_ranks(plan_of(model), work)


def test_evaluation_in_the_middle_drains_and_training_fills_again() -> None:
    """The loop goes on and gets every loss once; the reference drains at the same place."""
    model = cut("chain 3", "adam", scheduler=halving)
    data, held_out = batches(9), batches(2, 3)
    model.captured.evaluation().programs.at(3)  # once, rather than by every rank

    def work() -> tuple[list[float], dict[str, float], dict[str, Tensor]]:
        pipe = pipeline(model, plan_of(model), "pipeoptim")
        losses, means = [], {}
        for loss in pipe.steps(data):
            losses.append(loss)
            if len(losses) == 2:  # three are in flight: 2, 3, 4
                means = pipe.evaluate(held_out)
                assert pipe._stream.weights.version == 5
        return losses, means, held(pipe)

    results = on_ranks(plan_of(model), work)
    twin = cut("chain 3", "adam", scheduler=halving)
    losses = train(twin.by_hand, "pipeoptim", data, fills=(0, 5))
    assert_trained([(rank[0], rank[2]) for rank in results], losses, twin)
    assert len({rank[1]["loss"] for rank in results}) == 1


def test_single_steps_are_synchronous_training() -> None:
    """A drain after each leaves nothing stale, so it is the synchronous pipeline bit for bit."""
    model = cut("chain 3", "adamw")
    data, start, chosen = batches(4), start_of(model), plan_of(model)

    def work() -> tuple[Any, Any]:
        pipe = pipeline(model, chosen, "vertical-sync")
        mine = [pipe.step(each) for each in data], held(pipe)
        fresh(model, start)
        flushed = Pipeline(model.workload, chosen, captured=model.captured, check_gradients=False)
        theirs = [flushed.step(each) for each in data]
        return mine, (theirs, {n: p.detach() for n, p in flushed._state.parameters.items()})

    for mine, theirs in on_ranks(chosen, work):
        assert mine[0] == theirs[0]
        assert_same(mine[1], theirs[1])


class Late(torch.optim.SGD):
    """Rank 1 takes its time, so that the others have left before it."""

    def step(self, closure: Any = None) -> Any:
        """See ``Optimizer``."""
        if dist.get_rank() == 1:
            time.sleep(0.1)
        return super().step(closure)


@pytest.mark.parametrize("ends", ["leaves", "raises"])
def test_a_rank_that_ends_leaves_the_others_its_messages(ends: str) -> None:
    """All ranks leave the loop and end; rank 1 is late, and still gets what others had sent."""
    model = cut("chain 3")
    workload = replace(model.workload, optimizer=partial(Late, lr=0.1))

    def stream() -> Iterator[Batch]:
        yield from batches(5)
        raise ValueError("the end of the stream")

    def work() -> list[float]:
        losses: list[float] = []
        pipe = pipeline(model, plan_of(model), workload=workload)
        if ends == "raises":
            with pytest.raises(ValueError, match="the end of the stream"):
                losses.extend(pipe.steps(stream()))
        else:
            losses.extend(islice(pipe.steps(stream()), 2))
        return losses

    first, *others = on_ranks(plan_of(model), work)
    assert len(first) == 2
    assert all(each == first for each in others)


def test_batches_of_the_workload_count_when_they_are_put_in() -> None:
    """A loop that is left has fetched no batch that it did not train on."""
    model = cut("chain 2")

    def data(size: int, epoch: int) -> Iterator[Batch]:
        yield from batches(3, size)

    workload = replace(model.workload, data=data)

    def work() -> list[tuple[int, int, int]]:
        pipe = pipeline(model, plan_of(model), workload=workload)
        seen = []
        for _ in pipe.steps(pipe.batches(epochs=2)):
            seen.append((pipe.epoch, pipe.position, pipe.step_number))
            if len(seen) == 3:
                break
        pipe.drain()
        return [*seen, (pipe.epoch, pipe.position, pipe.step_number)]

    for seen in on_ranks(plan_of(model), work):
        assert seen == [(0, 3, 3), (1, 1, 4), (1, 2, 5), (1, 2, 5)]


# Replicas


def test_replicas_split_each_minibatch() -> None:
    """Slices of unequal size count by their samples, an empty one not at all; sums in another
    order, so equal up to rounding, and copies stay equal.
    """
    sizes = [4, 3, 4, 1, 4, 4]
    every = [
        {name: value[:size] for name, value in each.items()}
        for each, size in zip(batches(6, 4, torch.float64), sizes, strict=True)
    ]
    model = cut("chain 3", "momentum", dtype=torch.float64)
    start, chosen = start_of(model), plan_of(model, replicas=[2, 1, 2])
    for samples in (1, 2, 3):
        model.captured.programs.at(samples)  # once, rather than by every rank
    policies = ("stash", "pipeoptim")

    def work() -> list[Any]:
        results = []
        for policy in policies:
            fresh(model, start)
            pipe = pipeline(model, chosen, policy)
            results.append((list(pipe.steps(every)), held(pipe)))
        return results

    results = on_ranks(chosen, work)
    for i, policy in enumerate(policies):
        twin = cut("chain 3", "momentum", dtype=torch.float64)
        losses = train(twin.by_hand, policy, every)
        assert_near([rank[i] for rank in results], losses, twin)


def test_replicas_with_several_microbatches() -> None:
    """2BW, where each replica has a slice of every micro-batch."""
    model = cut("chain 2", "adam", dtype=torch.float64)
    data, chosen = batches(5, 8, torch.float64), plan_of(model, 8, microbatches=2, replicas=[2, 1])
    twin = cut("chain 2", "adam", dtype=torch.float64)
    losses = train(twin.by_hand, "2bw", data, microbatches=2)
    assert_near(trained(model, chosen, data, "2bw"), losses, twin)


def test_sums_through_process_groups_begin_in_one_order_on_all_ranks() -> None:
    """As between hosts: ranks are at different mini-batches when they start a sum, so what all do
    together at other times (evaluation, the search for a number that is not finite) must wait for
    a drain.
    """
    model = cut("chain 3", dtype=torch.float64)
    chosen = plan_of(model, replicas=[2, 1, 1])
    data = batches(12, 4, torch.float64)
    data[9]["x"][0, 0] = float("inf")
    model.captured.evaluation().programs.at(4)  # once, rather than by every rank

    def work() -> tuple[list[float], str]:
        pipe = pipeline(model, chosen)
        pipe._mesh._near = None
        return until_not_finite(pipe, data, batches(1, 4, torch.float64))

    results = on_ranks(chosen, work)
    twin = cut("chain 3", dtype=torch.float64)
    expected = train(twin.by_hand, "stash", data[:9], fills=(0, 5))
    for losses, text in results:
        assert losses == pytest.approx(expected)
        assert text == results[0][1]
    assert "in mini-batch 9: stage 0 is the first" in results[0][1]


# What stages compute


def test_random_numbers_buffers_and_whole_values_are_those_of_one_process() -> None:
    """Units in flight draw from generators of their own, running means advance in their order, and
    what is made from parameters alone travels once per mini-batch.
    """
    models = [small.built(name) for name in ("Dropout", "Norm", "Shared")]
    data = [small.batch(8, seed) for seed in range(6)]

    def alone() -> list[tuple[list[float], dict[str, Tensor]]]:
        results = []
        for model in models:
            for parameter in model.module.parameters():
                parameter.grad = torch.ones_like(parameter)  # of what was done before
            replay = Replay(
                model.workload,
                [stage.operators for stage in async_plan(model, 2).stage_graph.stages],
                PipeOptim(),
                batch_size=8,
                captured=model.captured,
                seed=torch.initial_seed() % 2**62,
            )
            results.append((list(replay.train(data)), dict(model.module.state_dict())))
        return results

    def work() -> list[tuple[list[float], dict[str, Tensor]]]:
        results = []
        for model in models:
            pipe = built_pipeline(model, async_plan(model, 2), "pipeoptim")
            results.append((list(pipe.steps(data)), {**held(pipe), **pipe._state.buffers}))
        return results

    torch.manual_seed(11)
    results = on_ranks(async_plan(models[0], 2), work)
    for i, (losses, state) in enumerate(launch.run(alone, 1, timeout=60.0)[0]):
        for found, mine in (rank[i] for rank in results):
            assert found == losses
            assert_same(mine, {key: state[key] for key in mine}, models[i].module)


def test_recomputation_repeats_what_the_forward_read() -> None:
    """Where a backward reads what its forward read; where it reads what is current, other numbers
    come of it.
    """
    model = cut("chain 3")
    data, start = batches(6), start_of(model)
    plans = [plan_of(model, recompute=recompute) for recompute in (False, True)]

    def work() -> dict[str, list[list[float]]]:
        found: dict[str, list[list[float]]] = {}
        for policy in ("stash", "naive"):
            for chosen in plans:
                fresh(model, start)
                found.setdefault(policy, []).append(
                    list(pipeline(model, chosen, policy).steps(data))
                )
        return found

    found = on_ranks(plans[0], work)[0]
    assert found["stash"][0] == found["stash"][1]
    assert found["naive"][0] != found["naive"][1]


def test_compiled_and_half_precision_stages_read_the_same_weights() -> None:
    """A compiled stage takes its parameters anew in every pass."""
    load_compiler()
    model = cut("chain 2", "adam")
    data, start = batches(5), start_of(model)
    options = [{}, {"compile": "aot_eager"}, {"precision": "bf16"}]

    def work() -> list[list[float]]:
        losses = []
        for each in options:
            fresh(model, start)
            pipe = pipeline(model, plan_of(model), compute=ComputeOptions(**each))
            losses.append(list(pipe.steps(data)))
        return losses

    plain, compiled, half = on_ranks(plan_of(model), work)[0]
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert half != plain
    assert half == pytest.approx(plain, rel=0.05)


def test_clipping_is_by_the_norm_of_each_stage() -> None:
    """The reference clips before each stage's update, which is where a stage has its gradients."""
    model = cut("chain 2", "momentum")
    data = batches(6)
    common = replace(model.workload, clip_norm=0.01)  # in whose place it is
    chosen = plan_of(model)
    results = trained(model, chosen, data, workload=common, clip_stage_norm=0.05)
    twin = cut("chain 2", "momentum")
    for stage in twin.by_hand:
        assert stage.optimizer is not None
        stage.optimizer.register_step_pre_hook(
            lambda optimizer, *_: (
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05) and None
            )
        )
    assert_trained(results, train(twin.by_hand, "stash", data), twin)


def test_sparse_gradients_are_clipped_like_others() -> None:
    model = cut("two sources", "momentum")
    chosen, start = plan_of(model), start_of(model)

    def work() -> list[list[float]]:
        plain = list(pipeline(model, chosen, clip_stage_norm=0.05).steps(batches(6)))
        fresh(model, start)
        weight = model.workload.module.get_parameter("right.weight")
        weight.register_post_accumulate_grad_hook(_make_sparse)
        return [plain, list(pipeline(model, chosen, clip_stage_norm=0.05).steps(batches(6)))]

    plain, sparse = on_ranks(chosen, work)[0]
    assert sparse == pytest.approx(plain, rel=1e-6)


def _make_sparse(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = parameter.grad.to_sparse(1)


def test_metrics_are_those_of_the_loss() -> None:
    model = small.built("TwoBranch")
    chosen = async_plan(model, 2)
    data = [small.batch(8, seed) for seed in range(4)]

    def work() -> list[tuple[float, float]]:
        pipe = built_pipeline(model, chosen)
        return [(loss, pipe.metrics["accuracy"]) for loss in pipe.steps(data)]

    first, second = on_ranks(chosen, work)
    assert first == second
    with torch.no_grad():
        out = model.module(**data[0])
    assert first[0] == pytest.approx((out["loss"].item(), out["accuracy"].item()))


# Failures


def test_what_raises_in_a_stage_is_located() -> None:
    """By stage, micro-batch and mini-batch."""
    model = cut("chain 3")

    def work() -> None:
        pipe = pipeline(model, plan_of(model))
        if pipe.rank == 1:
            seen: list[int] = []

            def failing(gradient: Tensor) -> None:
                seen.append(1)
                if len(seen) == 5:
                    raise ZeroDivisionError("by hand")

            weight = pipe._state.parameters["parts.1.0.weight"]
            weight.register_hook(failing)  # type: ignore[no-untyped-call]
        list(pipe.steps(batches(9)))

    with pytest.raises(StageFailedError, match="by hand") as caught:
        on_ranks(plan_of(model), work)
    place = (
        "rank 1 failed in the backward of stage 1, micro-batch 0, mini-batch 4: ZeroDivisionError"
    )
    assert str(caught.value).startswith(place)
    operators = ", ".join(plan_of(model).stage_graph.stages[1].operators)
    assert f"by hand; stage 1 computes {operators}" in str(caught.value)


def test_numbers_that_are_not_finite_are_named_on_every_rank() -> None:
    """Stage and mini-batch where it began, and the sample, which is all that helps; weights stay
    finite, but belong to no version any more. The losses before it are told, also at the end.
    """
    model = cut("chain 3")
    start, chosen = start_of(model), plan_of(model)

    def trained_with(bad: int) -> tuple[str, str, bool, int]:
        fresh(model, start)
        data = batches(9)
        data[bad]["x"][2, 1] = float("nan")
        pipe = pipeline(model, chosen)
        losses: list[float] = []
        with pytest.raises(NonFiniteError) as caught:
            losses.extend(pipe.steps(data))
        with pytest.raises(TrainingError, match="resume from a checkpoint") as refused:
            pipe.save("nowhere")
        finite = all(bool(p.isfinite().all()) for p in held(pipe).values())
        return str(caught.value), str(refused.value), finite, len(losses)

    cases = (4, 8)
    first, *others = on_ranks(chosen, lambda: [trained_with(bad) for bad in cases])
    assert others == [first, first]
    for bad, (text, _, is_finite, count) in zip(cases, first, strict=True):
        assert f"is not finite in mini-batch {bad}: stage 0, micro-batch 0 is the first" in text
        assert "x in the batch is not finite itself, first in sample 2" in text
        assert text.endswith(f"fix the data: mini-batch {bad}, sample 2")
        assert "learning rate" not in text
        assert (is_finite, count) == (True, bad)


# The policy and the counts in flight


def test_in_flight_counts_of_a_synchronous_plan() -> None:
    """Its own are cut to the micro-batches of one step; the asynchronous order needs the whole."""
    model = small.built("Chain")
    for schedule, counts in (("1f1b", [4, 3, 2, 1]), ("1f1b-deep", [7, 5, 3, 1])):
        chosen = small.plan(model, 4, batch_size=8, microbatch_size=8, schedule=schedule)
        assert [stage.in_flight for stage in chosen.stage_graph.stages] == [1, 1, 1, 1]
        graph = asynchronous_stages(chosen)
        assert [stage.in_flight for stage in graph.stages] == counts
        assert graph.batch_size == 8
        many = replace(chosen.stage_graph, batch_size=8 * 100)
        warm = SCHEDULES[schedule]().warm_up(many)
        assert [stage.in_flight for stage in warm.stages] == counts


def test_a_deep_warm_up_is_as_stale_as_it_is_deep() -> None:
    """The lag is what the stage holds, not its distance to the sink."""
    model = cut("chain 3")
    chosen = plan_of(model, schedule="1f1b-deep")

    def work() -> tuple[int, ...]:
        pipe = pipeline(model, chosen, "pipeoptim")
        list(pipe.steps(batches(8)))
        return pipe.version_difference

    assert on_ranks(chosen, work)[0] == (4, 2, 0)


def test_a_bad_batch_in_the_stream_is_the_same_error_on_all_ranks() -> None:
    """All leave behind the same mini-batch, and part from each other as those do who leave a loop:
    one that is late needs the messages of those that have left.
    """
    model = built("TwoBranch")
    chosen = plan(model, 3, microbatch_size=16)
    workload, parted = with_options(model, optimizer=partial(Late, lr=0.1)), []

    def rank() -> tuple[list[float], str, list[int]]:
        pipe = AsyncPipeline(
            workload, chosen, policy="stash", captured=model.captured, check_gradients=False
        )
        leave = pipe._leave

        def noted() -> None:
            parted.append(pipe.step_number)
            leave()

        pipe._leave = noted  # type: ignore[method-assign]
        good = [batch(16, i) for i in range(6)]
        losses: list[float] = []
        with pytest.raises(DataError) as caught:
            losses.extend(pipe.steps([*good, batch(16) | {"x": torch.zeros(16, 9)}]))
        return losses, str(caught.value), parted

    first, *others = launch.run(rank, num_ranks(chosen), timeout=60.0)
    assert "x is [samples, 9]" in first[1]
    assert first[2] == [6]
    assert others == [first, first]


def test_resumed_training_is_as_if_it_had_drained(tmp_path: Path) -> None:
    """Bit for bit, with a prediction by the momentum, by the moments, and by the last update, and
    with a basis, whose tensors have shapes of their own.
    """
    cases = [(name, "pipeoptim") for name in ("momentum", "adam", "rmsprop")]
    cases += [("adam", "basis-rotation")]
    model = cut("chain 3")
    workloads = [cut("chain 3", name, scheduler=halving).workload for name, _ in cases]
    data, start, chosen = batches(9), start_of(model), plan_of(model)

    def work() -> list[list[float]]:
        results = []
        for i, (_, policy) in enumerate(cases):
            fresh(model, start)
            pipe, losses = pipeline(model, chosen, policy, workload=workloads[i]), []
            for loss in pipe.steps(data[:4]):
                losses.append(loss)
                if len(losses) == 1:  # in the middle of the loop
                    pipe.save(tmp_path / str(i))
            assert pipe.step_number == 4
            results.append(losses)
        return results

    def again() -> list[tuple[list[float], dict[str, Tensor]]]:
        results = []
        for i, (_, policy) in enumerate(cases):
            fresh(model, start)
            options = {"captured": model.captured, "policy": policy, "timeout": 20.0}
            pipe = AsyncPipeline.resume(tmp_path / str(i), workloads[i], chosen, **options)
            assert pipe.step_number == 4
            results.append((list(pipe.steps(data[4:])), held(pipe)))
        return results

    before, after = on_ranks(chosen, work)[0], on_ranks(chosen, again)
    for i, (optimizer, policy) in enumerate(cases):
        twin = cut("chain 3", optimizer, scheduler=halving)
        losses = train(twin.by_hand, policy, data, fills=(0, 4))
        assert before[i] + after[0][i][0] == losses
        assert_same(whole([rank[i][1] for rank in after]), by_hand(twin), (optimizer, policy))


def test_checkpoints_pass_between_the_modes(tmp_path: Path) -> None:
    """Synchronous to asynchronous and back, under other stages; one leaves what the other needs."""
    model = cut("chain 3", "nadam")
    data, start, chosen = batches(4), start_of(model), plan_of(model)
    options = {"captured": model.captured, "check_gradients": False, "timeout": 20.0}

    def work() -> tuple[list[float], int]:
        flushed = Pipeline(model.workload, chosen, **options)
        flushed.step(data[0])
        flushed.save(tmp_path / "sync")
        fresh(model, start)
        pipe = AsyncPipeline.resume(
            tmp_path / "sync", model.workload, chosen, policy="pipeoptim", **options
        )
        losses = list(pipe.steps(data[1:3]))
        pipe.save(tmp_path / "async")
        fresh(model, start)
        flushed = Pipeline.resume(tmp_path / "async", model.workload, chosen, **options)
        number = flushed.step_number
        return [*losses, flushed.step(data[3])], number

    (losses, number), *_ = on_ranks(chosen, work)
    assert number == 3
    twin = cut("chain 3", "nadam")
    # One flushed step, then a fill without a prediction: nothing was known of the last update.
    first = train(twin.by_hand, "stash", data[:1])
    assert len(first) == 1
    for stage in twin.by_hand:
        stage.last = None
    # The second of two mini-batches reads in its forward what was there at the fill.
    expected = train(twin.by_hand, "naive", data[1:3])
    assert losses[0] == expected[0]
    assert losses[1] == expected[1]
    assert losses[2] == train(twin.by_hand, "stash", data[3:])[0]
