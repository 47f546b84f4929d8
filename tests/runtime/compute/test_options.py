"""Whole training runs on local ranks under compute options, against the plain loop."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch import launch
from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import call, take
from anabranch.workload import Workload
from tests.runtime.small import (
    Batch,
    batch,
    built,
    load_compiler,
    plan,
    slices,
    with_options,
    with_programs,
)
from tests.runtime.test_pipeline import adamw
from tests.runtime.training import (
    LIMIT_S,
    Way,
    begin_again,
    run,
    run_each,
    sgd,
    train,
    trained_each,
)

pytestmark = pytest.mark.dist

FP16 = ComputeOptions(precision="fp16")


def train_alone(
    workload: Workload, batches: Sequence[Batch], half: torch.dtype, scale: float
) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """PyTorch's own recipe for mixed precision; also the scale after each step."""
    module = deepcopy(workload.module)
    parameters = dict(module.named_parameters())
    optimizer = workload.optimizer(list(parameters.items()))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=half == torch.float16)
    losses, scales = [], []
    for each in batches:
        optimizer.zero_grad()
        loss = 0.0
        for start, stop in slices(len(each["x"]), 4):
            weight = (stop - start) / len(each["x"])
            with torch.autocast("cpu", dtype=half):
                value = call(module, take(each, start, stop))["loss"]
            scaler.scale(value * weight).backward()
            loss += value.item() * weight
        scaler.unscale_(optimizer)
        if workload.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), workload.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss)
        scales.append(scaler.get_scale())
    return losses, {name: p.detach() for name, p in parameters.items()}, scales


def each_with(work: Callable[[Pipeline], Any], *each: ComputeOptions, **options: Any) -> list[Way]:
    """A function with each of several options of computing, and others."""
    return [(work, options | {"compute": compute}) for compute in each]


def batches_with_an_overflow() -> list[Batch]:
    """In step 1, inputs of 6e4 make gradients of the first layer overflow, but not the loss."""
    batches = [batch(16, seed) for seed in range(4)]
    batches[1]["x"] = batches[1]["x"] * 2e4
    return batches


def test_fp16_skips_and_scales_as_gradscaler_does() -> None:
    """The overflow is on the first rank only; the others leave their update out as well, without
    and with a clipped norm.
    """
    model = built("TwoBranch")
    workloads = [with_options(model, optimizer=adamw, clip_norm=norm) for norm in (None, 0.05)]
    batches = batches_with_an_overflow()

    def work(pipeline: Pipeline) -> Any:
        losses, scales = [], []
        pipeline._session.workers.loss_scale.scale = 2.0**14  # type: ignore[union-attr]
        for each in batches:
            losses.append(pipeline.step(each))
            scales.append(pipeline._session.workers.loss_scale.scale)  # type: ignore[union-attr]
        return losses, {n: p.detach() for n, p in pipeline._state.parameters.items()}, scales

    ways = [(work, {"workload": each, "exact": True, "compute": FP16}) for each in workloads]
    for workload, results in zip(workloads, run_each(model, plan(model, 2), *ways), strict=True):
        losses, state, scales = train_alone(workload, batches, torch.float16, 2.0**14)
        assert scales == [2.0**14, 2.0**13, 2.0**13, 2.0**13]
        for mine, parameters, theirs in results:
            assert mine == losses
            assert theirs == scales
            for name, value in parameters.items():
                if workload.clip_norm is None:
                    assert torch.equal(value, state[name])
                else:
                    torch.testing.assert_close(value, state[name], rtol=1e-5, atol=1e-7)


def test_gradients_under_fp16_are_finite() -> None:
    """At the first scale some overflow; it is lowered on all ranks until they do not."""
    model = built("TwoBranch")

    def work(pipeline: Pipeline) -> tuple[bool, float]:
        pipeline._session.workers.loss_scale.scale = 2.0**22  # type: ignore[union-attr]
        _, gradients = pipeline.gradients(batch(16))
        finite = all(bool(g.isfinite().all()) for g in gradients.values())
        return finite, pipeline._session.workers.loss_scale.scale  # type: ignore[union-attr]

    results = run(model, plan(model, 2), work, compute=FP16)
    assert {finite for finite, _ in results} == {True}
    assert len({scale for _, scale in results}) == 1
    assert results[0][1] < 2.0**22


def test_steps_without_a_barrier_wait_for_the_verdict_under_fp16() -> None:
    """An update must know of overflows elsewhere, so these steps are those of ``step``."""
    model = built("TwoBranch")
    workload = with_options(model, optimizer=sgd)
    batches = batches_with_an_overflow()

    def one_by_one(pipeline: Pipeline) -> Any:
        return [pipeline.step(each) for each in batches], pipeline._session.workers.loss_scale

    def streamed(pipeline: Pipeline) -> Any:
        return list(pipeline.steps(batches)), pipeline._session.workers.loss_scale

    ways = ((work, {"compute": FP16}) for work in (one_by_one, streamed))
    first, second = run_each(model, plan(model, 2), *ways, workload=workload)
    assert first == second
    assert first[0][1].scale < 2.0**16


