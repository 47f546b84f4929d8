"""Whole training runs on local ranks, against the plain loop in one process."""

import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from anabranch.checkpoint import RankPart, saving
from anabranch.checkpoint.writing import Target, write_part
from anabranch.errors import LoaderError, NonFiniteError, StageFailedError, TrainingError
from anabranch.graph.capture import capture
from anabranch.runtime.pipeline import Pipeline
from anabranch.workload import NamedParameters, Workload
from tests.runtime.small import (
    Batch,
    Built,
    batch,
    built,
    on_devices,
    plan,
    train_alone,
    with_options,
    with_programs,
)
from tests.runtime.training import BATCHES, adam, decay, equal, run, sgd, train, trained_each

pytestmark = pytest.mark.dist


def adamw(parameters: NamedParameters) -> torch.optim.Optimizer:
    """Two groups, chosen by name, as most recipes do; of a stage one may be empty."""
    decayed = [(n, p) for n, p in parameters if n.endswith("weight")]
    others = [(n, p) for n, p in parameters if not n.endswith("weight")]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def test_training_is_bitwise_that_of_one_process() -> None:
    """Momentum, moments, weight decay in groups and a learning-rate schedule, over four steps, one
    of them short.
    """
    model = built("TwoBranch")
    workloads = [with_options(model, optimizer=o, scheduler=decay) for o in (sgd, adam, adamw)]
    batches = [*BATCHES[:2], batch(10, 7), BATCHES[3]]

    def work(pipeline: Pipeline) -> list[float]:
        return [pipeline.step(each) for each in batches]

    ways = [(work, {"workload": workload, "exact": True}) for workload in workloads]
    for ours, workload in zip(
        trained_each(model, plan(model, 3), None, *ways), workloads, strict=True
    ):
        assert equal(ours, train_alone(workload, batches))


@pytest.mark.parametrize(
    ("devices", "schedule"),
    [([(0,), (1,), (0,), (1,)], "1f1b"), ([(0,), (1,), (1,), (0,)], "zb-h1")],
)
def test_stages_that_pass_the_devices_twice_train_alike(
    devices: list[tuple[int, ...]], schedule: str
) -> None:
    """Bitwise, again or there and back, as planner auto proposes it."""
    model = built("TwoBranch")
    chosen = on_devices(plan(model, 4, schedule=schedule), devices)
    workload = with_options(model, optimizer=sgd)
    ours = train(model, chosen, workload, BATCHES[:2], exact=True)
    assert equal(ours, train_alone(workload, BATCHES[:2]))


@pytest.mark.parametrize(("name", "replicas"), [("TwoBranch", [1, 2]), ("Tied", [2, 1])])
def test_unequal_replicas_train_alike(name: str, replicas: list[int]) -> None:
    """Sums in another order: equal up to rounding. With a clipped norm, which counts every
    parameter once.
    """
    model = with_programs(built(name, torch.float64), 3, 11, 16)
    workload = with_options(model, optimizer=sgd, clip_norm=0.05)
    batches = [batch(n, n, torch.float64) for n in (16, 11, 16)]
    losses, parameters = train(model, plan(model, 2, replicas=replicas), workload, batches)
    expected, state = train_alone(workload, batches)
    assert losses == pytest.approx(expected, rel=1e-12)
    for key, value in state.items():
        torch.testing.assert_close(parameters[key], value, rtol=1e-9, atol=1e-12)


