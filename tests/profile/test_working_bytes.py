"""Bytes that a pass of an operator takes while it runs."""

from __future__ import annotations

import torch

from anabranch.profile.storages import Watch
from anabranch.profile.working_bytes import WorkingBytes


def test_a_forward_has_results_that_nobody_keeps() -> None:
    """Two numbers of 160 bytes are alive at once, the next result and the one before it. What is
    kept in the end is no work.
    """
    x = torch.ones(4, 10)
    work = WorkingBytes(1, [x])
    with Watch(work.see), work.forward(0):
        y = x * 2 + 1
        y = y * 3
    assert work.nbytes([0]) == [320]
    assert work.nbytes([320]) == [0]


def test_a_backward_has_gradients_of_activations() -> None:
    """Of 160 bytes each that which arrived, and of three tanh the next one and the one after it;
    what is given back meanwhile makes room for the last.
    """
    x, gradient = torch.ones(4, 10, requires_grad=True), torch.ones(4, 10)
    work = WorkingBytes(1, [x, gradient])
    with Watch(work.see), work.forward(0):
        y = x.tanh().tanh().tanh()
    with Watch(work.see), work.backward(0, [gradient]):
        y.backward(gradient)
    assert work.nbytes([480]) == [480]
