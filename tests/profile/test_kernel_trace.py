"""Traces of kernels by hand, and the line between two of them."""

import pytest

from anabranch.graph.opgraph import Op, OpGraph, Parameter, Value
from anabranch.profile.data_sheets import DATA_SHEETS
from anabranch.profile.kernel_trace import Kernel, KernelTrace, TracedModel, checked_counts

SHEET = DATA_SHEETS["v100"]


def copies(*nbytes: float, name: str = "copy_") -> KernelTrace:
    """One operator that copies in its forward, once for each size."""
    kernels = tuple(Kernel(name, n, (), "float32") for n in nbytes)
    return KernelTrace(kernels, (0,) * len(nbytes), (0,) * len(nbytes), (100,), (10,), (0,))


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


def test_counts_ascend() -> None:
    """As a profile has them."""
    assert checked_counts("v100", (4, 1, 4), "float32") == [1, 4]
    with pytest.raises(ValueError, match=r"cannot estimate at \[0, 1\] samples"):
        checked_counts("v100", (1, 0), "float32")


def test_gradients_of_weights_are_told_by_how_their_sizes_grow() -> None:
    """[n, 8] x [8, 4]: one product over the samples, and what it is added to. The other product has
    as many rows as there are samples, and no copy is a gradient of weights.
    """

    def backward(n: int) -> KernelTrace:
        kernels = (
            Kernel("copy_", 1e6 * n, (), "float32"),
            Kernel("mm", 0, ((n, 8, 4, 1),), "float32"),
            Kernel("mm", 0, ((8, 4, n, 1),), "float32"),
            Kernel("sum", 16 * n + 16, (), "float32"),
            Kernel("sum", 16 * n + 4 * n, (), "float32"),
            Kernel("add_", 384, (), "float32"),
        )
        return KernelTrace(kernels, (1,) * 6, (1,) * 6, (0, 0), (0, 0), (0, 0))

    ops = Op("before"), Op("linear", ("weight",))
    graph = OpGraph(ops, (Value(0, (1,), 32),), (Parameter("weight", 128),))
    waiting = TracedModel(graph, backward(2), backward(4)).waiting
    assert waiting.kernels.tolist() == [0, 0, 0, 1, 0, 1]
    assert waiting.products.tolist() == [0, 1]
    cost = TracedModel(graph, backward(2), backward(4)).profile("v100", (2,), "float32").costs[1]
    product_s = float(SHEET.matmul_s(8, 4, 2, 1, "float32"))
    small_s = 432 / SHEET.effective_bandwidth
    assert cost.weight_s == pytest.approx([product_s + small_s + 3 * SHEET.launch_s], rel=0.01)


def test_without_weights_all_are_gradients_of_inputs() -> None:
    """The same product of two values, or of parameters that are not trained."""
    kernels = (Kernel("mm", 0, ((8, 4, n, 1),), "float32") for n in (2, 4))
    few, many = (KernelTrace((kernel,), (1,), (0,), (0,), (0,), (0,)) for kernel in kernels)
    frozen = OpGraph((Op("a", ("w",)),), (), (Parameter("w", 4, trainable=False),))
    for graph in (frozen, OpGraph((Op("a"),), ())):
        (cost,) = TracedModel(graph, few, many).profile("v100", (2,), "float32").costs
        assert cost.weight_s == (0.0,)
        assert cost.backward_s[0] > 0
