"""The accelerator of a process: its memory, streams, events and random numbers, whatever its kind.

Streams and events are torch's common ones. Functions that torch has only under the name of a kind
are called in the module of that kind (``torch.get_device_module``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from anabranch.device.kinds import ACCELERATORS, GPU, kind_of
from anabranch.errors import TrainingError

T = TypeVar("T")


def default_gpu() -> torch.device:
    """Return the kind of accelerator that this torch is built for."""
    return torch.accelerator.current_accelerator() or torch.device(GPU)


def is_on_accelerator(device: torch.device) -> bool:
    """Return True for a device other than the CPU, and not for the meta device."""
    return device.type in ACCELERATORS


def has_streams(device: torch.device) -> bool:
    """Return True if work of a device runs beside the host on several streams."""
    return kind_of(device.type).streams


def has_own_memory(device: torch.device) -> bool:
    """Return True if a device has other memory than the host, and counts it."""
    return kind_of(device.type).own_memory


def has_collectives(device: torch.device) -> bool:
    """Return True if tensors of a device are summed on it; otherwise they go through the host."""
    return kind_of(device.type).gloo


def count(kind: str) -> int:
    """Return the number of devices of a kind on this host; 0 if torch does not know the kind."""
    module = _module(kind)
    return module.device_count() if module is not None else 0


def claim(device: torch.device) -> None:
    """Make an accelerator the current device of this process, for code that names no device.

    Raises:
        TrainingError: if the process was forked after its parent had used it.
    """
    if not is_on_accelerator(device):
        return
    module, name = _module(device.type), device.type.upper()
    if getattr(module, "_is_in_bad_fork", bool)():
        settings = " and ".join(f"{k}={v}" for k, v in kind_of(device.type).environment.items())
        advice = f", and set {settings} in the environment, so that torch looks for GPUs without "
        raise TrainingError(
            f"this rank was forked from a process that had used {name}, after which it cannot use "
            f'it itself: leave the model on the CPU, pass device="{device.type}" to the pipeline'
            f"{f'{advice}using them' if settings else ''}; or start the ranks with torchrun"
        )
    if hasattr(module, "set_device"):
        module.set_device(device)


def settings(device: torch.device) -> dict[str, str]:
    """Return the variables that a device reads at its first use, with the user's or our values."""
    ours = kind_of(device.type).settings
    return {name: os.environ.get(name, value) for name, value in ours.items()}


def prepare(device: torch.device) -> None:
    """Set the variables of ``settings``, unless this process has used the device."""
    if not getattr(_module(device.type), "is_initialized", bool)():
        os.environ.update(settings(device))


def identity(device: torch.device) -> str:
    """Return a name of the card itself, the same in all processes of a host."""
    if not is_on_accelerator(device):
        return ""
    find = getattr(_module(device.type), "get_device_properties", None)
    return str(getattr(find(device) if find else None, "uuid", f"{device}"))


def backend(device: torch.device) -> str:
    """Return the installed library of collectives between accelerators; empty if there is none."""
    name = kind_of(device.type).backend
    return name if name and torch.distributed.is_backend_available(name) else ""


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host from which a copy to a device does not block."""
    return tensor.pin_memory() if has_streams(device) else tensor


def host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return memory of the host for a copy of a tensor, which a device can fill by itself."""
    return torch.empty_like(tensor, device="cpu", pin_memory=has_streams(tensor.device))


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Event | None]:
    """Start to copy a tensor to the host; return the copy, and an event behind it, None if done."""
    if not has_streams(tensor.device):
        return tensor, None
    return host_like(tensor).copy_(tensor, non_blocking=True), record_event(tensor.device)


def widest_float(device: torch.device) -> torch.dtype:
    """Return the type with the most digits that a device computes with."""
    return torch.float64 if kind_of(device.type).float64 else torch.float32


def synchronize(device: torch.device) -> None:
    if is_on_accelerator(device):
        torch.accelerator.synchronize(device)


def new_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device=device)


def current_stream(device: torch.device) -> torch.Stream:
    """Return the stream into which operations of this thread go."""
    return torch.accelerator.current_stream(device)


def record_event(device: torch.device, *, timed: bool = False) -> torch.Event:
    """Record an event behind all work that the current stream has so far."""
    event = torch.Event(device, enable_timing=timed)
    event.record(current_stream(device))
    return event


def waiter(device: torch.device) -> Callable[[], None]:
    """Return a function that waits, in any thread, for all work of the current stream so far."""
    return record_event(device).synchronize if has_streams(device) else lambda: None


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """Run operations inside on a stream of their own, behind all work given before."""
    if not has_streams(device):
        yield
        return
    stream, current = new_stream(device), current_stream(device)
    stream.wait_stream(current)
    with stream:
        yield
    current.wait_stream(stream)


def recorded(work: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """Record the launches of some work; return a function that repeats them in the same memory.

    Raises:
        TrainingError: if this torch cannot record.
    """
    if not has_streams(device):
        return work
    if not hasattr(torch.accelerator, "Graph"):
        raise TrainingError(
            f"torch {torch.__version__} cannot record passes of {device.type.upper()}; take 2.13 "
            "or newer, another backend of compile, or none"
        )
    graph = torch.accelerator.Graph(capture_error_mode="thread_local")  # transports have threads
    with on_side_stream(device), graph:
        result = work()

    def replay() -> T:
        graph.replay()
        return result

    return replay


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of an accelerator's own memory, without those that torch holds."""
    return cast("int", _module(device.type).mem_get_info(device)[0])


def available_bytes(device: torch.device) -> int:
    """Return the bytes that tensors can take, with memory that torch holds but does not use."""
    held = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return free_bytes(device) + held


def generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators from which operations of a device draw: the host's, and its own."""
    own = [torch.default_generator]
    if is_on_accelerator(device):
        module = _module(device.type)
        if hasattr(module, "default_generators"):
            own.append(module.default_generators[device.index])
        else:
            own.append(module._get_default_mps_generator())
    return own


@contextmanager
def with_seed(seed: int, device: torch.device) -> Iterator[None]:
    """Context manager under which operations of a device draw from a seed; its generators are
    restored afterwards, so that loaders of data draw alike on every rank.
    """
    drawn_from = generators(device)
    before = [generator.get_state() for generator in drawn_from]
    for generator in drawn_from:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(drawn_from, before, strict=True):
            generator.set_state(state)


def _module(kind: str) -> Any:
    """Return torch's module of a kind; None for one that this torch does not know."""
    try:
        return torch.get_device_module(kind)
    except RuntimeError:
        return None
