"""Stages as plain modules of the user's own submodules."""

import pytest
import torch
from torch import Tensor, nn

from anabranch.errors import NotExpressibleError
from anabranch.graph.capture import capture
from anabranch.interchange.chain import chain_of
from anabranch.interchange.stages import PlainStage, plain_stages
from anabranch.interchange.torchtitan import torchtitan_options
from anabranch.workload import Workload
from tests.interchange.models import MODELS, Blocks, batch, chain
from tests.runtime.small import Built, built, plan, tower


def stages(model: Built, count: int, samples: int = 4, **options: object) -> list[PlainStage]:
    chosen = plan(model, count, batch_size=samples, microbatch_size=samples, **options)
    return plain_stages(chain_of(chosen, model.captured.graph), model.captured)


def loss_through(made: list[PlainStage], model: Built, tensors: dict[str, Tensor]) -> Tensor:
    leaves = model.captured.programs.with_statistics(model.captured.layout.flatten(tensors))
    values: tuple[Tensor, ...] = ()
    for stage in made:
        result = stage.module(*values, batch={name: leaves[name] for name in stage.leaves})
        values = result if isinstance(result, tuple) else (result,)
        for value, like in zip(values, stage.outputs, strict=True):
            assert (value.shape, value.dtype) == (like.shape, like.dtype)
    return values[0].squeeze()


@pytest.mark.parametrize("name", MODELS)
def test_stages_in_a_row_are_the_model(name: str):
    """Loss and gradients; every parameter is the model's own, under its full name."""
    model = chain(name)
    made, tensors = stages(model, 3), batch(name, 4)
    parameters = dict(model.module.named_parameters())
    held = {n: p for stage in made for n, p in stage.module.named_parameters()}
    assert held.keys() == parameters.keys()
    assert all(held[n] is p for n, p in parameters.items())
    keys = {key for stage in made for key in stage.module.state_dict()}
    assert keys == model.module.state_dict().keys()
    loss = loss_through(made, model, tensors)
    found = torch.autograd.grad(loss, list(held.values()))
    result = model.module(**tensors)
    expected = result if isinstance(result, Tensor) else result["loss"]
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(expected, list(held.values()))
    for one, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_cuts_between_submodules_leave_them_whole():
    """They are the user's objects, called through their hooks; what is put in their place runs."""
    model = chain("blocks")
    made = stages(model, 4)
    assert [stage.called for stage in made] == [
        ("words", "blocks.0", "act"),
        ("blocks.1", "blocks.2", "blocks.3", "act"),
        ("blocks.4", "blocks.5", "act"),
        ("blocks.6", "blocks.7", "act", "head"),
    ]
    names = ("blocks.1", "blocks.2", "head")
    for name in names[:2]:
        assert made[1].module.get_submodule(name) is model.module.get_submodule(name)
    calls: list[str] = []
    handles = [
        model.module.get_submodule(name).register_forward_hook(
            lambda *_, name=name: calls.append(name)
        )
        for name in names
    ]
    loss_through(made, model, batch("blocks", 4))
    for handle in handles:
        handle.remove()
    assert tuple(calls) == names
    tensors = batch("blocks", 4)
    before = loss_through(made, model, tensors)
    made[1].module.blocks.add_module("1", _Doubled())
    assert loss_through(made, model, tensors) != before


class _Doubled(nn.Module):
    def forward(self, x: Tensor, scale: float, *, keep: bool) -> tuple[Tensor, None]:
        return 2 * x, None


def test_a_layer_that_is_cut_keeps_its_operations():
    """The children that lie in one stage are still the user's."""
    torch.manual_seed(0)
    module, example = MODELS["llama"](), batch("llama", 4)
    model = Built(capture(module, example), Workload(module, example))
    called = [stage.called for stage in stages(model, 3)]
    assert called[1] == ("model.layers.0.mlp", "model.layers.1.self_attn")
    assert "model.layers.1.mlp" in called[2]
    loss = loss_through(stages(model, 3), model, example)
    torch.testing.assert_close(loss, module(**example).loss)


class Frames(nn.Module):
    """Layers on the frames of all samples, four of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(tower(1) for _ in range(3)), nn.Linear(8, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        h = x.flatten(0, 1)
        for layer in self.layers:
            h = layer(h)
        return nn.functional.cross_entropy(self.head(h.unflatten(0, (-1, 4)).mean(1)), label)


def test_layers_on_the_frames_of_samples_are_left_whole():
    """What is sent is a view of their result, and made behind it."""
    module, example = Frames(), {"x": torch.randn(4, 4, 8), "label": torch.arange(4) % 3}
    model = Built(capture(module, example), Workload(module, example))
    made = stages(model, 3)
    assert [s.called for s in made] == [("layers.0",), ("layers.1",), ("layers.2", "head")]
    torch.testing.assert_close(loss_through(made, model, example), module(**example))


class Odd(nn.Module):
    """Takes a slice and gives what is inside away, through an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = tower(1), Inside(), nn.Linear(8, 3)

    def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
        h = self.second(self.first(x))
        return nn.functional.cross_entropy(self.head(h + self.second.kept), label)


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = tower(1)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.inner(x).tanh()
        return self.kept + x


def test_a_module_that_others_look_into_is_not_called_as_one():
    """Its operations stay, but those of its children that nobody looks into."""
    module, example = Odd(), batch("blocks", 4)
    model = Built(capture(module, example), Workload(module, example))
    made = stages(model, 2)
    called = {name for stage in made for name in stage.called}
    assert "second" not in called
    assert "second.inner" in called
    torch.testing.assert_close(loss_through(made, model, example), module(**example))


def test_recompute_is_part_of_the_module():
    """Activations of a stage are made again in its backward, with equal gradients."""
    model = chain("blocks")
    tensors, calls = batch("blocks", 4), []
    made = stages(model, 2, recompute=True)
    hook = model.module.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    loss_through(made, model, tensors).backward()
    hook.remove()
    model.module.zero_grad()
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("transformer", "stage 0 holds the parameter position, which belongs to no module"),
        ("llama", "a cut goes through model (LlamaModel)"),
        ("Chain", "a cut goes through body (Sequential)"),
    ],
)
def test_torchtitan_takes_children_and_list_entries(name: str, reason: str):
    """Everything else is refused, with the name of what is cut."""
    model = chain(name) if name in MODELS else built(name)
    chosen = plan(model, 3)
    with pytest.raises(NotExpressibleError) as caught:
        torchtitan_options(chosen, model.captured, chain_of(chosen, model.captured.graph))
    assert reason in str(caught.value)


def test_a_wrapper_with_the_loss_is_not_torchtitans_model():
    """Names are those within the module that has all parameters."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Blocks(4)

        def forward(self, x: Tensor, word: Tensor, label: Tensor) -> Tensor:
            return self.model(x, word, label)

    module, example = Wrapper(), batch("blocks", 4)
    captured = capture(module, example, granularity="block")
    model = Built(captured, Workload(module, example))
    chosen = plan(model, 2, recompute=True)
    options = torchtitan_options(chosen, captured, chain_of(chosen, captured.graph))
    assert options["model_part"] == "model"
    names = options["parallelism"]["module_fqns_per_model_part"]
    assert names[0][:2] == ["words", "blocks.0"]
    assert options["activation_checkpoint"] == {"mode": "full"}
