"""Messages through NCCL, without NCCL: when receives are posted, how many channels there may be.

``test_gpu`` has the messages themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from anabranch.errors import InvalidPlanError
from anabranch.runtime.transport import Channel, NcclTransport, Spec
from anabranch.runtime.transport.nccl import NUM_STREAMS, require_streams
from tests.runtime.transport.local import Hub, LocalTransport

CPU = torch.device("cpu")
FIRST, SECOND = Channel(0, 1, 0), Channel(0, 1, 1)
SPECS = [(torch.Size([4]), torch.float32)]


class SlowGpu:
    """A ``GpuWire`` whose GPU comes to a fence when somebody waits for it, or is let go on."""

    def __init__(self) -> None:
        self.posted: list[Channel] = []
        self.fences: list[SlowFence] = []

    def send(self, channel: Channel, tensors: Sequence[Tensor]) -> list[Any]:
        return []

    def receive(
        self, channel: Channel, specs: Sequence[Spec], device: torch.device
    ) -> tuple[list[Any], list[Tensor]]:
        self.posted.append(channel)
        return [], [torch.empty(shape, dtype=dtype) for shape, dtype in specs]

    def fence(self) -> SlowFence:
        self.fences.append(SlowFence())
        return self.fences[-1]


class SlowFence:
    def __init__(self) -> None:
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed

    def synchronize(self) -> None:
        self.is_passed = True


def transport(gpu: SlowGpu) -> NcclTransport:
    otherwise = LocalTransport(Hub(), 1)
    return NcclTransport(1, [FIRST, SECOND], gpu, CPU, 1.0, otherwise)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_no_more_receives_are_posted_than_slots(slots: int) -> None:
    """A receive takes memory from when it is posted until the GPU takes the message. The host asks
    for all receives of a step at once, as far as its own actions allow, and the GPU is far behind.
    """
    gpu = SlowGpu()
    end = transport(gpu)
    receipts = [end.receive(SPECS, CPU, 0, 0) for _ in range(slots)]
    for number in range(10):
        receipts[number].wait()
        receipts.append(end.receive(SPECS, CPU, 0, 0))
        passed = sum(fence.is_passed for fence in gpu.fences)
        assert len(gpu.posted) - passed <= slots


def test_a_receive_is_posted_as_soon_as_the_host_sees_the_gpu_far_enough() -> None:
    """In whatever call; and a slow channel holds up no other."""
    gpu = SlowGpu()
    end = transport(gpu)
    end.receive(SPECS, CPU, 0, 0).wait()
    end.receive(SPECS, CPU, 0, 0)
    other = end.receive(SPECS, CPU, 0, 1)
    assert gpu.posted == [FIRST, SECOND]
    gpu.fences[0].is_passed = True
    other.wait()
    assert gpu.posted == [FIRST, SECOND, FIRST]


def test_more_channels_than_streams_are_refused() -> None:
    """Two channels on one stream would wait for each other, though nothing in the plan does."""
    most = [Channel(0, rank, 0) for rank in range(1, NUM_STREAMS + 1)]
    require_streams(most)
    with pytest.raises(InvalidPlanError, match=r"rank 0 has 33 channels .* 32 streams .* fewer"):
        require_streams([*most, Channel(1, 0, 1)])
