"""Messages between GPUs; the rules are those of ``test_contract``."""

import os
import subprocess
import sys

import pytest
import torch

from anabranch.runtime.ranks.mesh import Mesh
from anabranch.runtime.transport import Channel, HostTransport, NcclTransport, Transport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.dist,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CHANNELS = [Channel(s, 1 - s, tag) for s in (0, 1) for tag in (0, 1)]


def exchange_tensors(transport: Transport, rank: int, device: torch.device) -> None:
    """Both send large, small and empty tensors, with two tags, and receive the tags in another
    order; numbers made on the compute stream just before arrive.
    """
    for i in range(5):
        for tag in (0, 1):
            made = torch.full((1 << 20,), float(rank), device=device).mul_(10).add_(i + 100 * tag)
            parts = [made, torch.empty(0, 3, device=device), made.view(2, -1).t()[:7]]
            transport.send([*parts, torch.tensor(True)], 1 - rank, tag)
            del made, parts
    specs = [
        (torch.Size([1 << 20]), torch.float32),
        (torch.Size([0, 3]), torch.float32),
        (torch.Size([7, 2]), torch.float32),
        (torch.Size([]), torch.bool),
    ]
    for tag in (1, 0):
        posted = [transport.receive(specs, device, 1 - rank, tag) for _ in range(5)]
        for i, receipt in enumerate(posted):
            tensors = receipt.wait()
            expected = (1 - rank) * 10 + i + 100 * tag
            assert [(t.shape, t.dtype) for t in tensors] == specs
            assert all(t.device == device for t in tensors)
            assert (tensors[0] == expected).all()
            assert (tensors[2] == expected).all()
            assert tensors[3]
    transport.flush()


def main(kind: str) -> None:
    """One of two ranks."""
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank if kind == "nccl" else 0)
    torch.cuda.set_device(device)
    mesh = Mesh(range(2), device=device, timeout=60.0)
    transport = mesh.transport(device, CHANNELS if kind == "nccl" else ())
    assert type(transport) is {"nccl": NcclTransport, "host": HostTransport}[kind]
    exchange_tensors(transport, rank, device)
    mesh.barrier()
    transport.close()
    mesh.close()


@pytest.mark.parametrize(
    "kind",
    [
        "host",
        pytest.param(
            "nccl", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
        ),
    ],
)
def test_gpus_exchange_tensors(kind: str) -> None:
    """Two interpreters under torchrun, because a process that has used CUDA cannot be forked."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*command, "-m", __name__, kind], check=True, timeout=120)


if __name__ == "__main__":
    main(sys.argv[1])