class Spectral(torch.nn.Module):
    """A complex weight per frequency, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
        self.weight = torch.nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        h = torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.weight, n=8)
        return torch.nn.functional.cross_entropy(self.last(h), label)


def test_complex_parameters_train_alike() -> None:
    """Their norm counts both parts, in clipping and where gradients are compared first."""
    torch.manual_seed(0)
    module = Spectral()
    model = Built(capture(module, batch(4)), Workload(module, batch(4)))
    workload = with_options(model, optimizer=sgd, clip_norm=0.05)
    plan_ = plan(model, 2, replicas=[2, 1])
    losses, parameters = train(model, plan_, workload, BATCHES[:2], check_gradients=True)
    expected, state = train_alone(workload, BATCHES[:2])
    assert losses == pytest.approx(expected)
    for key, value in state.items():
        torch.testing.assert_close(parameters[key], value)


def test_loss_and_metrics_are_those_of_the_module() -> None:
    """On every rank, also on those that make neither."""
    model = built("TwoBranch")

    def work(pipeline: Pipeline) -> tuple[float, float]:
        return pipeline.step(BATCHES[0]), pipeline.metrics["accuracy"]

    results = run(model, plan(model, 2), work)
    with torch.no_grad():
        out = model.module(**BATCHES[0])
    assert len(set(results)) == 1
    assert results[0] == pytest.approx((out["loss"].item(), out["accuracy"].item()))


def test_running_means_advance_once_per_microbatch() -> None:
    """From where they were: others have used the model."""
    model = built("Norm")
    before = dict(model.module.named_buffers())

    def work(pipeline: Pipeline) -> dict[str, Tensor]:
        pipeline.step(BATCHES[0])
        return pipeline._state.buffers

    buffers = {n: b for held in run(model, plan(model, 2), work) for n, b in held.items()}
    for name in ("norm", "body.1"):
        count = f"{name}.num_batches_tracked"
        assert buffers[count] == before[count] + 4
    assert not torch.equal(buffers["norm.running_mean"], before["norm.running_mean"])


def test_a_parameter_without_gradient_is_named_once_and_left_alone() -> None:
    """The idle one is in no stage, the cut one in a stage but not in the gradient's way; weight
    decay touches neither.
    """
    model = built("Unused")

    def work(pipeline: Pipeline) -> tuple[list[str], bool]:
        cut = pipeline._session.captured.module.cut.weight
        before = cut.detach().clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for each in BATCHES[:2]:
                pipeline.step(each)
        held = "cut.weight" in pipeline._state.parameters
        return [str(w.message) for w in caught], not held or torch.equal(cut, before)

    workload = with_options(model, optimizer=sgd)
    results = run(model, plan(model, 2), work, workload=workload)
    texts = [text for messages, _ in results for text in messages]
    assert all(untouched for _, untouched in results)
    assert len(texts) == 1
    assert all(name in texts[0] for name in ("idle", "cut.weight", "cut.bias"))


def test_a_loss_that_is_not_finite_stops_before_the_update() -> None:
    """Sample 9 is in micro-batch 2; every rank hears of it, and may go on with the next batch."""
    model = built("TwoBranch")
    poisoned = batch(16)
    poisoned["x"][9] = float("inf")

    def work(pipeline: Pipeline) -> tuple[str, bool, float]:
        before = {n: p.detach().clone() for n, p in pipeline._state.parameters.items()}
        with pytest.raises(NonFiniteError) as caught:
            pipeline.step(poisoned)
        after = pipeline._state.parameters
        same = all(torch.equal(after[n], before[n]) for n in before)
        return str(caught.value), same, pipeline.step(BATCHES[0])

    results = run(model, plan(model, 2), work)
    assert len(set(results)) == 1
    assert "is not finite in step 0: stage 0, micro-batch 2 is the first" in results[0][0]
    assert "x in the batch is not finite itself, first in sample 9" in results[0][0]
    assert results[0][0].endswith("fix the data: step 0, sample 9")
    assert results[0][1]


def test_a_step_that_was_refused_is_in_no_checkpoints_way(tmp_path: Path) -> None:
    """Nothing was changed in it, so what is saved behind it is the step before."""
    model = built("TwoBranch")
    poisoned = batch(16)
    poisoned["x"][9] = float("inf")

    def work(pipeline: Pipeline) -> None:
        pipeline.step(BATCHES[0])
        with pytest.raises(NonFiniteError):
            pipeline.step(poisoned)
        pipeline.save(tmp_path / "step-1", wait=False)
        pipeline.finish_saving()

    run(model, plan(model, 2), work)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_a_bad_step_has_no_checkpoint(tmp_path: Path) -> None:
    """Without a barrier it is known to be bad only after the next one, when its checkpoint has been
    begun; that of the good step before it is there.
    """
    model = built("TwoBranch")
    poisoned = batch(16)
    poisoned["x"][9] = float("inf")

    def work(pipeline: Pipeline) -> None:
        def stream() -> Iterator[Batch]:
            for i, each in enumerate([*BATCHES, poisoned, *BATCHES]):
                if i >= 4:
                    pipeline.save(tmp_path / f"step-{i}", wait=False)
                yield each

        with pytest.raises(NonFiniteError):
            list(pipeline.steps(stream()))
        pipeline.finish_saving()

    run(model, plan(model, 2), work, workload=with_options(model, optimizer=sgd))
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"]


def test_a_checkpoint_is_waited_for_right_after_it_has_begun(tmp_path: Path) -> None:
    """Between steps without a barrier; what came of its step is asked first. Another follows at
    once.
    """
    model = built("TwoBranch")

    def work(pipeline: Pipeline) -> list[bool]:
        there = []
        for _ in pipeline.steps(BATCHES[:3]):
            folder = tmp_path / f"step-{pipeline.step_number}"
            if not folder.exists() and pipeline.step_number == 3:
                pipeline.save(folder, wait=False)
                pipeline.save(tmp_path / "again", wait=False)
                pipeline.finish_saving()
                there += [folder.exists(), (tmp_path / "again").exists()]
        return there

    assert run(model, plan(model, 2), work) == [[True, True]] * 2


def test_a_checkpoint_of_a_good_step_outlives_data_that_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it is being written, by one rank longer than by the other."""
    model = built("TwoBranch")

    def data(size: int, epoch: int) -> Iterator[Batch]:
        yield BATCHES[0]
        raise KeyError("user_id")

    def slowly(target: Target, rank: int, part: RankPart) -> None:
        time.sleep(0.2 + 0.2 * rank)
        write_part(target, rank, part)

    def work(pipeline: Pipeline) -> bool:
        batches = pipeline.batches()
        pipeline.step(next(batches))
        pipeline.save(tmp_path / "step-1", wait=False)
        with pytest.raises(LoaderError):
            next(batches)
        return (tmp_path / "step-1").exists()

    monkeypatch.setattr(saving, "write_part", slowly)
    workload = with_options(model, data=data)
    assert run(model, plan(model, 2), work, workload=workload) == [True, True]