def test_bf16_trains_as_one_process() -> None:
    """Bitwise, and without the check of gradients getting in the way."""
    model = built("TwoBranch")
    workload = with_options(model, optimizer=sgd)
    batches = [batch(16, seed) for seed in range(3)]
    options = ComputeOptions(precision="bf16")
    losses, parameters = train(
        model, plan(model, 2), workload, batches, exact=True, check_gradients=True, compute=options
    )
    expected, state, _ = train_alone(workload, batches, torch.bfloat16, 1.0)
    assert losses == expected
    assert all(torch.equal(parameters[name], state[name]) for name in state)


def test_gradients_are_without_the_scale() -> None:
    """What ``gradients`` returns is that of the loss, up to rounding."""
    model = built("Chain")

    def work(pipeline: Pipeline) -> Any:
        return pipeline.gradients(batch(16))

    scaled, plain = run_each(model, plan(model, 2), *each_with(work, FP16, ComputeOptions()))
    for (_, mine), (_, theirs) in zip(scaled, plain, strict=True):
        for name, gradient in theirs.items():
            torch.testing.assert_close(mine[name], gradient, rtol=0.05, atol=2e-3)


def test_accumulated_batches_are_unscaled_once() -> None:
    """Two batches make an update; the steps are those of fp32 up to rounding."""
    model = built("Chain")
    workload = with_options(model, optimizer=sgd)
    batches = [batch(16, seed) for seed in range(4)]

    def work(pipeline: Pipeline) -> list[float]:
        return [pipeline.step(each) for each in batches]

    ways = each_with(work, FP16, ComputeOptions(), accumulate=2)
    half, full = trained_each(model, plan(model, 2), workload, *ways)
    assert half[0] == pytest.approx(full[0], rel=1e-2)
    for name, value in full[1].items():
        torch.testing.assert_close(half[1][name], value, rtol=0.02, atol=2e-3)


def test_a_checkpoint_has_the_scale(tmp_path: Path) -> None:
    """A resumed run does not search for its scale again; without fp16 there is none."""
    model = built("Chain")
    chosen = plan(model, 2)

    def saved(pipeline: Pipeline) -> None:
        pipeline._session.workers.loss_scale.scale = 512.0  # type: ignore[union-attr]
        pipeline.step(batch(16))
        pipeline.save(tmp_path / "half")

    def resumed() -> list[tuple[float, int] | None]:
        found = []
        for options in (FP16, ComputeOptions()):
            pipeline = Pipeline.resume(
                tmp_path / "half",
                model.workload,
                chosen,
                captured=model.captured,
                check_gradients=False,
                compute=options,
            )
            scale = pipeline._session.workers.loss_scale
            found.append(None if scale is None else (scale.scale, scale.streak))
            begin_again(model.module, start)
        return found

    run(model, chosen, saved, compute=FP16)
    start = {name: value.clone() for name, value in model.module.state_dict().items()}
    assert launch.run(resumed, 2, timeout=LIMIT_S) == [[(512.0, 1), None]] * 2


def test_dropout_by_sample_trains_alike_under_any_plan() -> None:
    """Four steps, one of them short, on one rank and on three with unequal replicas."""
    model = built("Dropout", torch.float64)
    workload = with_options(model, optimizer=sgd)
    batches = [batch(n, n, torch.float64) for n in (16, 11, 16, 16)]
    options = ComputeOptions(dropout="sample")
    torch.manual_seed(3)
    plans = [plan(model, 1, microbatch_size=16), plan(model, 2, replicas=[2, 1])]
    (losses, state), (others, parameters) = (
        train(model, each, workload, batches, compute=options, check_gradients=True)
        for each in plans
    )
    assert losses == pytest.approx(others, rel=1e-10)
    for name, value in state.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-8, atol=1e-11)


def test_compiled_and_offloaded_ranks_train_alike() -> None:
    """Up to rounding, with recomputation and held-out batches."""
    load_compiler()
    model = built("TwoBranch")
    model.captured.evaluation()  # once, rather than by every rank
    workload = with_options(model, optimizer=sgd)
    batches = [batch(16, seed) for seed in range(2)]
    chosen = plan(model, 2, recompute=True)

    def work(pipeline: Pipeline) -> Any:
        losses = [pipeline.step(each) for each in batches]
        return [*losses, pipeline.evaluate([batch(6, 9)])["loss"]]

    other = ComputeOptions(compile="aot_eager", offload=True)
    ways = each_with(work, ComputeOptions(), other, timeout=LIMIT_S)
    plain, compiled = run_each(model, chosen, *ways, workload=workload)
    assert compiled[0] == compiled[1]
    assert compiled[0] == pytest.approx(plain[0], rel=1e-5)


def test_evaluation_is_under_autocast_as_well() -> None:
    model = with_programs(built("Chain"), 4, evaluation=True)
    held_out = batch(8, 9)
    [half, _] = run(
        model,
        plan(model, 2),
        lambda pipeline: pipeline.evaluate([held_out])["loss"],
        compute=ComputeOptions(precision="bf16"),
    )
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [call(model.module, take(held_out, i, i + 4))["loss"].item() for i in (0, 4)]
    assert half == pytest.approx(sum(losses) / 2, rel=1e-6)


def test_exact_half_precision_refuses_shared_parameters() -> None:
    """One process adds their gradients in half precision, which stages apart cannot."""
    model = built("Tied")
    chosen = plan(model, 2)
    options = replace(FP16, precision="bf16")
    with pytest.raises(ValueError, match=r"words\.weight"):
        Pipeline(model.workload, chosen, captured=model.captured, exact=True, compute=options)
