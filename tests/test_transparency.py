"""Under every schedule, on chains and on graphs of stages, a step of the pipeline is the step of
one process, bit for bit.

The one process accumulates the same micro-batches in the same order, on one thread, with the user's
own module.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from anabranch.graph.capture import capture
from anabranch.models import build
from anabranch.schedule import SCHEDULES
from anabranch.verification import VerifyResult, verify
from anabranch.workload import Workload
from tests.hf_models import MODELS as HF_MODELS
from tests.runtime.small import MODELS, Built, batch, built, plan

pytestmark = pytest.mark.dist

LIMIT_S = 60.0
DTYPES = [torch.float32, torch.float64]
SMALL = sorted(set(MODELS) - {"Dropout"})
"""What draws random numbers draws others in a pipeline."""


def as_type(value: object, dtype: torch.dtype) -> object:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def in_type(module: nn.Module, example: Any, dtype: torch.dtype) -> Built:
    module = module.to(dtype)
    example = pytree.tree_map(lambda leaf: as_type(leaf, dtype), example)
    return Built(capture(module, example), Workload(module, example))


@cache
def hugging_face(name: str, dtype: torch.dtype) -> Built:
    torch.manual_seed(0)
    return in_type(*HF_MODELS[name](), dtype)


@cache
def built_in(name: str, dtype: torch.dtype) -> Built:
    torch.manual_seed(0)
    workload = build(name, preset="small")
    return in_type(workload.module, workload.example, dtype)


def check(result: VerifyResult) -> None:
    assert result.exact
    assert result.bitwise, result.summary()
    assert result.max_gradient_error == 0
    assert result.loss == result.reference_loss


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("name", SMALL)
def test_every_schedule_on_small_models(name: str, num_stages: int, schedule: str) -> None:
    """Four micro-batches, the last one short; chains, branches, ties, batch normalisation."""
    model = built(name)
    count = min(num_stages, len(model.captured.graph))
    chosen = plan(model, count, batch_size=11, microbatch_size=3, schedule=schedule)
    leaves = batch(11, 5)
    check(verify(model.workload, chosen, batch=leaves, captured=model.captured, timeout=LIMIT_S))


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", ["mmt", "dlrm", "candle-uno", "two-branch", "transformer"])
def test_the_built_in_models(name: str, dtype: torch.dtype, num_stages: int) -> None:
    """Two micro-batches of one sample; the models on real data differ in their data only."""
    model = built_in(name, dtype)
    chosen = plan(model, num_stages, batch_size=2, microbatch_size=1)
    check(verify(model.workload, chosen, captured=model.captured, timeout=LIMIT_S))


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", sorted(HF_MODELS))
def test_models_that_nobody_wrote_for_pipelines(
    name: str, dtype: torch.dtype, num_stages: int
) -> None:
    """Micro-batches of one sample and of two."""
    model = hugging_face(name, dtype)
    chosen = plan(model, num_stages, batch_size=4, microbatch_size=num_stages // 2)
    check(verify(model.workload, chosen, captured=model.captured, timeout=LIMIT_S))
