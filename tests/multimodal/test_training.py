"""Training of vision-language models, a step after the other, in this process."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import anabranch
from anabranch.multimodal import multimodal_batch
from anabranch.multimodal.slots import take_rows
from anabranch.runtime.pipeline import Pipeline
from anabranch.schedule import rule_named
from anabranch.verification import even_plan
from anabranch.workload import Workload
from benchmarks.architectures import multimodal
from benchmarks.architectures.multimodal import ragged, small

IMAGES = [(2, 1, 0, 1), (1, 0, 1, 1), (2, 2, 2, 0)]


def test_steps_are_those_of_a_plain_loop_with_other_images_in_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the model's own forward on its own batches; two buckets, and micro-batches of two samples
    that share their slots. One layer reads texts, and one pictures.
    """
    for options in ("_TEXT", "_VISION"):
        one = {**getattr(multimodal, options), "num_hidden_layers": 1}
        monkeypatch.setattr(multimodal, options, one)
    torch.manual_seed(0)
    module = small("Llava")
    owns = [ragged("Llava", images, seed=i) for i, images in enumerate(IMAGES)]

    def batches(size: int, epoch: int) -> Iterator[Any]:
        for own in owns:
            yield multimodal_batch(module, own, share=2, images=(1, 2))

    # With few images, a slot per sample will do where two samples share theirs.
    few, many = (
        multimodal_batch(module, own, share=2, images=k) for k, own in ((1, owns[1]), (2, owns[0]))
    )
    workload = Workload(
        module,
        many,
        data=batches,
        buckets=[few],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    )
    captured = anabranch.capture(module, workload.example)
    twin = small("Llava")
    twin.load_state_dict(module.state_dict())
    plan = even_plan(captured.graph, 3, 4)
    stages = tuple(replace(s, devices=(0,), microbatch_size=2) for s in plan.stage_graph.stages)
    graph = rule_named("1f1b").warm_up(replace(plan.stage_graph, stages=stages))
    pipeline = Pipeline(workload, replace(plan, stage_graph=graph), captured=captured)
    with pytest.warns(UserWarning, match=r"reaches .* and \d+ more"):  # the tower's last
        losses = [pipeline.step(batch) for batch in pipeline.batches(epochs=1)]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for own, loss in zip(owns, losses, strict=True):
        optimizer.zero_grad()
        expected = twin(**own, use_cache=False).loss
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_part_of_samples_that_share_slots_is_refused() -> None:
    """When a stage is made for so many, and when it runs."""
    for samples in (1, 3):
        tensors = torch.zeros(samples, 2, 3), torch.zeros(samples, 4, dtype=torch.long)
        with pytest.raises(
            ValueError, match=r"2 samples share their slots .* multiple of 2 at once"
        ):
            take_rows(*tensors, 2)
        with pytest.raises(ValueError, match="multiple of 2"):
            take_rows(*(tensor.to("meta") for tensor in tensors), 2)
