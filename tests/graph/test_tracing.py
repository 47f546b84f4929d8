"""Checks of the data: those that only raise are left out, those that choose are refused."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from anabranch.errors import CaptureError
from anabranch.graph.capture import capture
from anabranch.graph.export import CaptureWarning
from anabranch.graph.module_state import with_attributes
from anabranch.graph.tracing import library_rules, rare_collection


def asserted(x: Tensor) -> Tensor:
    assert (x < 100).all(), "too large"
    return x


def refused(x: Tensor) -> Tensor:
    if x.max() > 100:
        raise ValueError("too large")
    return x


def negated(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        raise ValueError(f"not finite: {x}")
    return x


def several(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all() or (x.min() < -100 and x.max() > 100):
        raise ValueError("not finite, or too far apart")
    return x


def asked(x: Tensor) -> Tensor:
    if x.max().item() > 100 or bool(x.isnan().any()):
        raise ValueError("too large")
    return x


def otherwise(x: Tensor) -> Tensor:
    if (x < 100).all():
        x = x + 1
    else:
        raise ValueError("too large")
    return x


def chosen(x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = -x
    return x


class Checked(nn.Module):
    def __init__(self, check: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.check, self.layer = check, nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.check(x)).square().mean()


@pytest.mark.parametrize("check", [asserted, refused, negated, several, asked, otherwise])
def test_a_check_that_only_raises_is_left_out_and_told(check: Callable[[Tensor], Tensor]) -> None:
    """With its file and line; afterwards tensors have their truth again."""
    module = Checked(check)
    with pytest.warns(CaptureWarning, match=r"test_tracing.py:\d+ \((if|assert)"):
        captured = capture(module, torch.randn(4, 3))
    assert len(captured.graph) == 1
    assert not torch.tensor(False)


def test_a_choice_is_refused() -> None:
    """Its two ways have other operations."""
    with pytest.raises(CaptureError, match=r"if x.sum\(\) > 0"):
        capture(Checked(chosen), torch.randn(4, 3))


def test_masks_are_made_by_broadcasting_with_the_same_entries() -> None:
    """Gemma3 lets the tokens of an image see each other, by a function that vmap is applied to."""
    masking = pytest.importorskip("transformers.masking_utils")
    blocks = torch.tensor([[-1, 0, 0, -1, 1, 1], [0, 0, 0, 0, -1, -1]])
    function = masking.or_masks(masking.causal_mask_function, masking.blockwise_overlay(blocks))
    options = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": function}
    options |= {"use_vmap": True, "allow_is_causal_skip": False}
    expected = masking.sdpa_mask(**options)
    before = masking._vmap_expansion_sdpa
    with library_rules():
        assert masking._vmap_expansion_sdpa is not before
        assert torch.equal(masking.sdpa_mask(**options), expected)
    assert masking._vmap_expansion_sdpa is before


def test_attributes_are_put_back_also_those_that_were_not_there() -> None:
    """After an error too."""

    class Holder:
        here = 1

    def fails() -> None:
        with with_attributes([(Holder, "here", 2), (Holder, "new", 3)]):
            assert (Holder.here, Holder.new) == (2, 3)  # type: ignore[attr-defined]
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert Holder.here == 1
    assert not hasattr(Holder, "new")


def test_collection_of_garbage_is_rare_inside_and_as_before_outside() -> None:
    """A user who has switched it off, or made it rarer, finds it so."""
    before = gc.get_threshold()
    try:
        for own, inside in ((700, 20_000), (50_000, 50_000), (0, 0)):
            gc.set_threshold(own, 10, 10)
            with rare_collection():
                assert gc.get_threshold()[0] == inside
            assert gc.get_threshold() == (own, 10, 10)
    finally:
        gc.set_threshold(*before)
