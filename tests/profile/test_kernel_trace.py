"""Traces of kernels by hand, and the line between two of them."""

from __future__ import annotations

import pytest

from anabranch.graph.opgraph import Op, OpGraph
from anabranch.profile.data_sheets import DATA_SHEETS
from anabranch.profile.kernel_trace import Kernel, KernelTrace, TracedModel, checked_counts

SHEET = DATA_SHEETS["v100"]


def copies(*nbytes: float, name: str = "copy_") -> KernelTrace:
    """One operator that copies in its forward, once for each size."""
    kernels = tuple(Kernel(name, n, (), "float32") for n in nbytes)
    return KernelTrace(kernels, (0,) * len(nbytes), (0,) * len(nbytes), (100,), (10,))


def traced(few: KernelTrace, many: KernelTrace) -> TracedModel:
    return TracedModel(OpGraph((Op("a"),), ()), few, many)


def test_sizes_are_on_a_line() -> None:
    """2 MB at 2 samples and 3 MB at 4: 1 MB whatever the samples and half a MB for each."""
    found = traced(copies(2e6), copies(3e6)).profile("v100", (1, 8), "float32")
    expected = [SHEET.launch_s + n / SHEET.effective_bandwidth for n in (1.5e6, 5e6)]
    assert found.costs[0].forward_s == pytest.approx(expected)
    assert found.costs[0].backward_s == (0, 0)


def test_kept_bytes_are_per_sample() -> None:
    """What does not grow with the samples is not kept by each."""
    assert traced(copies(1), copies(1)).profile("v100", (1,), "float32").costs[0].kept_bytes == 0


def test_other_kernels_are_on_no_line() -> None:
    """Another number of kernels, or other ones, for other samples."""
    assert traced(copies(1), copies(2)).is_affine
    assert not traced(copies(1), copies(2, 3)).is_affine
    assert not traced(copies(1), copies(2, name="mul")).is_affine


def test_what_belongs_to_nothing_is_refused() -> None:
    """A trace is read from files too."""
    kernel = Kernel("mm", 1, (), "float32")
    with pytest.raises(ValueError, match="1 kernels, but 0 passes"):
        KernelTrace((kernel,), (), (0,), (0,), (0,))
    with pytest.raises(ValueError, match="none of 1 operators"):
        KernelTrace((kernel,), (0,), (1,), (0,), (0,))
    with pytest.raises(ValueError, match="the graph has 2 operators, the trace 1"):
        TracedModel(OpGraph((Op("a"), Op("b")), ()), copies(1), copies(1))


def test_counts_ascend() -> None:
    """As a profile has them."""
    assert checked_counts("v100", (4, 1, 4), "float32") == [1, 4]
    with pytest.raises(ValueError, match=r"cannot estimate at \[0, 1\] samples"):
        checked_counts("v100", (1, 0), "float32")
