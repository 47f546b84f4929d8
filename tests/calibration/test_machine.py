"""The machine at hand, and what another one differs in."""

import os
from dataclasses import replace

import torch

from anabranch.calibration.machine import computed_s, difference, this_machine


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


def test_what_idles_or_waits_for_a_disk_computes_nothing():
    """100 ticks a second: 1 s of users, 2 s nice, 3 s kernel, 6 s and 7 s of interrupts, 8 s that a
    hypervisor took; 4 s idle and 5 s of waiting do not count, nor what guests have of the users'.
    """
    assert computed_s("cpu  100 200 300 400 500 600 700 800 900 1000", 100) == 27.0
