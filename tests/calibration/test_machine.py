"""The machine at hand, and what another one differs in."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from anabranch.calibration.machine import difference, this_machine


def test_this_machine_has_its_cores_and_its_torch():
    """What a calibration holds for is what is here, without an import of torch."""
    here = this_machine()
    assert here.cores == os.cpu_count()
    assert torch.__version__.startswith(here.torch.partition("+")[0])
    assert here.processor


def test_a_difference_names_both_sides():
    """Whoever reads it has to see whether the old figures may still do."""
    here = this_machine()
    assert difference(here, here) == ""
    said = difference(replace(here, cores=96, torch="1.13"), here)
    assert f"it has 96 cores, this one {here.cores}" in said
    assert f"it ran torch 1.13, here is {here.torch}" in said
    assert "processor" not in said
