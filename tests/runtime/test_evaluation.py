"""Means over held-out batches."""

from typing import Any

import pytest
import torch

from anabranch.errors import DataError, TrainingError
from anabranch.graph.capture import capture
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.ranks.placement import Fetched
from anabranch.runtime.worker import Worker
from anabranch.workload import Workload
from tests.runtime.small import Built, batch, built, plan
from tests.runtime.training import run

pytestmark = pytest.mark.dist


def test_evaluation_is_in_evaluation_mode() -> None:
    """Dropout does nothing and running means are used; batches of any size, weighted by samples."""
    for name in ("Dropout", "Norm"):
        model = built(name)
        model.captured.evaluation()  # once, rather than by every rank
        held_out = [batch(16, 8), batch(7, 9)]
        chosen = plan(model, 2, replicas=[1, 2])
        results = run(model, chosen, lambda p, held=held_out: p.evaluate(held))
        model.module.eval()
        with torch.no_grad():
            losses = [model.module(**each).item() for each in held_out]
        model.module.train()
        expected = (16 * losses[0] + 7 * losses[1]) / 23
        assert [r["loss"] for r in results] == pytest.approx([expected] * 3, rel=1e-6)


def test_training_goes_on_where_there_is_no_held_out_data() -> None:
    """All ranks are refused alike, and nothing is under way."""
    model = built("TwoBranch")

    def work(pipeline: Pipeline) -> float:
        with pytest.raises(DataError, match="no held-out data"):
            pipeline.evaluate()
        return pipeline.step(batch(16, 0))

    losses = run(model, plan(model, 2), work)
    assert losses[0] == losses[1]


def test_a_batch_is_looked_at_when_the_next_one_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU the host would wait for it, with nothing to do behind."""
    model, log = built("TwoBranch"), list[str]()
    run_batch, look = Worker.run, Fetched.read

    def noted_run(worker: Worker, *arguments: Any, **options: Any) -> Any:
        log.append("run")
        return run_batch(worker, *arguments, **options)

    def noted_look(numbers: Fetched) -> list[float]:
        log.append("look")
        return look(numbers)

    monkeypatch.setattr(Worker, "run", noted_run)
    monkeypatch.setattr(Fetched, "read", noted_look)

    def work(pipeline: Pipeline) -> list[str]:
        pipeline.evaluate([batch(8, seed) for seed in range(3)])
        return log

    (found,) = run(model, plan(model, 1), work)
    assert found == ["run", "run", "look", "run", "look", "look"]


class Centred(torch.nn.Module):
    """Subtracts a mean in evaluation, once there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_centred = not self.training and self.mean.any()
        return self.layer(x - self.mean if is_centred else x).square().mean()


def test_a_buffer_that_decides_in_evaluation_is_compared() -> None:
    """The captured model would go the way of the first evaluation."""
    module, leaves = Centred(), {"x": torch.ones(2, 3)}
    model = Built(capture(module, leaves), Workload(module, leaves))
    pipe = Pipeline(model.workload, plan(model, 1, batch_size=2))
    pipe.evaluate([leaves])
    module.mean.fill_(1.0)
    with pytest.raises(TrainingError, match="mean has changed since the model was captured"):
        pipe.evaluate([leaves])
