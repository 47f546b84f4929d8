"""Values and parameters of the graph of operators that a captured module becomes."""

from __future__ import annotations

import torch
from torch import nn

from anabranch.graph.capture import capture
from anabranch.graph.split import split
from tests.captured_models import captured_model
from tests.graph.chain import run_stages
from tests.graph.nets import Body, Net, batch, stage_each


def test_parameters_have_their_own_names() -> None:
    """A parameter under two names goes by its first; frozen and unused ones are marked."""
    module = Net(lambda net, h: net.again(h) @ net.tied.T)
    module.again = nn.Linear(8, 8)
    module.tied = module.again.weight
    module.idle = nn.Linear(2, 2)
    module.first.requires_grad_(False)
    captured = capture(module, batch())
    names = [p.name for p in captured.graph.parameters]
    assert names == ["tied", "first.weight", "first.bias", "last.weight", "last.bias", "again.bias"]
    assert [p.name for p in captured.graph.parameters if not p.trainable] == [
        "first.weight",
        "first.bias",
    ]
    assert captured.unused == ("idle.weight", "idle.bias")


def test_what_only_a_metric_reads_gets_no_gradient() -> None:
    """A parameter may be returned itself; a leaf of the batch may be read by nobody."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.probe = nn.Linear(6, 2), nn.Linear(2, 1)
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            h = self.first(x)
            return {"loss": h.mean(), "scale": self.scale, "probe": self.probe(h).mean()}

    captured = capture(Scaled(), batch())
    assert captured.unused == ("scale", "probe.weight", "probe.bias")
    idle = next(v for v in captured.graph.values if v.name == "1")
    assert idle.consumers == ()
    _, metrics = run_stages(split(captured, stage_each(captured)), batch())
    assert metrics["scale"] == 3.0


def test_parameters_alone_make_values_without_a_batch() -> None:
    """T5's position bias carries a gradient, has no batch dimension, and is read by both layers."""
    t5 = captured_model("T5")[0].graph
    bias = [v for v in t5.values if not v.batched]
    assert [(v.grad, v.nbytes) for v in bias] == [(True, 2 * 8 * 8 * 4), (True, 2 * 6 * 6 * 4)]
    assert all(len(v.consumers) == 2 for v in bias)


def test_tied_parameters_are_listed_by_each_reader() -> None:
    """T5's embedding is read by encoder, decoder and head, under its first name."""
    t5 = captured_model("T5")[0].graph
    readers = [op.name for op in t5.ops if "shared.weight" in op.parameters]
    assert readers == ["encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]
    assert [p.name for p in t5.parameters].count("shared.weight") == 1


def test_samples_in_the_middle_are_found() -> None:
    """Time-major values have their samples in dimension 1; bytes are per sample all the same."""
    body = Body(lambda h: h.unsqueeze(0).expand(3, -1, -1).tanh())
    captured = capture(body, torch.randn(4, 6), granularity="operator")
    values = dict(zip((v.name for v in captured.graph.values), captured.batch_dims, strict=True))
    sizes = {v.name: v.nbytes for v in captured.graph.values}
    assert values["linear_1"] == 1
    assert sizes["linear_1"] == 3 * 8 * 4
