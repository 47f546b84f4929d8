"""Operations on folded samples of which neither sizes nor names tell that they keep the order."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from anabranch.graph.capture import capture
from tests.graph.chain import check_split, random_stages
from tests.graph.test_call_traits import FOLDS, Tower
from tests.graph.test_programs import operator

doubled = operator("doubled", lambda h: h * 2)
reversed_rows = operator("reversed_rows", lambda h: h.flip(0))
neighbours_swapped = operator("neighbours_swapped", lambda h: h[torch.arange(len(h)) ^ 4])


def tower(function: Callable[[Tensor], Tensor]) -> Tower:
    """Layers on the frames of all samples, four each, after a function of these."""
    unfold = FOLDS["frames"][1]
    return Tower(lambda x: function(x.flatten(0, 1)), unfold)


def is_cut(function: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether layers on the folded samples are operators of their own."""
    model = capture(tower(function), (x, torch.randn(len(x))))
    return any(op.name == "layers.1.mlp" for op in model.graph.ops)


REORDERED: dict[str, Callable[[Tensor], Tensor]] = {
    "operator of another library": reversed_rows,
    "neighbours": neighbours_swapped,
    "upside down": torch.flipud,
    "turned": lambda h: h.rot90(2, (0, 1)),
    "taken by position": lambda h: F.dropout(h, 0.0).take(
        torch.arange(h.numel()).flip(0).view(h.shape)
    ),
    "looked up": lambda h: F.embedding(torch.arange(len(h)).flip(0), h),
    "padded": lambda h: F.pad(h, (0, 0, 4, -4)),
}


@pytest.mark.parametrize("name", REORDERED)
def test_samples_in_another_order_are_not_cut(name: str) -> None:
    """A slice of such rows is of other samples than its stage computes."""
    assert not is_cut(REORDERED[name], torch.randn(4, 4, 6))


@pytest.mark.parametrize("samples", [2, 4])
def test_operator_that_keeps_the_order_is_cut(samples: int) -> None:
    """An operator of another library is as good as PyTorch's own where numbers show it."""
    x, y = torch.randn(samples, 4, 6), torch.randn(samples)
    model = capture(tower(doubled), (x, y))
    assert any(op.name == "layers.1.mlp" for op in model.graph.ops)
    stages = random_stages(model.graph, 4, seed=0)
    assert check_split(model, (x, y), stages, exact=True) == 0.0


def test_equal_samples_tell_nothing() -> None:
    """With an example of zeros any order looks like the right one."""
    assert not is_cut(doubled, torch.zeros(4, 4, 6))


def test_model_without_numbers_is_planned_as_if_in_order() -> None:
    """Training compares gradients before its first step."""
    module = tower(doubled).to("meta")
    model = capture(module, (torch.empty(4, 4, 6, device="meta"), torch.empty(4, device="meta")))
    assert any(op.name == "layers.1.mlp" for op in model.graph.ops)


def test_generator_is_left_as_it_was() -> None:
    """Comparing draws no numbers of the user's."""
    x, y = torch.randn(4, 4, 6), torch.randn(4)
    module = tower(lambda h: doubled(h) + torch.rand_like(h))
    state = torch.get_rng_state()
    capture(module, (x, y))
    assert torch.equal(torch.get_rng_state(), state)
