"""Modules on the meta device: values by layer, the same under any plan, and only one's own."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anabranch import launch
from anabranch.errors import InfeasiblePlanError, TrainingError
from anabranch.graph.capture import capture
from anabranch.plans.plan import Plan, Prediction
from anabranch.runtime.asynchronous.pipeline import AsyncPipeline
from anabranch.runtime.guards import memory_budget
from anabranch.runtime.pipeline import Pipeline
from anabranch.runtime.reference import reference
from anabranch.runtime.state.initialisation import materialise, meta_names
from anabranch.schedule import SCHEDULES
from anabranch.verification import even_plan
from anabranch.workload import Workload

LIMIT_S = 60.0
WIDTH = 8


class Block(nn.Module):
    """Layers with buffers, without a bias, and a parameter of its own that it resets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("shift", torch.empty(WIDTH))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Its own tensors, and a gain on its layer's."""
        nn.init.uniform_(self.scale)
        nn.init.ones_(self.shift)
        with torch.no_grad():
            self.linear.weight.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).relu() * self.scale + self.shift


class Net(nn.Module):
    """An embedding that is read at both ends, and blocks between."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.Sequential(block(), block(), block())
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, word: Tensor, label: Tensor) -> Tensor:
        x = self.head(self.blocks(self.embedding(word)))
        return nn.functional.cross_entropy(x, label)


class Raw(nn.Module):
    """Makes its parameter in the constructor, which cannot be repeated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def batch(size: int = 8) -> dict[str, Tensor]:
    """Words and labels."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(16, (size,), generator=generator) for name in ("word", "label")}


def on_meta(*arguments: Any) -> nn.Module:
    """The model without values."""
    with torch.device("meta"):
        return Net(*arguments)


def workload(module: nn.Module) -> Workload:
    """With momentum, so that a second step shows whether the first was right."""
    return Workload(module, batch(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))


def plan_for(module: nn.Module, devices: int) -> tuple[Any, Plan]:
    """The captured module and an even plan for it."""
    captured = capture(module, batch())
    for samples in (4, 8):
        captured.programs.at(samples, device="cpu")  # once, rather than by every rank
    chosen = even_plan(captured.graph, devices, 8)
    stages = tuple(replace(s, microbatch_size=4) for s in chosen.stage_graph.stages)
    graph = SCHEDULES["1f1b"]().warm_up(replace(chosen.stage_graph, stages=stages))
    return captured, replace(chosen, stage_graph=graph)


def values(module: nn.Module) -> dict[str, Tensor]:
    """Everything that is not on the meta device."""
    named = (*module.named_parameters(), *module.named_buffers())
    return {name: tensor.detach() for name, tensor in named if not tensor.is_meta}


def whole(seed: int = 5) -> nn.Module:
    """All values, in one process."""
    module = on_meta()
    assert materialise(module, seed=seed) == []
    return module


def test_layers_are_initialised_as_they_do_it_themselves() -> None:
    """Linear layers within their bounds, halved by the block around them; norms at one and zero;
    shared tensors stay shared.
    """
    module = whole()
    assert module.head.weight is module.embedding.weight
    block = module.blocks[1]
    weight = block.linear.weight.detach()
    bound = WIDTH**-0.5
    assert 0.4 * bound < float(weight.abs().max()) <= 0.5 * bound
    assert torch.equal(block.norm.running_var, torch.ones(WIDTH))
    assert torch.equal(block.shift, torch.ones(WIDTH))
    assert block.norm.num_batches_tracked == 0
    scale = block.scale.detach()
    assert 0 <= float(scale.min()) < float(scale.max()) <= 1
    assert not torch.equal(weight, module.blocks[0].linear.weight)


def test_values_depend_on_seed_and_name_alone() -> None:
    """Alone or with others, in whatever state the generator is, which is left as it was."""
    expected = values(whole())
    for name in expected:
        torch.rand(3)
        module, before = on_meta(), torch.get_rng_state()
        materialise(module, [name], seed=5)
        assert torch.equal(torch.get_rng_state(), before)
        assert values(module).keys() == {name}
        assert torch.equal(values(module)[name], expected[name])
    assert not torch.equal(values(whole(6))["embedding.weight"], expected["embedding.weight"])


class General(nn.Module):
    """As in transformers: one method that initialises any layer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 2.0)


def test_the_models_own_rule_for_layers_goes_last() -> None:
    """What it passes over is what the layer does itself."""
    with torch.device("meta"):
        module = General()
    assert materialise(module, seed=0) == []
    assert torch.equal(module.layers[0].weight, torch.full((3, 3), 2.0))
    assert float(module.layers[0].bias.detach().abs().max()) <= 3**-0.5
    assert torch.equal(module.layers[1].weight, torch.ones(3))


