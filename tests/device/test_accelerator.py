"""The accelerator of a process, as far as a machine without one can tell."""

import pytest
import torch

from anabranch.device import accelerator
from anabranch.device.kinds import ACCELERATORS
from anabranch.errors import TrainingError


def test_the_gpu_becomes_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL, generators and the user's own code ask for the current device."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    accelerator.claim(torch.device("cuda", 1))
    accelerator.claim(torch.device("cpu"))
    assert chosen == [torch.device("cuda", 1)]


def test_a_fork_after_cuda_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA itself says only that it cannot be initialised, from somewhere in the model."""
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(TrainingError, match=r"forked from a process that had used CUDA.*torchrun"):
        accelerator.claim(torch.device("cuda", 0))


@pytest.mark.parametrize("kind", ACCELERATORS)
def test_every_kind_can_be_asked_without_one(kind: str) -> None:
    """A torch that does not know a kind has no such devices, and nothing is raised."""
    assert accelerator.count(kind) == 0 or torch.accelerator.is_available()
    if kind != "npu":  # torch names it only with its plugin
        assert accelerator.is_on_accelerator(torch.device(kind, 0))


def test_the_host_is_no_accelerator() -> None:
    """It has one stream, nothing of its own, and calls for the device do nothing."""
    cpu = torch.device("cpu")
    assert not accelerator.is_on_accelerator(cpu)
    assert not accelerator.has_streams(cpu)
    assert not accelerator.has_own_memory(cpu)
    assert accelerator.has_collectives(cpu)
    assert accelerator.generators(cpu) == [torch.default_generator]
    assert accelerator.identity(cpu) == accelerator.backend(cpu) == ""
    accelerator.claim(cpu)
    accelerator.synchronize(cpu)
    tensor = torch.ones(1)
    assert accelerator.pinned(tensor, cpu) is tensor


def test_shared_memory_and_narrow_numbers_are_known() -> None:
    """A device of the host's memory is budgeted as the host, and has no numbers of 64 bits."""
    mps = torch.device("mps", 0)
    assert not accelerator.has_own_memory(mps)
    assert accelerator.widest_float(mps) == torch.float32
    assert accelerator.widest_float(torch.device("cpu")) == torch.float64
    assert not accelerator.has_collectives(mps)
