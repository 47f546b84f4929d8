"""Rules for library code: the same values, and nothing is left behind."""

from __future__ import annotations

import pytest
import torch

from anabranch.graph.library_rules import library_rules
from anabranch.graph.module_state import with_attributes


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
