"""Replicas that take mini-batches in turn, on local ranks: bit for bit the plain loop of rounds."""

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from anabranch.errors import InvalidPlanError, NonFiniteError, StageFailedError
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.weights import PredictStash
from tests.runtime.asynchronous.models import batches, cut, halving
from tests.runtime.asynchronous.reference import train
from tests.runtime.asynchronous.reference_rounds import in_flight, train_in_turns
from tests.runtime.asynchronous.running import (
    assert_same,
    assert_trained,
    by_hand,
    fresh,
    held,
    in_turn,
    on_ranks,
    pipeline,
    plan_of,
    refusals,
    start_of,
    trained,
    until_not_finite,
    whole,
)
from tests.runtime.asynchronous.test_stream import logged

pytestmark = pytest.mark.dist

IN_TURN = {"round_robin": True}


# Order


def orders(name: str, replicas: Sequence[int], count: int) -> list[str]:
    """Per rank its passes; ``*`` is an update, ``-`` one without a mini-batch of its own."""
    model = cut(name)
    chosen = plan_of(model, replicas=replicas)

    def work() -> str:
        pipe = in_turn(model, chosen)
        log = logged(pipe)
        list(pipe.steps(batches(count)))
        assert not pipe._stream._count
        return " ".join(log).replace(".0", "")

    return on_ranks(chosen, work)


def test_order_of_two_replicas_before_one() -> None:
    """NOAM is 2; the last round has one mini-batch."""
    assert orders("chain 2", (2, 1), 7) == [
        "F0 F2 B0* F4 B2* F6 B4* B6*",
        "F1 F3 B1* F5 B3* B5* -*",
        "F0 B0* F1 B1* F2 B2* F3 B3* F4 B4* F5 B5* F6 B6*",
    ]


def test_order_of_one_before_two_replicas() -> None:
    """NOAM is 3: two for the replicas after it, and one of its own."""
    assert orders("chain 2", (1, 2), 5) == [
        "F0 F1 F2 B0* F3 B1* F4 B2* B3* B4*",
        "F0 B0* F2 B2* F4 B4*",
        "F1 B1* F3 B3* -*",
    ]


# Weights


SHAPES = [
    ("chain 2", (2, 2)),
    ("chain 3", (2, 1, 1)),
    ("two sources", (1, 1, 2, 1)),
]
"""Models and replicas, on five ranks at most."""


def cases(replicas: tuple[int, ...]) -> list[tuple[str, str]]:
    """Policies with optimizers: all on one shape, elsewhere one that keeps versions and one that
    predicts them. ``test_stream`` has every policy with every optimizer.
    """
    few = [("stash", "adamw"), ("pipeoptim", "adam")]
    if replicas != (2, 2):
        return few
    others = [("naive", "adam"), ("spectrain", "momentum"), ("predict-stash", "adamw")]
    return [*few, *others, ("pipeoptim", "momentum")]


