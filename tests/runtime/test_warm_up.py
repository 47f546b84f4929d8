"""Programs that run once before anything travels, and leave nothing behind."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.runtime.compute.options import ComputeOptions
from anabranch.runtime.compute.stage_compute import StageCompute
from anabranch.runtime.first_batch import warm_up
from anabranch.runtime.pipeline import Pipeline
from tests.runtime.small import batch, built, plan


@pytest.mark.parametrize(
    ("name", "recompute"),
    [*((n, False) for n in ("TwoBranch", "Tied", "Shared")), ("Norm", True), ("Dropout", True)],
)
def test_training_goes_on_bitwise(name: str, recompute: bool) -> None:
    """With running means, dropout, values without samples, and random numbers of the user."""
    model = built(name)
    chosen, module = plan(model, 1, recompute=recompute), model.module
    before = deepcopy(module.state_dict())

    def numbers(warm: bool) -> tuple[list[float], dict[str, Tensor], Tensor]:
        torch.manual_seed(3)
        pipeline = Pipeline(model.workload, chosen, captured=model.captured, check_gradients=False)
        if warm:
            workers = pipeline._session.workers
            assert warm_up(workers.worker(16), workers.captured, batch(16)) == 1
            assert all(p.grad is None for p in module.parameters())
        losses = [pipeline.step(batch(16, seed)) for seed in range(2)]
        trained, drawn = deepcopy(module.state_dict()), torch.rand(3)
        module.load_state_dict(before)
        module.zero_grad()
        return losses, trained, drawn

    warm, cold = numbers(True), numbers(False)
    assert warm[0] == cold[0]
    assert all(torch.equal(warm[1][key], cold[1][key]) for key in cold[1])
    assert torch.equal(warm[2], cold[2])


def test_every_size_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each stage: 10 samples in micro-batches of 4 are 4, 4 and 2."""
    model = built("TwoBranch")
    workload = replace(model.workload, module=deepcopy(model.module))
    pipeline = Pipeline(workload, plan(model, 1, batch_size=10), check_gradients=False)
    ran: list[Any] = []
    for name in ("forward", "backward", "weight_gradients"):
        method = getattr(StageCompute, name)

        def counted(compute: Any, *args: Any, of: Any = (name, method)) -> Any:
            ran.append((of[0], args[0]))
            return of[1](compute, *args)

        monkeypatch.setattr(StageCompute, name, counted)
    workers = pipeline._session.workers
    assert warm_up(workers.worker(10), workers.captured, batch(10)) == 2
    passes = ("forward", "backward", "weight_gradients")
    assert ran == [(name, (0, microbatch)) for microbatch in (0, 2) for name in passes]
    ran.clear()
    held_out = workers.like(workers.captured.evaluation())
    warm_up(held_out.worker(10), held_out.captured, batch(10), train=False)
    assert ran == [("forward", (0, 0)), ("forward", (0, 2))]


def test_compiled_stages_are_compiled_by_it() -> None:
    """The first step then compiles nothing."""
    model = built("TwoBranch")
    workload = replace(model.workload, module=deepcopy(model.module))
    options = ComputeOptions(compile="aot_eager")
    pipeline = Pipeline(workload, plan(model, 1), check_gradients=False, compute=options)
    workers = pipeline._session.workers
    warm_up(workers.worker(16), workers.captured, batch(16))
    with torch.compiler.set_stance("fail_on_recompile"):
        pipeline.step(batch(16))
