"""Errors of torch.distributed: those of a lost peer, and those of this rank's own GPU."""

import pytest
import torch
import torch.distributed as dist

from anabranch.runtime.guards.failure import PeerLostError
from anabranch.runtime.transport import guarded

OWN = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    dist.DistBackendError("NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO)"),
    dist.DistBackendError("ncclInvalidUsage: Duplicate GPU detected; invalid usage"),
]
LOST = [
    RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4242"),
    RuntimeError("Timed out waiting 600000ms for recv operation to complete"),
    dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
    dist.DistNetworkError("failed to recv, got 0 bytes"),
]


@pytest.mark.parametrize("error", OWN)
def test_an_error_of_this_rank_s_own_gpu_passes(error: RuntimeError) -> None:
    """It is the cause of a failure; as a lost peer it would be told as a consequence of one."""

    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError) as raised:
        guarded(fail)
    assert raised.value is error


@pytest.mark.parametrize("error", LOST)
def test_a_broken_connection_is_a_lost_peer(error: RuntimeError) -> None:
    """The cause is elsewhere."""

    def fail() -> None:
        raise error

    with pytest.raises(PeerLostError, match="the connection to another rank broke"):
        guarded(fail)