def test_what_raises_in_a_stage_is_named_with_its_place() -> None:
    """A label out of range, in the last stage; the other ranks are stopped."""
    model = built("TwoBranch")
    bad = batch(16)
    bad["label"][9] = 77

    def work(pipeline: Pipeline) -> None:
        pipeline.step(BATCHES[0])
        pipeline.step(bad)

    with pytest.raises(StageFailedError) as caught:
        run(model, plan(model, 3), work)
    assert str(caught.value).startswith(
        "rank 2 failed in the forward of stage 2, micro-batch 2, step 1: IndexError: Target 77"
    )
    assert "Traceback of rank 2" in caught.value.__notes__[0]


def test_a_killed_rank_is_named_with_its_place() -> None:
    """It is killed inside a step, by its own optimizer."""
    model = built("TwoBranch")

    class Deadly(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(closure)

    workload = with_options(model, optimizer=lambda named: Deadly(named, lr=0.1))

    def work(pipeline: Pipeline) -> None:
        for each in BATCHES:
            pipeline.step(each)

    said = r"rank 1 was killed .*\(SIGKILL\) in the update, step 0"
    with pytest.raises(StageFailedError, match=said):
        run(model, plan(model, 3), work, workload=workload)


def test_an_interrupted_step_does_not_count() -> None:
    """In a notebook: Ctrl-C in the middle of a step, then the cell runs again."""
    model = built("Chain")
    pipeline = Pipeline(with_options(model, optimizer=sgd), plan(model, 1), captured=model.captured)
    compute = pipeline._session.workers.worker(16).compute
    backward = compute.backward

    def once(*arguments: Any) -> Any:
        compute.backward = backward
        raise KeyboardInterrupt

    compute.backward = once
    with pytest.raises(KeyboardInterrupt):
        pipeline.step(BATCHES[0])
    losses = [pipeline.step(BATCHES[0]) for _ in range(3)]
    assert len(set(losses)) == 3


def test_contexts_that_change_what_torch_computes_are_refused() -> None:
    """Loops of users have them: autocast would cast messages, the others keep no gradients. An
    evaluation needs none of these.
    """
    model = built("Chain")
    pipeline = Pipeline(model.workload, plan(model, 1), captured=model.captured)
    for cast in (pipeline.step, lambda batch: pipeline.evaluate([batch])):
        with (
            torch.autocast("cpu", torch.bfloat16),
            pytest.raises(TrainingError, match="train with precision bf16"),
        ):
            cast(BATCHES[0])
    for context in (torch.inference_mode, torch.no_grad):
        with context(), pytest.raises(TrainingError, match="would learn nothing"):
            pipeline.step(BATCHES[0])
    with torch.inference_mode():
        held_out = pipeline.evaluate([BATCHES[0]])
    assert pipeline.step(BATCHES[0]) == pytest.approx(held_out["loss"])


def test_batches_that_raise_leave_the_others_their_messages() -> None:
    """All ranks catch it and end; rank 1 is late, and still gets what rank 0 had sent."""
    model = built("Chain")

    class Late(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if dist.get_rank() == 1:
                time.sleep(0.2)
            return super().step(closure)

    def stream() -> Iterator[Batch]:
        yield from BATCHES[:3]
        raise ValueError("the end of the stream")

    def work(pipeline: Pipeline) -> list[float]:
        losses = []
        with pytest.raises(ValueError, match="the end of the stream"):
            losses.extend(pipeline.steps(stream()))
        return losses

    workload = with_options(model, optimizer=lambda named: Late(named, lr=0.1))
    run(model, plan(model, 2), work, workload=workload)


def test_epochs_are_counted() -> None:
    """Two epochs of three batches, the loader is asked for each epoch. What is fetched and not
    trained on does not count.
    """
    model = built("Chain")

    def data(batch_size: int, epoch: int) -> list[Batch]:
        return [batch(batch_size, 10 * epoch + i) for i in range(3)]

    workload = with_options(model, data=data)

    def work(pipeline: Pipeline) -> list[tuple[int, int]]:
        next(pipeline.batches())
        seen = []
        for each in pipeline.batches(epochs=2):
            assert torch.equal(each["x"], batch(16, 10 * pipeline.epoch + pipeline.position)["x"])
            pipeline.step(each)
            seen.append((pipeline.epoch, pipeline.position))
        return [*seen, (pipeline.epoch, pipeline.position)]

    places = run(model, plan(model, 1), work, workload=workload)[0]
    assert places == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 0)]
