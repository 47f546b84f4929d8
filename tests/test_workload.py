"""A workload is a value: it is checked when made, and changed by making another one."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from anabranch.workload import Workload, to_meta


def test_a_workload_is_changed_by_replacing_it():
    """It is frozen; the new one has the same module."""
    workload = Workload(torch.nn.Linear(2, 1), torch.ones(2, 2))
    with pytest.raises(FrozenInstanceError):
        workload.clip_norm = 1.0
    assert replace(workload, clip_norm=1.0).module is workload.module


def test_to_meta_keeps_the_nesting():
    """What is no tensor stays."""
    batch = {"a": (torch.ones(2), [torch.zeros(3)]), "b": 4}
    result = to_meta(batch)
    assert isinstance(result["a"], tuple)
    assert isinstance(result["a"][1], list)
    assert result["a"][0].is_meta
    assert result["a"][1][0].shape == (3,)
    assert result["b"] == 4