@pytest.mark.dist
def test_a_rank_has_values_of_its_own_stages_and_no_others() -> None:
    """Gradients are bitwise those of one process that was initialised alike, and the bytes of a
    rank are those of its stages, before and after it has trained.
    """
    captured, chosen = plan_for(on_meta(), 3)
    captured.evaluation().programs.at(4, device="cpu")

    def work() -> tuple[dict[str, Tensor], set[str], set[str], set[str]]:
        torch.manual_seed(5)
        pipe = Pipeline(workload(captured.module), chosen, captured=captured, exact=True)
        held = {*values(captured.module)}
        assert held == {*pipe._state.parameters, *pipe._state.buffers}
        loss, gradients = pipe.gradients(batch())
        gradients = {name: g.clone() for name, g in gradients.items()}
        gradients["loss"] = torch.tensor(loss, dtype=torch.float64)
        pipe.step(batch())
        pipe.evaluate([batch()])
        return gradients, held, {*values(captured.module)}, {*meta_names(captured.module)}

    found = launch.run(work, 3, timeout=LIMIT_S)
    module = whole()
    size = chosen.stage_graph.stages[0].microbatch_size
    expected = reference(module, batch(), [(i, i + size) for i in range(0, 8, size)])
    gradients = {name: g for part, *_ in found for name, g in part.items()}
    assert gradients.pop("loss") == expected.loss
    assert gradients.keys() == expected.gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected.gradients[name]), name
    everything = {*values(module)}
    assert set.union(*(held for _, held, _, _ in found)) == everything
    for _, held, after, nothing in found:
        assert held == after == everything - nothing
        assert held != everything


@pytest.mark.dist
def test_a_model_that_fits_in_stages_alone_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks whose memory holds half of the model each, by the check; with less it refuses."""
    captured, chosen = plan_for(on_meta(), 2)
    weights = [p.numel() * 4 for p in captured.module.parameters()]
    peak = sum(weights) // 2
    chosen = replace(chosen, predicted=Prediction(1.0, 1.0, 0.0, (peak, peak)))

    def work() -> float:
        pipe = Pipeline(workload(captured.module), chosen, captured=captured)
        return pipe.step(batch())

    monkeypatch.setattr(memory_budget, "device_digest", lambda device: os.getpid().to_bytes(7))
    monkeypatch.setattr(memory_budget, "_free", lambda device: peak)
    losses = launch.run(work, 2, timeout=LIMIT_S)
    assert losses[0] == losses[1]
    monkeypatch.setattr(memory_budget, "_free", lambda device: peak // 2)
    with pytest.raises(InfeasiblePlanError, match="more at the peak"):
        launch.run(work, 2, timeout=LIMIT_S)


@pytest.mark.dist
def test_a_checkpoint_gives_values_to_what_cannot_initialise_itself(tmp_path: Path) -> None:
    """Without one the layer is named; with one, a rank reads what is its own."""
    real, folder = Net(Raw), tmp_path / "saved"
    captured, chosen = plan_for(real, 1)
    Pipeline(workload(real), chosen, captured=captured).save(folder)
    meta = on_meta(Raw)
    captured, chosen = plan_for(meta, 1)

    def fresh() -> None:
        Pipeline(workload(meta), chosen, captured=captured).step(batch())

    with pytest.raises(TrainingError, match=r"such as blocks\.0\.weight: Raw fills weight"):
        launch.run(fresh, 1, timeout=LIMIT_S)

    def resumed() -> dict[str, Tensor]:
        Pipeline.resume(folder, workload(meta), chosen, captured=captured).gradients(batch())
        return values(meta)

    (found,) = launch.run(resumed, 1, timeout=LIMIT_S)
    assert all(torch.equal(found[name], value) for name, value in values(real).items())


class Untied(Net):
    """Its head has weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 16)


@pytest.mark.dist
def test_training_without_a_flush_begins_alike() -> None:
    """A drain after every mini-batch is synchronous training, from the same values."""
    with torch.device("meta"):
        captured, chosen = plan_for(Untied(), 2)
    stages = tuple(
        replace(stage, microbatch_size=8, in_flight=1) for stage in chosen.stage_graph.stages
    )
    chosen = replace(chosen, stage_graph=replace(chosen.stage_graph, stages=stages))

    def work(make: Any) -> list[float]:
        torch.manual_seed(5)
        pipe = make(workload(captured.module), chosen, captured=captured)
        return [pipe.step(batch()) for _ in range(3)]

    makers = (Pipeline, partial(AsyncPipeline, policy="stash"))
    flushed, drained = (launch.run(partial(work, make), 2, timeout=LIMIT_S)[0] for make in makers)
    assert flushed == drained


class Fails(nn.Linear):
    """Reads what is not there."""

    def reset_parameters(self) -> None:
        raise ZeroDivisionError("by nothing")


def test_an_initialisation_that_raises_is_named() -> None:
    """With layer, class and error."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2))
    module[0].__class__ = Fails
    with pytest.raises(TrainingError, match=r"of 0 \(Fails\).*ZeroDivisionError: by"):
        materialise(module, seed=0)


class Constant(nn.Module):
    """Has a table that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.table).square().mean()


def test_constants_without_values_are_refused() -> None:
    """Nothing could fill them."""
    with torch.device("meta"):
        module = Constant()
    data = {"x": torch.ones(4, 4)}
    captured = capture(module, data)
    with pytest.raises(TrainingError, match=r"shape \[4\] .* neither parameter nor buffer"):
        Pipeline(Workload(module, data), even_plan(captured.graph, 1, 4), captured=captured)
