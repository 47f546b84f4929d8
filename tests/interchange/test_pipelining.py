"""Chain plans under torch.distributed.pipelining, on real ranks."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from anabranch import launch
from anabranch.errors import DataError
from anabranch.interchange.chain import chain_of
from anabranch.interchange.pipelining import TorchPipeline
from anabranch.interchange.stages import plain_stages
from anabranch.plans.plan import Plan
from tests.interchange.models import MODELS, batch, chain
from tests.runtime.small import Built, num_ranks, on_devices, plan, with_programs
from tests.runtime.training import sgd, train

pytestmark = pytest.mark.dist
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _schedules_of_pytorch() -> None:
    """Imported here, once for all ranks."""
    import torch.distributed.pipelining.schedules  # noqa: F401


def made_once(model: Built, chosen: Plan) -> None:
    """Make here, rather than in every rank, stages and the program of a whole batch."""
    plain_stages(chain_of(chosen, model.captured.graph), model.captured)
    with_programs(model, 16)


def under_pytorch(name: str, model: Built, chosen: Plan) -> list[float]:
    """Losses of some steps of SGD in which PyTorch runs the plan."""

    made_once(model, chosen)

    def rank() -> list[float]:
        pipeline = TorchPipeline(chosen, model.captured)
        optimizer = sgd(list(pipeline.named_parameters()))
        losses = []
        for seed in range(STEPS):
            optimizer.zero_grad()
            losses.append(pipeline.step(batch(name, 16, seed)))
            optimizer.step()
        return [loss for loss in losses if loss is not None]

    results = launch.run(rank, num_ranks(chosen), timeout=60.0)
    (losses,) = filter(None, results)
    return losses


def here(name: str, model: Built, chosen: Plan) -> list[float]:
    """The same with this project's runtime, on one rank where there are no replicas."""
    if all(stage.replicas == 1 for stage in chosen.stage_graph.stages):
        chosen = on_devices(chosen, [(0,)] * len(chosen.stage_graph))
    workload = replace(model.workload, optimizer=sgd)
    return train(model, chosen, workload, [batch(name, 16, seed) for seed in range(STEPS)])[0]


@pytest.mark.parametrize("name", sorted({*MODELS} - {"blocks", "transformer"}))
def test_losses_on_four_ranks_are_those_of_the_plan_here(name: str):
    """The user's own modules, the schedule from the file, and the loss of the whole batch. Blocks
    are below, and a transformer is cut as Llama is.
    """
    model = chain(name)
    chosen = plan(model, 4, batch_size=16, microbatch_size=4)
    assert under_pytorch(name, model, chosen) == pytest.approx(here(name, model, chosen), rel=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_schedules_are_those_of_the_plan(schedule: str):
    """Several stages on a rank, and split backwards."""
    model = chain("blocks")
    chosen = plan(model, 4, schedule=schedule)
    chosen = on_devices(chosen, [(0,), (1,), (0,), (1,)]) if schedule == "gpipe" else chosen
    losses = under_pytorch("blocks", model, chosen)
    assert losses == pytest.approx(here("blocks", model, chosen), rel=1e-6)


def test_a_batch_of_another_size_is_refused_on_every_rank():
    """Of a larger one samples would be left out, on a smaller one PyTorch would fail."""
    model = chain("blocks")
    chosen = plan(model, 2, batch_size=16)

    def rank() -> list[int]:
        pipeline, told = TorchPipeline(chosen, model.captured), []
        for samples in (12, 32):
            with pytest.raises(DataError, match=f"{samples} samples, the plan's 16; .*drop_last"):
                pipeline.step(batch("blocks", samples, 0))
            told.append(samples)
        return told

    assert launch.run(rank, 2, timeout=60.0) == [[12, 32]] * 2


def test_replicas_are_pipelines_side_by_side():
    """Each has its slice of every micro-batch; DDP averages, and the loss is the mean of both."""
    model = chain("blocks")
    chosen = plan(model, 2, replicas=[2, 2])
    made_once(model, chosen)

    def rank() -> list[float]:
        replica, row = dist.get_rank() % 2, dist.get_rank() // 2
        pipelines = [dist.new_group([r, 2 + r]) for r in range(2)]
        copies = [dist.new_group([2 * s, 2 * s + 1]) for s in range(2)]
        pipeline = TorchPipeline(chosen, model.captured, group=pipelines[replica], replica=replica)
        parameters = list(pipeline.named_parameters())
        optimizer, losses = sgd(parameters), []
        for seed in range(STEPS):
            optimizer.zero_grad()
            loss = pipeline.step(batch("blocks", 16, seed))
            for _, parameter in parameters:
                dist.all_reduce(parameter.grad, group=copies[row])
                parameter.grad /= 2
            optimizer.step()
            losses += [loss] if loss is not None else []
        return losses

    results = [losses for losses in launch.run(rank, 4, timeout=60.0) if losses]
    means = [sum(pair) / 2 for pair in zip(*results, strict=True)]
    assert means == pytest.approx(here("blocks", model, chosen), rel=1e-6)
