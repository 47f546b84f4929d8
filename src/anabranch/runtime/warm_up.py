"""Every program of a rank's stages once, before anything travels.

What a GPU does when it first meets a program takes seconds and waits for the whole device: kernels
are loaded, compiled, chosen by trial, and memory is allocated. Ranks that do so one after the
other, each when its first micro-batch arrives, wait for each other; here all do it at once. Inputs
are zeros of the right shapes, and nothing is kept: not gradients, not buffers that change, not
random numbers. The first update needs no such step: it comes when all ranks have told each other
their totals, so nothing is under way then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from anabranch.graph.capture import Captured
from anabranch.runtime.compute.outcome import Key
from anabranch.runtime.compute.reverted import unchanged_state
from anabranch.runtime.messages import gradient_ports
from anabranch.runtime.worker import Worker
from anabranch.schedule.schedule import Kind


def warm_up(
    worker: Worker, captured: Captured, leaves: Mapping[str, Tensor], *, train: bool = True
) -> int:
    """Compute one micro-batch of each stage and size of a worker, forward and backward.

    Args:
        captured: what the worker computes.
        leaves: the tensors of a batch of the worker's size.
        train: with backwards.

    Returns:
        The number of programs.
    """
    keys: dict[tuple[int, int], Key] = {}
    for action in worker.actions:
        if action.kind is Kind.FORWARD:
            key = action.stage, action.microbatch
            start, stop = worker.layout.slice(*key)
            keys.setdefault((action.stage, stop - start), key)
    with _nothing_kept(captured):
        worker.compute.begin(leaves, 0, train=train)
        for key in keys.values():
            _compute(worker, key, train=train)
        worker.compute.begin({}, 0, train=train)  # which lets go of the leaves
    return len(keys)


def _compute(worker: Worker, key: Key, *, train: bool) -> None:
    program, place = worker.layout.program(*key), worker.place

    def zeros(value: int) -> Tensor:
        shape, dtype = program.shapes[value]
        return torch.zeros(shape, dtype=dtype, device=place)

    worker.compute.forward(key, {port.value: zeros(port.value) for port in program.inputs})
    if train:
        outputs = gradient_ports(program.outputs)
        worker.compute.backward(key, {port: zeros(port.value) for port in outputs})
        worker.compute.weight_gradients(key)


@contextmanager
def _nothing_kept(captured: Captured) -> Iterator[None]:
    """Leave gradients, buffers and what else the forward changes as they are."""
    parameters = list(captured.parameters().values())
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with unchanged_state(captured):
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