@pytest.mark.parametrize(
    ("name", "replicas", "dtype"),
    [*((*shape, torch.float32) for shape in SHAPES), ("chain 2", (2, 3), torch.float64)],
)
def test_training_is_bitwise_the_reference(
    name: str, replicas: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Losses of three fills and all weights after them: one of a single mini-batch, one of full
    rounds, one that ends within a round; with a schedule of the learning rate, which makes a step
    for every mini-batch.
    """
    model = cut(name, dtype=dtype)
    data, start = batches(14, 4, dtype), start_of(model)
    chosen = plan_of(model, replicas=replicas)
    wanted = {case: cut(name, case[1], dtype=dtype, scheduler=halving) for case in cases(replicas)}

    def work() -> list[Any]:
        results = []
        for (policy, _), each in wanted.items():
            fresh(model, start)
            pipe = in_turn(model, chosen, policy, workload=each.workload)
            losses = [pipe.step(data[0]), *pipe.steps(data[1:7]), *pipe.steps(data[7:])]
            results.append((losses, held(pipe), pipe.version_difference))
        return results

    results = on_ranks(chosen, work)
    for i, ((policy, optimizer), each) in enumerate(wanted.items()):
        expected = train_in_turns(each.by_hand, replicas, policy, data, fills=(0, 1, 7))
        mine = [rank[i] for rank in results]
        assert all(losses == expected for losses, _, _ in mine), (policy, optimizer)
        parameters = whole([parameters for _, parameters, _ in mine])
        assert_same(parameters, by_hand(each), (policy, optimizer))
        behind = tuple(count - 1 for count in in_flight(each.by_hand, replicas))
        assert all(difference == behind for _, _, difference in mine)


def test_the_reference_without_replicas_is_the_other_one() -> None:
    """Rounds of one mini-batch: both oracles say the same, and so does the pipeline. There are no
    turns to take, so policies that know no rounds are as good as others.
    """
    data = batches(7)
    twin, other = cut("two sources", "adam"), cut("two sources", "adam")
    first = train(twin.by_hand, "predict-stash", data, fills=(0, 3))
    ones = (1, 1, 1, 1)
    assert train_in_turns(other.by_hand, ones, "predict-stash", data, fills=(0, 3)) == first
    assert_same(by_hand(other), by_hand(twin))
    model = cut("two sources", "adam")
    start, chosen = start_of(model), plan_of(model)

    def losses(policy: str) -> list[float]:
        fresh(model, start)
        pipe = in_turn(model, chosen, policy)
        return [*pipe.steps(data[:3]), *pipe.steps(data[3:])]

    twin = cut("two sources", "adam")
    second = train(twin.by_hand, "vertical-sync", data, fills=(0, 3))
    found = on_ranks(chosen, lambda: [losses("predict-stash"), losses("vertical-sync")])
    assert found == [[first, second]] * 4


def test_a_short_minibatch_counts_like_any_other() -> None:
    """A round's mean is over its mini-batches, whatever their samples."""
    model, data = cut("chain 2", "adam"), batches(6)
    data[3], data[5] = ({k: v[:2] for k, v in data[i].items()} for i in (3, 5))
    chosen = plan_of(model, replicas=(2, 1))
    twin = cut("chain 2", "adam")
    losses = train_in_turns(twin.by_hand, (2, 1), "stash", data)
    assert_trained(trained(model, chosen, data, round_robin=True), losses, twin)


def test_clipping_is_of_the_mean_of_a_round() -> None:
    """Every replica clips the same gradients, so that copies stay equal."""
    model, data = cut("chain 2", "momentum"), batches(7)
    chosen = plan_of(model, replicas=(2, 1))
    results = trained(model, chosen, data, round_robin=True, clip_stage_norm=0.05)
    clipped = whole([rank[1] for rank in results])
    twin = cut("chain 2", "momentum")
    for stage in twin.by_hand:
        assert stage.optimizer is not None
        stage.optimizer.register_step_pre_hook(_clip(stage.weights))
    train_in_turns(twin.by_hand, (2, 1), "stash", data)
    for name, tensor in by_hand(twin).items():
        torch.testing.assert_close(clipped[name], tensor)


def _clip(parameters: Sequence[Tensor]) -> Any:
    def before_step(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 0.05)

    return before_step


# The user's loop


def test_losses_come_in_order_on_every_rank() -> None:
    """As late as the last replica of a round learns: (2 + 1) x 2 - 1 mini-batches after. Gradients
    are compared with one process first.
    """
    model, data = cut("chain 2"), batches(8)
    chosen = plan_of(model, replicas=(2, 1))
    expected = train_in_turns(cut("chain 2").by_hand, (2, 1), "stash", data)

    def work() -> tuple[list[float], list[int]]:
        pipe = in_turn(model, chosen, check_gradients=True)
        seen = [(loss, pipe.step_number) for loss in pipe.steps(data)]
        return [loss for loss, _ in seen], [number for _, number in seen]

    for losses, given in on_ranks(chosen, work):
        assert losses == expected
        assert given == [6, 7, 8, 8, 8, 8, 8, 8]


def test_evaluation_in_the_middle_ends_a_round() -> None:
    """All replicas are at one version then, and the next mini-batch is the first one's."""
    model, data, held_out = cut("chain 3", "adam"), batches(12), batches(2, 3)
    chosen = plan_of(model, replicas=(2, 1, 1))
    model.captured.evaluation().programs.at(3)  # once, rather than by every rank

    def work() -> Any:
        pipe = in_turn(model, chosen, "pipeoptim")
        losses, means, version = [], {}, 0
        for loss in pipe.steps(data):
            losses.append(loss)
            if len(losses) == 2:  # seven were put in
                means = pipe.evaluate(held_out)
                version = pipe._stream.weights.version
        return losses, held(pipe), means, version, pipe._stream.weights.version

    results = on_ranks(chosen, work)
    twin = cut("chain 3", "adam")
    losses = train_in_turns(twin.by_hand, (2, 1, 1), "pipeoptim", data, fills=(0, 7))
    assert_trained([rank[:2] for rank in results], losses, twin)
    assert len({rank[2]["loss"] for rank in results}) == 1
    assert [rank[3] for rank in results] == [4, 4, 7, 7]  # 3 rounds and a half
    assert [rank[4] for rank in results] == [7, 7, 12, 12]  # and 2 and a half


def test_a_loop_that_is_left_goes_on_within_its_round() -> None:
    """Without a drain; the next loop's first mini-batch is the second replica's."""
    model, data = cut("chain 2"), batches(12)
    chosen = plan_of(model, replicas=(2, 1))

    def work() -> tuple[list[float], dict[str, Tensor]]:
        pipe = in_turn(model, chosen)
        for number, _ in enumerate(pipe.steps(data[:9])):
            if number == 1:
                break
        assert pipe.step_number == 7
        return list(pipe.steps(data[7:])), held(pipe)

    results = on_ranks(chosen, work)
    twin = cut("chain 2")
    losses = train_in_turns(twin.by_hand, (2, 1), "stash", data)
    assert_trained(results, losses[7:], twin)


def test_resumed_training_is_as_if_it_had_drained(tmp_path: Path) -> None:
    """In the middle of a round, with a rate that rises over updates, which are saved: three rounds
    and a half of stage 0 are four.
    """
    model = cut("chain 3", "rmsprop", scheduler=halving)
    data, chosen, policy = batches(12), plan_of(model, replicas=(2, 1, 1)), PredictStash(ramp=9)
    start = start_of(model)

    def work() -> Any:
        pipe = in_turn(model, chosen, policy)
        list(pipe.steps(data[:7]))
        pipe.save(tmp_path / "seven")
        version = pipe._stream.weights.version
        return list(pipe.steps(data[7:])), held(pipe), version

    def again() -> Any:
        fresh(model, start)
        options = {"captured": model.captured, "policy": policy, "timeout": 20.0}
        pipe = AsyncPipeline.resume(
            tmp_path / "seven", model.workload, chosen, round_robin=True, **options
        )
        assert pipe.step_number == 7
        version = pipe._stream.weights.version
        return list(pipe.steps(data[7:])), held(pipe), version

    before, after = on_ranks(chosen, work), on_ranks(chosen, again)
    assert [rank[2] for rank in before] == [4, 4, 7, 7]
    for mine, theirs in zip(before, after, strict=True):
        assert mine[0] == theirs[0]
        assert_same(mine[1], theirs[1])
        assert mine[2] == theirs[2]


def test_running_means_are_of_the_first_replica() -> None:
    """Each replica has those of its own mini-batches until an evaluation gives all the first's."""
    model, data = cut("statistics"), batches(6)
    chosen = plan_of(model, replicas=(2, 1, 1))
    model.captured.evaluation().programs.at(4)  # once, rather than by every rank

    def work() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        pipe = in_turn(model, chosen)
        list(pipe.steps(data))
        before = {name: buffer.clone() for name, buffer in pipe._state.buffers.items()}
        pipe.evaluate(batches(1))
        return before, {name: buffer.clone() for name, buffer in pipe._state.buffers.items()}

    first, second, third, _ = on_ranks(chosen, work)
    mean, seen = "parts.0.2.running_mean", "parts.0.2.num_batches_tracked"
    assert int(first[0][seen]) == int(second[0][seen]) == 3
    assert int(third[0]["parts.1.2.num_batches_tracked"]) == 6
    assert not torch.equal(first[0][mean], second[0][mean])
    assert_same(first[1], first[0])
    assert_same(second[1], first[0])


# Numbers that are not finite


def test_sums_through_process_groups_begin_in_one_order_on_all_ranks() -> None:
    """As between hosts. Replicas wait for each other's gradients at other mini-batches than for
    what mini-batches came to; neither keeps the other from beginning.
    """
    model = cut("chain 2", dtype=torch.float64)
    chosen = plan_of(model, replicas=(2, 3))
    data = batches(26, 4, torch.float64)
    data[22]["x"][0, 0] = float("inf")
    model.captured.evaluation().programs.at(4)  # once, rather than by every rank

    def work() -> tuple[list[float], str]:
        pipe = in_turn(model, chosen)
        pipe._mesh._near = None
        return until_not_finite(pipe, data, batches(1, 4, torch.float64))

    results = on_ranks(chosen, work)
    twin = cut("chain 2", dtype=torch.float64)
    # Stage 0 has three rounds of two in flight, so the second loss comes when nine were put in.
    expected = train_in_turns(twin.by_hand, (2, 3), "stash", data[:22], fills=(0, 9))
    for losses, text in results:
        assert losses == pytest.approx(expected, rel=1e-12)
        assert text == results[0][1]
    assert "in mini-batch 22: stage 0 is the first" in results[0][1]


def test_sums_of_a_stage_that_all_ranks_have_are_not_those_that_tell() -> None:
    """Replicas of one stage, as between hosts: each mini-batch reads what the round before it has
    made, and the second replica has told of nothing when the first one waits for its gradients.
    """
    model, data = cut("chain 2"), batches(7)
    everything = [name for names in model.operators for name in names]
    chosen = plan_of(replace(model, operators=[everything]), replicas=(2,))

    def work() -> tuple[list[float], dict[str, Tensor]]:
        pipe = in_turn(model, chosen)
        pipe._mesh._near = None
        return list(pipe.steps(data)), held(pipe)

    results = on_ranks(chosen, work)
    twin, optimizer = model.twin, SGD(model.twin.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for start in range(0, 7, 2):
        of_round = [twin(**batch) for batch in data[start : start + 2]]
        losses += [loss.item() for loss in of_round]
        optimizer.zero_grad()
        torch.stack(of_round).mean().backward()
        optimizer.step()
    assert all(rank[0] == pytest.approx(losses, rel=1e-5) for rank in results)
    for name, tensor in whole([rank[1] for rank in results]).items():
        torch.testing.assert_close(tensor, twin.get_parameter(name).detach())


def test_numbers_that_are_not_finite_belong_to_one_minibatch() -> None:
    """Of a round of two, whichever it is; the other replica makes no update of it, either, and the
    losses before it are told.
    """
    model, start = cut("chain 2"), start_of(cut("chain 2"))
    chosen = plan_of(model, replicas=(2, 1))

    def trained_with(bad: int, kind: str) -> tuple[str, int, bool]:
        fresh(model, start)
        pipe, data = in_turn(model, chosen), batches(12)
        if kind == "batch":
            data[bad]["x"][2, 1] = float("nan")
        elif pipe.rank == bad % 2:
            weight = pipe._state.parameters["parts.0.0.weight"]
            seen: list[int] = []

            def overflow(gradient: Tensor) -> Tensor:
                seen.append(1)
                return gradient * float("inf") if len(seen) == 5 else gradient

            weight.register_hook(overflow)  # type: ignore[no-untyped-call]
        losses: list[float] = []
        with pytest.raises(NonFiniteError) as caught:
            losses.extend(pipe.steps(data))
        finite = all(bool(p.isfinite().all()) for p in held(pipe).values())
        return str(caught.value), len(losses), finite

    cases = [(8, "batch"), (9, "gradient")]
    first, *others = on_ranks(chosen, lambda: [trained_with(*case) for case in cases])
    assert others == [first, first]
    for (bad, kind), (text, count, finite) in zip(cases, first, strict=True):
        assert f"is not finite in mini-batch {bad}: stage 0" in text
        named = "gradient of parameter parts.0.0.weight is not finite"
        helps = f"fix the data: mini-batch {bad}, sample 2" if kind == "batch" else named
        assert helps in text
        assert ("stage 1: 0; the" in text) is (kind == "gradient")
        assert (count, finite) == (bad, True)


def test_a_replica_that_dies_ends_the_others() -> None:
    """Also the one that waits for its term of a sum."""
    model = cut("chain 2")
    chosen = plan_of(model, replicas=(2, 1))

    def work() -> None:
        pipe = in_turn(model, chosen)
        for loss in pipe.steps(batches(12)):
            if pipe.rank == 1 and pipe.step_number == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            assert loss > 0

    with pytest.raises(StageFailedError, match="rank 1 was killed by signal 9"):
        on_ranks(chosen, work)


# What is refused


def test_policies_without_rounds() -> None:
    """Each with its reason and a way on."""
    model = cut("chain 2")
    chosen = plan_of(model, replicas=(2, 1))
    halves = plan_of(model, microbatches=2, replicas=(2, 1))
    cases = [("vertical-sync", chosen), ("2bw", halves), ("2bw", chosen), ("stash", halves)]
    cases += [("stash", replace(chosen, schedule="gpipe"))]
    texts = refusals(model, *((planned, policy, IN_TURN) for policy, planned in cases))
    for text, (policy, _) in zip(texts[:3], cases, strict=False):
        assert text.startswith("PolicyError")
        assert "replicas of stage 0 that take mini-batches in turn" in text
        assert f"but {policy} takes every mini-batch to find one version" in text
        assert "split each mini-batch over the replicas" in text
        assert "or choose stash" in text
    assert texts[3].startswith("PolicyError: stash makes an update after every pass")
    assert texts[4].startswith("InvalidPlanError")
    assert "schedule 1f1b" in texts[4]


def test_ranks_have_to_agree() -> None:
    """One that splits mini-batches and one that takes turns would wait for each other, and so would
    one that compares memory, of which all tell each other what they need.
    """
    model = cut("chain 2")
    chosen = plan_of(model, replicas=(2, 1))

    def work() -> list[str]:
        texts = []
        for option in ("round_robin", "check_memory"):
            mine: dict[str, Any] = {option: torch.distributed.get_rank() == 0}
            with pytest.raises(InvalidPlanError, match="disagree on the options") as caught:
                pipeline(model, chosen, **mine)
            texts.append(str(caught.value))
        return texts

    first, *others = on_ranks(chosen, work)
    assert others == [first, first]
    for option, text in zip(("round_robin", "check_memory"), first, strict=True):
        assert f"{option} True" in text
        assert f"{option} False" in text
