"""Kinds of devices that compute, by torch's names. No other file names one but the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Abilities of one kind of device in torch.

    Attributes:
        backend: library of its collectives in ``torch.distributed``; empty if it has none, or none
            whose order the runtime can keep.
        gloo: whether Gloo takes its tensors; if not, they are summed on the host.
        streams: whether it runs several streams, and copies from pinned memory meanwhile.
        own_memory: whether it has memory of its own, whose allocator counts.
        float64: whether it computes with numbers of 64 bits.
        environment: variables that must be set before processes are forked that will use it.
        settings: variables that a process must set before it uses the device. Every stream that may
            wait for another rank needs a queue of the driver, and connections are made at the
            start, not at the first use of an algorithm.
        queues: name of the variable for the number of queues, 8 by default.
    """

    backend: str = ""
    gloo: bool = False
    streams: bool = True
    own_memory: bool = True
    float64: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    queues: str = ""


CPU = "cpu"
HOST = DeviceKind(gloo=True, streams=False, own_memory=False)
ACCELERATORS: Mapping[str, DeviceKind] = {
    "cuda": DeviceKind(
        "nccl",
        gloo=True,
        environment={"PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
        settings={"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_RUNTIME_CONNECT": "0"},
        queues="CUDA_DEVICE_MAX_CONNECTIONS",
    ),
    "xpu": DeviceKind(),
    "hpu": DeviceKind(float64=False),
    "npu": DeviceKind(float64=False),
    "mps": DeviceKind(streams=False, own_memory=False, float64=False),
}
"""Name in torch -> kind."""

GPU = next(iter(ACCELERATORS))
"""Kind of accelerator on a machine that has none."""

GRAPHS = "cudagraphs"
"""Torch's name of the backend that replays recorded passes."""


def kind_of(name: str) -> DeviceKind:
    """Return the kind of a device; one that is not listed is treated as the CPU is."""
    return ACCELERATORS.get(name.partition(":")[0], HOST)


def is_measured(name: str) -> bool:
    """Return True if times of a device are measured on this machine, not estimated."""
    return name.partition(":")[0] in (CPU, *ACCELERATORS)


OWN_ERRORS = (
    *(
        sign.format(name)
        for name in ACCELERATORS
        for sign in ("{} error", "{} out of memory", "{} failure", "unhandled {} error")
    ),
    "device-side assert",
    "invalid usage",
)
"""Words of torch and its libraries if this rank's own device fails, in small letters."""
